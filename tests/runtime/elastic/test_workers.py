"""Workers of an elastic run as real processes, with the coordinator's real state machine in the test."""

import json

import pytest

from ttlaunch import contract

from .elastic_runs import (
    BEGUN,
    KILL,
    KILL_BEFORE_THE_LAST_SHARD,
    SLOW,
    ElasticRun,
    calm,
    check,
    gate,
    in_one_process,
    losses_of,
)

pytestmark = pytest.mark.slow

STEPS = 12
KILL_AFTER_THE_LAST_STEP = f"""
import json
if _os.path.exists({contract.ENDING_FILE!r}):
    with open({contract.ENDING_FILE!r}) as file:
        if _at["step"] == json.load(file)["after_step"]:
            {KILL}
"""
CONFIG = {
    "training_config": {"steps": STEPS, "validation_interval": 4, "micro_batch_size": 2},
    "transformer_config": {"num_blocks": 1},
    "multihost_config": {"socket_type": "grpc"},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The digest of the parameters that one process trains, and its losses."""
    return in_one_process(tmp_path_factory.mktemp("alone") / "run", CONFIG)


@pytest.fixture
def begin(tmp_path):
    runs = []

    def make(*, sections=(), **options):
        runs.append(ElasticRun(tmp_path, CONFIG | dict(sections), **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def test_workers_that_nothing_happens_to_train_to_the_bits_of_one_process(begin, expected):
    run = begin(first=3).finish()
    check(run, expected, finished=[0, 1, 2])
    assert {(0, 1, 2)} == {begin.numbers for begin in run.epochs}  # a loaded machine divides the work anew
    assert [expected[1]] * 3 == [losses_of(run.records[number]) for number in range(3)]
    counts = [any("tokens" in record for record in run.of_kind(number, contract.KIND_STEP)) for number in range(3)]
    assert [True, False, False] == counts  # so that no token counts twice
    steps = {record["step"]: record["tokens"] for record in run.of_kind(0, contract.KIND_STEP)}
    own = [{record["step"]: record["own_tokens"] for record in run.of_kind(n, contract.KIND_STEP)} for n in range(3)]
    assert steps == {step: sum(member[step] for member in own) for step in steps}
    assert all(0 < member[step] < tokens for member in own for step, tokens in steps.items())


@pytest.mark.parametrize(
    "place",
    [
        "before the step",
        "in a backward pass",
        "while buckets are under way",
        "after the update",
        "in a validation",
    ],
)
def test_when_a_worker_is_killed_the_others_go_on_with_the_same_bits(begin, expected, place):
    step = 8 if place == "in a validation" else 6
    run = begin(first=3, faults={(1, place, step): KILL}).finish()
    assert -9 == run.statuses[1]
    check(run, expected, finished=[0, 2])
    assert (0, 2) == run.epochs[-1].numbers


def given_to(run, number):
    """What a worker says that others have given it, and as how many whole states and means."""
    reports = [record for record in run.of_kind(number, contract.KIND_MEMBER) if "given" in record]
    return dict(map(tuple, reports[-1]["given"])), tuple(reports[-1]["taken"])


def is_even(given):
    return max(given.values()) <= 1.05 * sum(given.values()) / len(given)


def test_a_worker_that_comes_gets_the_state_while_the_others_go_on(begin, expected):
    run = begin(first=2, later=1, faults={(0, "before the step", "every step"): calm("joined")})
    run.until(lambda run: run.applied(0) == 2)
    run.start(2)
    run.until_members(0, 1, 2)
    run.open("joined")
    run.finish()
    check(run, expected, finished=[0, 1, 2])
    [joined] = [epoch for epoch in run.epochs if epoch.epoch == 2]
    assert joined.behind in {(), ((2, joined.applied - 1),)}
    given, (states, means) = given_to(run, 2)
    assert ({0, 1}, 1, True) == (given.keys(), states, is_even(given))
    assert 2 + means <= joined.applied, (
        "the others had two steps when it started; how soon it asked, the machine decides"
    )
    reported = {step for step in losses_of(run.records[2]) if step <= joined.applied}
    made_up = (
        {joined.applied} if joined.behind else set()
    )  # it takes the mean of that step itself, and so knows the loss
    assert reported <= made_up, "it reports no steps of others"


def test_a_worker_that_comes_takes_part_at_once_where_too_few_are_left(begin, expected):
    """Then it gets an equal part of the state from each member when the epoch begins."""
    run = begin(first=3, later=1, minimum=3, faults={(1, "before the step", 4): KILL})
    run.until(lambda run: 1 in run.statuses)
    run.start(3)
    run.finish()
    check(run, expected, finished=[0, 2, 3])
    assert [((3, None),)] == [epoch.behind for epoch in run.epochs if epoch.behind]
    given, taken = given_to(run, 3)
    assert ({0, 2}, (1, 0), True) == (given.keys(), taken, is_even(given))


def test_a_giver_that_dies_while_a_worker_follows_holds_nobody_up(begin, expected):
    faults = {(0, "before the step", "every step"): calm("joined"), (1, "when a follower asks", "every step"): KILL}
    run = begin(first=3, later=1, faults=faults)
    run.until(lambda run: run.applied(0) == 1)
    run.start(3)
    run.until_members(0, 2, 3)
    run.open("joined")
    run.finish()
    assert -9 == run.statuses[1]
    check(run, expected, finished=[0, 2, 3])


def test_a_worker_that_comes_counts_the_validations_of_the_others(begin, tmp_path_factory):
    """Otherwise it would not stop with them when validations no longer improve."""
    never = {"early_stop_patience": 4, "early_stop_min_delta": 10.0, "steps": 60}
    sections = {"training_config": CONFIG["training_config"] | never}
    run = begin(first=1, later=1, faults={(0, "before the step", "every step"): calm("joined")}, sections=sections)
    run.until(lambda run: run.applied(0) == 5)
    run.start(1)
    run.until_members(0, 1)
    run.open("joined")
    run.finish()
    check(run, in_one_process(tmp_path_factory.mktemp("stopped") / "run", CONFIG | sections), finished=[0, 1])


def test_a_worker_that_falls_too_far_behind_takes_the_state_again_and_then_takes_part(begin, tmp_path_factory):
    """It is held up before its first step, of which the others keep the mean for only one step more."""
    sections = {"training_config": CONFIG["training_config"] | {"steps": 40}}
    few = "\nimport ttlaunch.runtime.elastic.feed as _feed\n_feed.LEAST_MEANS, _feed.MEANS_BYTES = 1, 0"
    faults = {
        (0, "before the step", "every step"): calm("joined", 1.5) + few,
        (1, "before the step", "every step"): gate("far behind"),
    }
    run = begin(first=1, later=1, faults=faults, sections=sections)
    run.until(lambda run: run.applied(0) == 2)
    run.start(1)
    run.until(lambda run: any("given" in record for record in run.records[1]))
    reached = run.applied(0)
    run.until(lambda run: run.applied(0) == reached + 5)
    run.open("far behind")
    run.until_members(0, 1)
    run.open("joined")
    run.finish()
    check(run, in_one_process(tmp_path_factory.mktemp("far") / "run", CONFIG | sections), finished=[0, 1])
    _, (states, _) = given_to(run, 1)
    assert states > 1


def test_workers_leave_and_come_and_the_bits_stay(begin, tmp_path_factory):
    """4 -> 2 -> 3 -> 1 -> 4 in 60 steps."""
    faults = {(number, "before the step", "every step"): calm("all are there", 1.5) for number in (0, 4)}
    sections = {"training_config": CONFIG["training_config"] | {"steps": 60}}
    run = begin(first=4, later=4, faults=faults, sections=sections)
    run.until(lambda run: run.applied(0) == 2)
    run.ask_to_leave(1)
    run.kill(2)
    run.until_members(0, 3)
    run.start(4)
    run.until_members(0, 3, 4)
    run.ask_to_leave(0)
    run.ask_to_leave(3)
    run.until_members(4)
    for number in (5, 6, 7):
        run.start(number)
    run.until_members(4, 5, 6, 7)
    run.open("all are there")
    run.finish()
    assert {1: 0, 2: -9, 0: 0, 3: 0} == {number: run.statuses[number] for number in (1, 2, 0, 3)}
    expected = in_one_process(tmp_path_factory.mktemp("sixty") / "run", CONFIG | sections)
    check(run, expected, finished=[4, 5, 6, 7])


def test_a_worker_that_lacks_one_step_gets_its_mean_from_another(begin, expected):
    """Worker 0 dies when worker 1 has all shards of the mean, and worker 2 lacks one."""
    run = begin(first=3, faults={(0, "while buckets are under way", 6): KILL_BEFORE_THE_LAST_SHARD}).finish()
    check(run, expected, finished=[1, 2])
    assert [((2, 5),)] == [begin.behind for begin in run.epochs if begin.behind]


def test_a_worker_that_lacks_one_step_gets_the_whole_state_if_nobody_has_the_mean(begin, expected):
    """Worker 1, which alone has applied a step, has no mean of it to give, as one that has got its weights from others."""
    faults = {
        (0, "while buckets are under way", 6): KILL_BEFORE_THE_LAST_SHARD,
        (1, "when it is about to give", "every step"): "one.mean = None",
    }
    run = begin(first=3, faults=faults).finish()
    check(run, expected, finished=[1, 2])
    assert [((2, 5),)] == [begin.behind for begin in run.epochs if begin.behind]
    assert any("bytes of state from worker-0001" in record["text"] for record in run.of_kind(2, contract.KIND_NOTE))


def test_a_mean_that_the_next_step_has_begun_to_overwrite_is_given_to_nobody(begin):
    faults = {
        (0, "while buckets are under way", 6): KILL_BEFORE_THE_LAST_SHARD,
        (2, "when it should give", 6): "print('kept', one.mean and one.mean.step)",
    }
    run = begin(first=3, faults=faults).finish()
    assert "kept None" == run.output(2).strip()


def test_a_member_that_dies_while_a_joiner_needs_it_is_replaced_by_the_others(begin, expected):
    faults = {(0, "before the step", 4): KILL, (1, "when it should give", 4): KILL}
    run = begin(first=3, later=2, minimum=3, faults=faults)
    run.until(lambda run: 0 in run.statuses)
    run.start(3)
    run.until(lambda run: 1 in run.statuses)
    run.start(4)
    run.finish()
    assert {0: -9, 1: -9} == {number: run.statuses[number] for number in (0, 1)}
    check(run, expected, finished=[2, 3, 4])


def test_a_slow_worker_gets_fewer_micro_batches(begin, tmp_path_factory):
    sections = {"training_config": CONFIG["training_config"] | {"steps": 30}}
    run = begin(first=2, faults={(1, "in a micro-batch", "every step"): SLOW}, sections=sections).finish()
    check(run, in_one_process(tmp_path_factory.mktemp("longer") / "run", CONFIG | sections), finished=[0, 1])
    (first, last), (_, end) = run.epochs[-1].blocks
    assert last - first > 2 * (end - last)


def test_a_checkpoint_comes_from_whoever_is_the_first_member(begin, expected):
    run = begin(first=3, faults={(0, "before the step", 6): KILL}, sections={"checkpoint_config": {"interval": 4}})
    run.finish()
    check(run, expected, finished=[1, 2])
    found = {}
    for path in run.folder.glob("checkpoints/*/rank-*.json"):
        found[path.parent.name, path.stem] = json.loads(path.read_text())["owners"]
    assert {("step-4.tmp", "rank-0"): [0], ("step-8.tmp", "rank-1"): [1], ("step-12.tmp", "rank-1"): [1]} == found


@pytest.mark.parametrize("place", ["in a micro-batch", "in a validation"])
def test_a_connection_that_breaks_between_two_that_live_is_opened_anew(begin, expected, place):
    lost = "from ttlaunch.runtime.comm.protocol import PeerLostError\nraise PeerLostError('worker 0 is gone')"
    once = f"if not _at.get('broke'):\n    _at['broke'] = True\n    {lost.replace(chr(10), chr(10) + '    ')}"
    run = begin(first=2, faults={(1, place, 8): once}).finish()
    check(run, expected, finished=[0, 1])
    assert [(0, 1), (0, 1)] == [epoch.numbers for epoch in run.epochs]


def stop(run):
    """Order all workers to stop before step 5, and return the last step."""
    run.until_begun(0)  # earlier, the last step could be the one before
    last = run.order_to_stop(0, 1, 2)
    run.open("stopping")
    run.finish()
    return last


def test_all_members_stop_after_the_same_step(begin):
    run = begin(first=3, faults={(0, "before the step", 5): BEGUN + gate("stopping")})
    last = stop(run)
    assert {0: 0, 1: 0, 2: 0} == run.statuses
    assert 1 == len({run.digest(number) for number in range(3)})
    assert {last} == {run.of_kind(number, contract.KIND_STEP)[-1]["step"] for number in range(3)}


def test_members_that_have_stopped_report_their_parameters_although_another_one_dies(begin):
    faults = {
        (0, "before the step", 5): BEGUN + gate("stopping"),
        (2, "after the update", "every step"): KILL_AFTER_THE_LAST_STEP,
    }
    run = begin(first=3, faults=faults)
    stop(run)
    assert {0: 0, 1: 0, 2: -9} == run.statuses
    assert run.digest(0) == run.digest(1)
