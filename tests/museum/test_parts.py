"""The bug museum's smaller rooms: codecs, retention, staleness, accumulators, ports, heartbeats; ours beside the exhibit each time."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ttlaunch
from ttlaunch.running.checkpoints.complete import remove_old
from ttlaunch.runtime.model.dropout import seeded_generator
from ttlaunch.runtime.parallel.compression.int8 import BlockInt8
from ttlaunch.runtime.parallel.staleness.protocol import Clock, Staleness
from ttlaunch.runtime.parallel.zero.accumulator import GradientAccumulator

EXHIBITS = Path(__file__).parent / "exhibits"


def exhibit(name):
    """An exhibit as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, EXHIBITS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def through_ours(values_N):
    codec, out_N = BlockInt8(), torch.empty_like(values_N)
    codec.decode(codec.encode(values_N), out_N)
    return out_N


def lost(through, values_N):
    """The largest error of a value, as a share of the largest one; a byte leaves 1/254."""
    return ((through(values_N) - values_N).abs().max() / values_N.abs().max()).item()


def drawn(*key, count=256):
    return torch.randn(count, generator=seeded_generator(*key))


@pytest.mark.parametrize(
    ("name", "values_N", "share"),
    [
        ("bug_01_zero_point_clamped", drawn("all positive") / 10 + 5, 0.8),
        ("bug_01_zero_point_clamped", drawn("all negative") / 10 - 5, 0.8),
        ("bug_02_tiny_range", drawn("tiny") * 1e-8, 0.8),
    ],
    ids=["all positive", "all negative", "tiny"],
)
def test_a_codec_that_loses_most_of_a_gradient_is_caught(name, values_N, share):
    """Bugs 1 and 2, C17: the error bound that the codec promises, for values of one sign and for tiny ones."""
    bound = 1.0001 / 254
    assert lost(through_ours, values_N) <= bound
    assert lost(exhibit(name).through_int8, values_N) > share > bound


def test_a_codec_that_works_row_by_row_is_caught():
    """Bug 3: operations of torch, which are what Python's loop costs, must not grow with the blocks."""
    few, many = drawn("few", count=256 * 10), drawn("many", count=256 * 200)
    assert operations(through_ours, few) == operations(through_ours, many)
    wrong = exhibit("bug_03_row_by_row").through_int8
    assert lost(wrong, many) < 1 / 250
    assert operations(wrong, many) > 10 * operations(wrong, few)


def operations(through, values_N):
    """How many operations of torch a call makes."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        through(values_N)
    return counting.count


def test_a_retention_that_removes_nothing_is_caught(tmp_path):
    """Bug 5, D23: five checkpoints, of which two are to stay."""
    left = {}
    for name, remove in (
        ("ours", remove_old),
        ("exhibit", exhibit("bug_05_retention_ignores_the_prefix").remove_old),
    ):
        for step in (8, 9, 10, 11, 12):
            (tmp_path / name / "checkpoints" / f"step-{step}").mkdir(parents=True)
        remove(tmp_path / name, keep=2, keep_every=None)
        left[name] = sorted(
            int(path.name.removeprefix("step-")) for path in (tmp_path / name / "checkpoints").iterdir()
        )
    assert {"ours": [11, 12], "exhibit": [8, 9, 10, 11, 12]} == left


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_a_bound_that_waits_for_all_is_caught(bound):
    """Bug 13, D4: while nobody else has given anything, the fastest worker may begin K + 1 steps, and no more."""
    assert bound + 1 == lead(Clock(bound))
    assert 1 == lead(exhibit("bug_13_bounded_staleness_waits_for_all").CLOCK(bound))


def lead(clock):
    """Steps that a worker may begin before any mean is whole."""
    while clock.may_begin:
        clock = clock.begin().give()
    return clock.begun


class Ours:
    """Enters a gradient when it is applied."""

    def __init__(self):
        self.staleness = Staleness()

    def look(self, age):
        pass

    def apply(self, age):
        self.staleness.count(age)


def test_statistics_that_count_polls_are_caught():
    """Bug 14, D5: average, maximum and count against an oracle's, for gradients that were looked at 0 to 3 times before."""
    events = [(0, 0), (2, 3), (1, 1), (0, 2)]  # staleness, and how often the loop looked before it could apply
    ages = [age for age, _ in events]
    oracle = (len(ages), sum(age > 0 for age in ages), max(ages), sum(ages) / len(ages))
    assert oracle == statistics(Ours(), events)
    assert (10, 6, 2, 1.0) == statistics(exhibit("bug_14_statistics_count_polls").RECORDER(), events) != oracle


def statistics(recorder, events):
    for age, looks in events:
        for _ in range(looks):
            recorder.look(age)
        recorder.apply(age)
    found = recorder.staleness
    return found.gradients, found.stale, found.maximum, found.average


def test_keys_that_collide_are_caught():
    """Bug 29, C1: two senders, two parameters of one shape, in an order that mixes them."""
    parameters = {"in.weight": torch.zeros(2), "out.weight": torch.zeros(2)}
    sums = {}
    for name, kind in (
        ("ours", GradientAccumulator),
        ("exhibit", exhibit("bug_29_keys_that_collide").ACCUMULATOR),
    ):
        accumulator = kind(parameters, senders=["a", "b"])
        for sender, parameter, value in [
            ("a", "in.weight", 1.0),
            ("a", "out.weight", 10.0),
            ("b", "in.weight", 2.0),
            ("b", "out.weight", 20.0),
        ]:
            accumulator.add(torch.full((2,), value), step=1, parameter=parameter, sender=sender)
        sums[name] = [accumulator.take_sum(step=1, parameter=parameter).tolist() for parameter in parameters]
    assert {"ours": [[3.0, 3.0], [30.0, 30.0]], "exhibit": [[30.0, 30.0], [30.0, 30.0]]} == sums


def test_code_that_unpickles_or_listens_to_everybody_is_caught():
    """Bug 25: no module of ours imports what runs code from bytes, or names the address of all networks."""
    package = Path(ttlaunch.__file__).parent
    recipes = package.parents[0] / "recipes"
    ours = [path for folder in (package, recipes) for path in folder.rglob("*.py")]
    assert ours
    # The launcher writes bytecode for hosts, which run what it sends in any case; it reads none.
    sender = package / "hosts" / "transport" / "pushed.py"
    assert {sender: ["marshal"]} == {path: found for path in ours if (found := dangers(path))}
    assert {"dumps"} == {
        node.attr
        for node in ast.walk(ast.parse(sender.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "marshal"
    }
    assert ["0.0.0.0", "pickle"] == dangers(EXHIBITS / "bug_25_pickle_from_an_open_port.py")


def dangers(path):
    found, text = set(), path.read_text()
    if not re.search(r"pickle|marshal|shelve|0\.0\.0\.0", text):
        return []  # without parsing it, which takes a hundred times as long
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & {"pickle", "marshal", "shelve"}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} & {"pickle", "marshal", "shelve"}
        elif isinstance(node, ast.Constant) and node.value == "0.0.0.0":
            found.add(node.value)
    return sorted(found)
