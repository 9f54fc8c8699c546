"""Workers that take steps of their own come and go: the bits are those of a replay of the journal, in one process.

There are two replays: that of these tests, which shares no code with the run, and the one of `ttlaunch repro`.
"""

from collections import defaultdict

import pytest

from ttlaunch.spec.recipe.recorded_epochs import epochs_of

from .elastic_runs import BEGUN, HAPPENING, KILL, RECIPES, ElasticRun, Kind, gate, in_one_process, validations_of
from .local_replay import replay

pytestmark = pytest.mark.slow

STEPS, EVERY = 12, 4
FAULTS = """
import ttlaunch.runtime.parallel.staleness.local_replica as _local
import ttlaunch.runtime.parallel.staleness.recorded_workers as _steps
from ttlaunch.runtime.elastic.member import ElasticMember as _Member

_wrap(_local.LocalReplica, "step", "before the step")
_wrap(_local.LocalReplica, "agree", "when it has the average")
_wrap(_Member, "regroup", "when members change")
_differentiate, _all_gather, _all_reduce = _steps.differentiate, _local.all_gather, _local.all_reduce


def _in_a_micro_batch(*args, **named):
    _happen("in a micro-batch")
    return _differentiate(*args, **named)


def _in_an_average(*args, **named):
    _happen("in an average")
    _all_gather(*args, **named)


def _in_a_sum(*args, **named):
    _happen("in a sum")
    _all_reduce(*args, **named)
    _happen("after a sum")


_steps.differentiate, _local.all_gather, _local.all_reduce = _in_a_micro_batch, _in_an_average, _in_a_sum
_validation_losses = _local.validation_losses


def _validate(*args, **named):
    found = _validation_losses(*args, **named)
    _happen("in a validation")
    return found


_local.validation_losses = _validate
"""


def config_of(recipe, **training):
    return {
        "training_config": {"steps": STEPS, "validation_interval": 6, "micro_batch_size": 2, **training},
        "transformer_config": {"num_blocks": 1},
        "multihost_config": {"socket_type": "grpc"},
        f"{recipe}_config": {"every": EVERY},
    }


@pytest.fixture
def begin(tmp_path):
    runs = []

    def make(recipe="local_sgd", *, config=None, **options):
        (tmp_path / "run").mkdir()
        kind = Kind(RECIPES / recipe, "worker", "trainer.py", HAPPENING + FAULTS, has_local_steps=True)
        runs.append(ElasticRun(tmp_path / "run", config or config_of(recipe), kind=kind, **options))
        runs[-1].recipe, runs[-1].config = recipe, config or config_of(recipe)
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def journal_of(run):
    return [
        {
            "what": "epoch",
            "step": begin.applied,
            "members": list(begin.numbers),
            "joined": [number for number, applied in begin.behind if applied is None],
        }
        for begin in run.epochs
    ]


def check(run, *, finished):
    """All that finished have the parameters of the replay, and no validation was reported with two losses."""
    assert dict.fromkeys(finished, 0) == {number: run.statuses[number] for number in finished}
    [digest] = {run.digest(number) for number in finished}
    journal = journal_of(run)
    assert replay(run.folder.parent / "replay", run.config, journal, recipe=run.recipe) == digest, journal
    epochs, again = epochs_of(journal, done=0, total=STEPS), run.folder.parent / "again"
    assert in_one_process(again, run.config, recipe=RECIPES / run.recipe, epochs=epochs)[0] == digest, journal
    losses = defaultdict(set)
    for records in run.records.values():
        for step, loss in validations_of(records).items():
            losses[step].add(loss)
    assert {0: 1, 6: 1, STEPS: 1} == {step: len(found) for step, found in losses.items()}


def test_workers_that_nothing_happens_to_end_with_the_bits_of_the_replay(begin):
    run = begin("diloco", first=3).finish()
    check(run, finished=[0, 1, 2])
    assert 1 == len(run.epochs)


@pytest.mark.parametrize(
    ("recipe", "place", "step"),
    [
        ("local_sgd", "before the step", 6),
        ("local_sgd", "in an average", 8),
        ("diloco", "in a sum", 8),
        ("diloco", "when it has the average", 4),
        ("local_sgd", "in a validation", 6),
        ("local_sgd", "in a sum", STEPS),
    ],
)
def test_when_a_worker_is_killed_the_others_end_with_the_bits_of_the_replay(begin, recipe, place, step):
    run = begin(recipe, first=3, faults={(1, place, step): KILL}).finish()
    assert -9 == run.statuses[1]
    check(run, finished=[0, 2])
    assert (0, 2) == run.epochs[-1].numbers


@pytest.mark.parametrize(("recipe", "step"), [("local_sgd", 4), ("diloco", 6)])
def test_a_worker_that_comes_begins_with_the_agreed_weights(begin, recipe, step):
    faults = {(0, "before the step", step): gate("joined")}
    run = begin(recipe, first=2, later=1, faults=faults)
    run.until(lambda run: run.applied(0) == step - 1)
    run.start_all(2)
    run.open("joined")
    run.finish()
    check(run, finished=[0, 1, 2])
    assert (0, 1, 2) == run.epochs[-1].numbers
    assert run.epochs[-1].applied >= step - 1


def test_workers_leave_and_come_and_the_bits_are_those_of_the_replay(begin):
    """4 -> 2 -> 3 -> 1 -> 3."""
    gates = {(0, 3): "two", (0, 6): "three", (4, 9): "one", (4, 11): "four"}
    faults = {(number, "before the step", step): gate(name) for (number, step), name in gates.items()}
    run = begin(first=4, later=3, faults=faults)
    run.until(lambda run: run.applied(0) == 2)
    run.ask_to_leave(1)
    run.kill(2)
    run.open("two")
    run.until_members(0, 3)
    run.start_all(4)
    run.open("three")
    run.until_members(0, 3, 4)
    run.ask_to_leave(0)
    run.ask_to_leave(3)
    run.open("one")
    run.until_members(4)
    run.start_all(5, 6)
    run.open("four")
    run.finish()
    assert {1: 0, 2: -9, 0: 0, 3: 0} == {number: run.statuses[number] for number in (1, 2, 0, 3)}
    check(run, finished=[4, 5, 6])


def test_who_has_the_average_of_a_stopped_run_gives_it_to_those_that_lost_a_worker_in_it(begin):
    """Otherwise the others would make it anew without those that have it, and end with other weights."""
    lost = "from ttlaunch.runtime.comm.protocol import PeerLostError\nraise PeerLostError('worker 2 is gone')"
    faults = {
        (0, "before the step", 8): BEGUN + gate("ordered"),
        (1, "before the step", 8): BEGUN,
        (2, "before the step", 8): BEGUN,
        # Worker 2 dies when 0 has all that it sent, and 1 has not.
        (1, "after a sum", 8): gate("averaged") + lost,
        (2, "after a sum", 8): gate("averaged") + KILL,
    }
    run = begin(first=3, minimum=3, faults=faults)
    run.until_begun(0, 1, 2)
    assert 8 == run.order_to_stop(0, 1, 2)
    run.open("ordered")
    run.until(lambda run: run.applied(0) == 8)
    run.open("averaged")
    run.finish()
    assert {0: 0, 1: 0, 2: -9} == run.statuses
    assert run.digest(0) == run.digest(1)
    assert [(0, (0, 1, 2)), (8, (0, 1))] == [(epoch.applied, epoch.numbers) for epoch in run.epochs]
