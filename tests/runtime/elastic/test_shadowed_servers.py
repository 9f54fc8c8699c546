"""Runs whose servers have shadows, as real processes: whoever is killed wherever, the parameters are those of one process."""

from pathlib import Path

import pytest

from ttlaunch.membership.coordinator_state import Phase

from .elastic_runs import KILL, ElasticRun, Kind, check, gate, in_one_process, losses_of

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[3] / "recipes"
FAULTS = """

import os as _os, signal as _signal
import ttlaunch.runtime.parallel.shared_validation as _shared
from ttlaunch.runtime.parallel.shadowed.means import MeanMaker as _Maker
from ttlaunch.runtime.parallel.shadowed.nodes import NodeSender as _Sender
from ttlaunch.runtime.parallel.shadowed.kept_state import KeptState as _Kept
from ttlaunch.runtime.parallel.shadowed.update import ShadowedUpdate as _Update
from ttlaunch.runtime.training.loop import TrainingLoop as _Loop

_number, _faults = int(_os.environ["TTLAUNCH_RANK"]), FAULTS
_at = {"step": 0}


def _happen(place):
    code = _faults.get((_number, place, _at["step"])) or _faults.get((_number, place, "every step"))
    if code:
        exec(code, globals())


def _wrap(cls, name, place, *, after=False):
    inner = getattr(cls, name)

    def outer(self, *args, **named):
        if cls is _Update and name == "step":
            _at["step"] = args[0]
        if not after:
            _happen(place)
        found = inner(self, *args, **named)
        if after:
            _happen(place)
        return found

    setattr(cls, name, outer)


_wrap(_Update, "step", "before the step")
_wrap(_Sender, "expect", "in a backward pass")
_wrap(_Maker, "make", "before the mean")
_wrap(_Maker, "make", "with the mean", after=True)
_wrap(_Update, "_update", "before the update")
_wrap(_Update, "_update", "after the update", after=True)
_wrap(_Update, "_send_weights", "when the weights are sent", after=True)
_wrap(_Update, "_receive_weights", "before the weights")
_wrap(_Update, "_receive_weights", "with the weights", after=True)
_wrap(_Kept, "give", "when it should give", after=True)
_wrap(_Loop, "end_step", "at the end of the step")
_validation_losses = _shared.validation_losses


def _validate(*args, **named):
    found = _validation_losses(*args, **named)
    _happen("in a validation")
    return found


_shared.validation_losses = _validate
"""
TIERS = Kind(HERE / "hierarchical_parallel", "member", "elastic.py", FAULTS, slots=1, servers=2)
SERVER = Kind(HERE / "sync_ps", "member", "elastic.py", FAULTS, slots=1, servers=1)
SERVERS = Kind(HERE / "sync_ps", "member", "elastic.py", FAULTS, slots=2, servers=2)
CONFIG = {
    "training_config": {"steps": 10, "validation_interval": 4, "micro_batch_size": 2},
    "transformer_config": {"num_blocks": 1},
    "multihost_config": {"socket_type": "grpc"},
}
OPTIMIZER, AGGREGATOR, WORKER = 0, 1, 2


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The digest of the parameters that one process trains, and its losses."""
    return in_one_process(tmp_path_factory.mktemp("alone") / "run", CONFIG, recipe=TIERS.folder)


@pytest.fixture
def begin(tmp_path):
    runs = []

    def make(*, sections=(), kind=TIERS, **options):
        runs.append(ElasticRun(tmp_path, CONFIG | dict(sections), kind=kind, minimum=3, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def test_optimizer_aggregator_and_workers_train_to_the_bits_of_one_process(begin, expected):
    run = begin(first=4).finish()
    check(run, expected, finished=[0, 1, 2, 3])
    assert expected[1] == losses_of(run.records[OPTIMIZER])
    assert {(0, 1, 2, 3)} == {begin.numbers for begin in run.epochs}
    assert all(begin.blocks[:2] == ((0, 0), (0, 0)) for begin in run.epochs)


@pytest.mark.parametrize(
    ("number", "place"),
    [
        (OPTIMIZER, "with the mean"),
        (OPTIMIZER, "after the update"),
        (AGGREGATOR, "before the update"),
        (AGGREGATOR, "after the update"),
        (AGGREGATOR, "when the weights are sent"),
        (WORKER, "before the step"),
        (WORKER, "in a backward pass"),
        (WORKER, "before the weights"),
        (WORKER, "with the weights"),
    ],
)
def test_whoever_is_killed_the_others_go_on_with_the_same_bits(begin, expected, number, place):
    run = begin(first=4, faults={(number, place, 5): KILL}).finish()
    assert -9 == run.statuses[number]
    others = [one for one in range(4) if one != number]
    check(run, expected, finished=others)
    assert set(others) == set(run.epochs[-1].numbers)
    taken = WORKER if number in {OPTIMIZER, AGGREGATOR} else number
    assert number == taken or run.epochs[-1].numbers.index(taken) == number  # a worker has taken the place


@pytest.mark.parametrize(
    ("kind", "number", "place"),
    [
        (SERVER, 0, "with the mean"),
        (SERVER, 0, "when the weights are sent"),
        (SERVER, 1, "before the mean"),
        (SERVERS, 0, "with the mean"),
        (SERVERS, 1, "after the update"),
    ],
)
def test_a_server_or_its_shadow_or_a_worker_is_killed(begin, expected, kind, number, place):
    sections = {"sync_ps_config": {"num_servers": kind.servers, "polyak_interval": 2}}
    run = begin(first=4, kind=kind, sections=sections, faults={(number, place, 5): KILL}).finish()
    assert -9 == run.statuses[number]
    others = [one for one in range(4) if one != number]
    check(run, expected, finished=others)
    last = run.epochs[-1]
    assert set(others) == set(last.numbers)
    assert [(0, 0)] * kind.servers == list(last.blocks[: kind.servers])


def test_without_optimizer_and_aggregator_the_state_is_gone(begin):
    run = begin(first=4, faults={(number, "before the update", 5): KILL for number in (OPTIMIZER, AGGREGATOR)})
    run.until(lambda run: {OPTIMIZER, AGGREGATOR} <= run.statuses.keys(), may_strand=True)
    run.until(lambda run: run.state.phase is Phase.STRANDED, may_strand=True)
    assert run.state.lacks_slots


def test_a_joiner_works_and_then_takes_the_place_of_the_optimizer(begin, expected):
    faults = {(AGGREGATOR, "before the update", 4): gate("joined"), (OPTIMIZER, "before the update", 7): KILL}
    run = begin(first=3, later=2, faults=faults)
    run.until(lambda run: run.applied(WORKER) == 3)
    run.start_all(3, 4)
    run.kill(WORKER)
    run.open("joined")
    run.finish()
    check(run, expected, finished=[1, 3, 4])
    assert (3, 1, 4) == run.epochs[-1].numbers
