"""Which rank an audit calls wrong, from what all ranks have found; and what is read of their records."""

import pytest

from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.audits import AuditClaim, AuditVote
from ttlaunch.running.audits import AuditWatch, Block, judge
from ttlaunch.running.failures.audited import audited_failure
from ttlaunch.running.runs.facts import RunFacts

RIGHT, WRONG, OTHER = ("1" * 64, "2" * 64, "3" * 64)
HOSTS = {0: "a", 1: "b", 2: "c", 3: "d"}
ALIKE = dict.fromkeys(HOSTS, "AVX2")


def vote(digest, first="", parts="", **more):
    known = {"time": 1.0, "step": 4, "of": 0, "unit": "micro-batch", "begin": 6}
    return AuditVote(digest=digest, parts=parts, first=first, **(known | more))


def judged(votes, *, own=WRONG, found=RIGHT, hosts=HOSTS, computes=ALIKE):
    """Rank 0 owns the block, rank 1 has audited it; each rank then found what `votes` says."""
    block = Block(4, 0, 1, own, found, computes)
    return judge(block, {rank: vote(digest) for rank, digest in votes.items()}, hosts=hosts)


@pytest.mark.parametrize(
    ("votes", "claims", "wrong", "against", "contradicts_itself"),
    [
        ({0: RIGHT, 1: RIGHT, 2: RIGHT}, (WRONG, RIGHT), (0,), (1, 2), True),  # a single wrong gradient
        ({0: WRONG, 1: RIGHT, 2: RIGHT}, (WRONG, RIGHT), (0,), (1, 2), False),  # always wrong
        ({0: RIGHT, 1: RIGHT, 2: RIGHT}, (RIGHT, WRONG), (1,), (0, 2), True),  # the auditor was wrong
        ({0: OTHER, 1: RIGHT, 2: RIGHT}, (WRONG, RIGHT), (0,), (1, 2), True),  # wrong in two ways
        ({0: RIGHT, 1: RIGHT}, (WRONG, RIGHT), (0,), (), True),  # two ranks alone
        ({0: RIGHT, 1: RIGHT}, (RIGHT, WRONG), (1,), (), True),
        ({0: WRONG, 1: RIGHT}, (WRONG, RIGHT), (0, 1), (), None),  # neither contradicts itself
        ({0: RIGHT, 1: WRONG}, (WRONG, RIGHT), (0, 1), (), None),  # both do
        ({}, (WRONG, RIGHT), (0, 1), (), None),  # nobody has computed again
        ({0: WRONG, 1: RIGHT, 2: OTHER}, (WRONG, RIGHT), (0, 1), (), None),  # a third one found something else
        (
            {0: RIGHT, 1: RIGHT, 2: WRONG, 3: RIGHT},
            (WRONG, RIGHT),
            (0,),
            (1, 3),
            True,
        ),  # the others tie: 0 changed its mind
    ],
)
def test_the_others_decide_and_then_what_the_two_find_when_they_compute_again(
    votes, claims, wrong, against, contradicts_itself
):
    found = judged(votes, own=claims[0], found=claims[1])
    if 3 in votes:  # two others that contradict each other decide nothing
        against = ()
    assert (wrong, against, contradicts_itself) == (found.wrong, found.against, found.contradicts_itself)


def test_ranks_on_the_host_of_one_of_the_two_do_not_decide_if_there_are_others():
    """Ranks 2 and 3 share the defective host of rank 0."""
    hosts = {0: "a", 1: "b", 2: "a", 3: "a", 4: "c"}
    votes = {0: WRONG, 1: RIGHT, 2: WRONG, 3: WRONG, 4: RIGHT}
    assert ((0,), (1, 4)) == ((found := judged(votes, hosts=hosts)).wrong, found.against)


def test_no_rank_is_wrong_if_the_two_compute_in_different_ways():
    assert () == judged({0: WRONG, 1: RIGHT, 2: RIGHT}, computes=ALIKE | {0: "AVX512"}).wrong


def test_the_first_part_that_differs_is_named():
    parts = ["a" * 16, "b" * 16, "c" * 16]
    block = Block(4, 0, 1, WRONG, RIGHT, ALIKE)
    votes = {0: vote(RIGHT, first="".join(parts)), 1: vote(RIGHT, first=parts[0] + "d" * 16 + parts[2])}
    assert "micro-batch 7" == judge(block, votes, hosts=HOSTS).part
    backward = {rank: vote(RIGHT, first=one.first, unit="layer", begin=2) for rank, one in votes.items()}
    assert "layer 1" == judge(block, backward, hosts=HOSTS).part


def claim(step, of, own=RIGHT, found=RIGHT, workers=3, computes="AVX2"):
    return AuditClaim(time=1.0, step=step, of=of, workers=workers, own=own, found=found, computes=computes)


def test_an_audit_is_clean_when_all_ranks_have_said_what_they_found():
    watch = AuditWatch()
    for rank, of in ((0, 1), (1, 2)):
        watch.take(rank, claim(5, of))
        assert watch.clean is None
    watch.take(2, claim(5, 0))
    assert (5, 1, None) == (watch.clean, watch.count, watch.judge(HOSTS))


def test_the_failure_names_rank_host_and_step_also_if_votes_arrive_before_claims():
    watch = AuditWatch()
    for rank, of in ((0, 1), (1, 2), (2, 0)):
        watch.take(rank, claim(5, of))
    watch.take(2, vote(RIGHT, step=10, of=1))
    watch.take(0, claim(10, 1))
    watch.take(2, claim(10, 0))
    watch.take(1, claim(10, 2, own=WRONG))
    watch.take(0, vote(RIGHT, step=10, of=1))
    watch.take(1, vote(WRONG, step=10, of=1))
    rows = tuple(RankRow(rank, host, 0, "worker") for rank, host in sorted(HOSTS.items())[:3])

    failure = audited_failure(RunFacts("x", "", rows, is_recipe=True), watch)

    said = "rank 1 (worker, b) computed another gradient for the same micro-batches than ranks 0 and 2 in step 10"
    assert ("R089", 10, said) == (failure.code, failure.kind.exit_status, failure.message)
    assert "the last clean audit was that of step 5" == failure.evidence[-1]


def test_two_ways_of_computing_are_named_and_nobody_is_blamed():
    watch = AuditWatch()
    watch.take(0, claim(5, 1, own=WRONG, workers=2, computes="AVX512"))
    watch.take(1, claim(5, 0, workers=2))
    rows = tuple(RankRow(rank, host, 0, "worker") for rank, host in sorted(HOSTS.items())[:2])
    failure = audited_failure(RunFacts("x", "", rows, is_recipe=True), watch)
    assert ("R090", None) == (failure.code, failure.rank)
    assert "round in different ways, AVX512 and AVX2, so their gradients differ in step 5" in failure.message


def test_a_rank_that_makes_up_steps_fills_no_memory():
    watch = AuditWatch()
    for step in range(1000):
        watch.take(0, claim(step, 1))
        watch.take(0, vote(RIGHT, step=step))
    assert len(watch._claims) <= 64
    assert len(watch._votes) <= 64
