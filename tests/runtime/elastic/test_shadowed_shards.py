"""Runs of `zero` whose members come and go, as real processes: whoever is killed wherever, the parameters are those of one process."""

from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.membership.coordinator_state import Phase
from ttlaunch.membership.slots import divide_slots
from ttlaunch.running.report import combine_digests

from .elastic_runs import HAPPENING, KILL, ElasticRun, Kind, check, gate, in_one_process, losses_of

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[3] / "recipes" / "zero"
FAULTS = """
from ttlaunch.runtime.parallel.zero.elastic import ElasticShards as _Shards
from ttlaunch.runtime.parallel.zero.shadowed_gradients import ShadowedGradients as _Gradients
from ttlaunch.runtime.parallel.zero.shared_norms import SharedNorms as _Norms

_make = _Shards.make


def _make_step(self, step, gradient):
    _at["step"] = step
    _happen("before the step")
    return _make(self, step, gradient)


_Shards.make = _make_step
_wrap(_Gradients, "reduce", "when a layer's sums leave", after=True)
_wrap(_Gradients, "_finish", "before a mean")
_wrap(_Gradients, "_finish", "when a mean is made", after=True)
_wrap(_Norms, "squares", "before the norms")
_wrap(_Shards, "_update", "before the update")
_wrap(_Shards, "_update", "after the update", after=True)
_wrap(_Shards, "_take", "when it has its slots", after=True)
"""
SHARDS = Kind(RECIPE, "worker", "elastic.py", HAPPENING + FAULTS, slots=0)
REPLICAS = Kind(RECIPE, "worker", "elastic.py", HAPPENING + FAULTS)
CONFIG = {
    "training_config": {"steps": 8, "validation_interval": 4, "micro_batch_size": 2},
    "transformer_config": {"num_blocks": 1},
    "multihost_config": {"socket_type": "grpc"},
}
TELL_ONLY_THE_FIRST = """
def _isend(tensor, *, dest, tag=0, inner=one._ctx.isend, sent=[]):
    # Worker 0 learns this worker's part of the norm, and can make the update; nobody else does.
    if dest == 0:
        sent.append(inner(tensor, dest=dest, tag=tag))
        return sent[-1]
    sent[-1].wait()
    import time
    time.sleep(0.5)
    _os.kill(_os.getpid(), _signal.SIGKILL)
one._ctx.isend = _isend
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The digest of the parameters that one process trains, its losses, and those of its validations."""
    return in_one_process(tmp_path_factory.mktemp("alone") / "run", CONFIG, recipe=RECIPE)


@pytest.fixture
def begin(tmp_path):
    runs = []

    def make(*, stage=3, sections=(), **options):
        config = CONFIG | {"zero_config": {"stage": stage}} | dict(sections)
        runs.append(ElasticRun(tmp_path, config, kind=SHARDS if stage else REPLICAS, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def digest_of(run, number):
    """The digest of a worker's report, which has a record for each layer."""
    found = {}
    for record in run.of_kind(number, contract.KIND_PARAMETERS):
        for name, digest in record["digests"].items():
            assert found.setdefault(name, digest) == digest
    return combine_digests([found])[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_members_that_nothing_happens_to_train_to_the_bits_of_one_process(begin, expected, stage):
    run = begin(first=3, stage=stage).finish()
    check(run, expected, finished=[0, 1, 2], digest_of=digest_of)
    assert [expected[1]] * 3 == [losses_of(run.records[number]) for number in range(3)]


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        (1, "after the update"),
        (2, "when a layer's sums leave"),
        (3, "after the update"),
        (3, "when a layer's sums leave"),
    ],
)
def test_at_every_stage_the_shadow_of_a_killed_owner_goes_on_with_the_same_bits(begin, expected, stage, place):
    run = begin(first=3, stage=stage, faults={(1, place, 5): KILL}).finish()
    assert -9 == run.statuses[1]
    check(run, expected, finished=[0, 2], digest_of=digest_of)


@pytest.mark.parametrize("place", ["before a mean", "when a mean is made", "before the norms"])
def test_whenever_an_owner_is_killed_the_others_go_on_with_the_same_bits(begin, expected, place):
    run = begin(first=3, faults={(1, place, 5): KILL}).finish()
    assert -9 == run.statuses[1]
    check(run, expected, finished=[0, 2], digest_of=digest_of)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_one_member_has_made_is_made_up_by_the_others_from_its_norm(begin, expected, stage):
    run = begin(first=3, stage=stage, faults={(2, "before the norms", 5): TELL_ONLY_THE_FIRST}).finish()
    check(run, expected, finished=[0, 1], digest_of=digest_of)
    [after] = [epoch for epoch in run.epochs if epoch.behind]
    assert (5, ((1, 4),), (0,)) == (after.applied, after.behind, after.holders)


def test_an_owner_and_its_shadow_that_are_killed_together_leave_a_run_that_knows_why(begin):
    shadow = divide_slots(["localhost"] * 4).shadows[1]
    run = begin(first=4, faults={(number, "before the norms", 5): KILL for number in (1, shadow)})
    run.until(lambda run: run.state.phase is Phase.STRANDED, may_strand=True)
    assert run.state.lacks_slots


def test_a_worker_that_comes_gets_its_slots_and_gives_them_on(begin, expected):
    run = begin(first=2, later=2, faults={(0, "before the step", 3): gate("go"), (1, "before the step", 3): gate("go")})
    run.start_all(2, 3)
    run.open("go")
    run.until(lambda run: run.applied(2) >= 5)  # after the validation of step 4, which member 0 reports
    run.kill(0)
    run.finish()
    check(run, expected, finished=[1, 2, 3], digest_of=digest_of)


def test_members_leave_and_come_and_the_bits_stay(begin, expected):
    faults = {(number, "before the step", step): gate(f"step-{step}") for number in range(5) for step in (3, 6)}
    run = begin(first=4, later=1, faults=faults)
    run.until(lambda run: run.applied(0) == 2)
    run.ask_to_leave(1), run.ask_to_leave(2)  # one of them shadows the other one's slot
    run.open("step-3")
    run.until_members(0, 3)
    run.until(lambda run: run.applied(0) == 5)
    run.start_all(4)
    run.open("step-6")
    run.until_members(0, 3, 4)
    run.finish()
    check(run, expected, finished=[0, 3, 4], digest_of=digest_of)


def test_a_member_that_dies_while_slots_are_cut_anew_is_replaced_by_its_shadow(begin, expected):
    """Member 0 has the slot that member 3 owned, and member 2 that of member 1: every slot is still at somebody."""
    faults = {(1, "before the step", 5): KILL, (3, "when it has its slots", 5): KILL}
    run = begin(first=4, faults=faults).finish()
    alive = [number for number, status in run.statuses.items() if status == 0]
    assert len(alive) >= 2
    check(run, expected, finished=alive, digest_of=digest_of)


def test_a_run_without_micro_batches_to_share_goes_on_with_one_member(begin, expected):
    run = begin(first=2, stage=2, faults={(0, "after the update", 4): KILL}).finish()
    check(run, expected, finished=[1], digest_of=digest_of)
