"""What a hostile host answers to doctor is reported of that host, and the answers of the others stand."""

import copy
import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.security.hostile import HostileHost, raw_frame
from ttlaunch import contract
from ttlaunch.diagnostics import Source, render
from ttlaunch.engines.choose import ENGINES
from ttlaunch.errors import Trouble
from ttlaunch.hosts.doctor.checks import check_everything
from ttlaunch.hosts.doctor.probe_hosts import Question, probe_all
from ttlaunch.hosts.doctor.troubles import explain_troubles
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.model import Topology

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CLOCK = contract.pack_frame({"kind": "clock", "time": 1_790_000_000.0})
ENGINE = ENGINES[0].signature
COUNT = 400


@pytest.fixture
def fuzz(monkeypatch):
    """The modules `fuzz` and `fuzz_hosts` of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("fuzz"), importlib.import_module("fuzz_hosts")
    for name in {name for name in sys.modules if name.startswith("fuzz")} - before:
        del sys.modules[name]


@pytest.fixture
def doctor(fuzz):
    """`doctor(answer)`: what is said of the hosts `good` and `evil`, of which the second one answers so, and the facts."""
    facts = fuzz[1].FACTS
    good = HostileHost("good", lambda: CLOCK + raw_frame(json.dumps({"kind": "facts", "facts": facts}).encode()))
    hosts, _ = parse_hosts(Source("hosts.txt", "good slots=1\nevil slots=1\n"))
    topology = Topology("lab", None, tuple(hosts))

    def ask(answer):
        evil = HostileHost("evil", lambda: CLOCK + answer)
        found = probe_all([good.transport, evil.transport], Question(("python3",), "~/x", ENGINE), timeout_s=10.0)
        diagnostics = explain_troubles(list(found.errors.values()), topology=topology, answered=found.seconds)
        diagnostics += check_everything(found.facts, topology=topology, engine=ENGINE)
        return render(diagnostics), found

    return ask


def answer_with(facts, **changes):
    """The frame of a probe's answer, of which some sections are other ones."""
    changed = {**copy.deepcopy(facts), **changes}
    return raw_frame(json.dumps({"kind": "facts", "facts": changed}).encode())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "answer",
    [
        raw_frame(b'{"kind": "facts", "facts": {"uid": ' + b"9" * 5000 + b"}}"),
        raw_frame(b'{"kind": "facts", "facts": {"uid": ' + b"9" * 4000 + b"}}"),
        raw_frame(b'{"kind": "facts", "facts": ' + b"[" * 200_000),
        raw_frame(b'{"kind": "facts", "facts": {"a": [' + b"{}," * 1_000_000 + b"0]}}"),
        raw_frame(b"\xff\xfe"),
        raw_frame(b"[]"),
        b"Welcome!\n" * 100,
        (2**32 - 1).to_bytes(4, "big") * 2,
    ],
    ids=["5000 digits", "4000 digits", "deep", "a million values", "no text", "a list", "a greeting", "gigabytes"],
)
def test_an_answer_that_is_none_is_reported_of_its_host_and_the_other_ones_stands(doctor, answer):
    text, found = doctor(answer)
    assert "host `evil` did not answer our questions to the end" in text
    assert (["good"], ["evil"]) == (list(found.facts), list(found.errors))
    assert Trouble.SCRIPT is found.errors["evil"].trouble


def test_a_version_of_thousands_of_digits_is_the_evil_hosts_own_mistake(fuzz, doctor):
    mpi = {"mpirun": "/m", "prefix": "/", "library": None, "abi": None}
    text, found = doctor(answer_with(fuzz[1].FACTS, mpi={**mpi, "says": "mpirun (Open MPI) " + "5" * 5000}))
    assert ["good", "evil"] == list(found.facts)
    assert "host `evil` has an mpirun that cannot be used" in text


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("cpu", {"model": "x", "architecture": "x", "count": 8, "usable": float("nan"), "flags": []}),
        ("cpu", {"model": "x", "architecture": "x", "count": 8, "usable": 1e400, "flags": []}),
        ("leftovers", [{"pid": 5, "run_id": "r", "age_s": float("-inf"), "command": "c"}]),
    ],
)
def test_a_number_that_is_not_finite_is_refused_with_its_place(fuzz, doctor, section, value):
    text, found = doctor(answer_with(fuzz[1].FACTS, **{section: value}))
    assert ["good"] == list(found.facts)
    assert f"`{section}." in found.errors["evil"].evidence
    assert "expected a finite number" in text


def test_addresses_by_the_thousand_are_refused(fuzz, doctor):
    one = fuzz[1].FACTS["interfaces"][0]
    many = [{**one, "address": f"10.{n // 256}.{n % 256}.1/24"} for n in range(5000)]
    text, _ = doctor(answer_with(fuzz[1].FACTS, interfaces=many))
    assert "it has 5000 addresses, expected 512 at most" in text


@pytest.mark.timeout(200)
@pytest.mark.parametrize("target", ["frames", "records", "probes", "pretrained"])
def test_a_few_hundred_mutated_cases_break_nothing(fuzz, target):
    """`python benchmarks/fuzz.py` gives 100,000 of them."""
    assert [] == fuzz[0].run(target, seed=2, first=100, count=COUNT)
    assert [] == fuzz[0].run(target, seed=2, first=fuzz[0].BOMB_EVERY - 1, count=1)


def test_a_case_is_made_from_its_number_alone(fuzz):
    target = fuzz[0].TARGETS["probes"]()
    contents = [fuzz[0].case("probes", target, seed=1, number=number).content for number in (7, 8, 7)]
    assert contents[0] == contents[2] != contents[1]
