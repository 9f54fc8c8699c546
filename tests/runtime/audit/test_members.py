"""Audits among the members of an epoch: in which steps, and who takes part."""

from types import SimpleNamespace

import pytest
import torch

from ttlaunch.membership.messages import Begin, Member, Seat
from ttlaunch.runtime.audit.auditor import Auditor

EVERY = SimpleNamespace(training_config=SimpleNamespace(audit_interval=5, micro_batches=8))


def auditor(*blocks, applied=0, step=1, rank=1, follows=False):
    """That of the member at a place of an epoch that began after step `applied`, before it makes a step."""
    seats = tuple(Seat(Member(10 + place, 0), host=f"box-{place}") for place in range(len(blocks)))
    begin = Begin(1, seats, applied, (), (), blocks, (), (), validates=False)
    member = SimpleNamespace(begin=begin, follows=follows, is_first_step=lambda: step == applied + 1)
    ctx = SimpleNamespace(role="worker", rank=rank, elastic=member)
    return Auditor(ctx, world=None, device=torch.device("cpu"), write=None)


def audited_steps(*, applied, last=20):
    found = [(auditor((0, 4), (4, 8), applied=applied, step=step), step) for step in range(applied + 1, last + 1)]
    return [step for one, step in found if one.begin(EVERY, step) is not None]


@pytest.mark.parametrize(
    ("applied", "steps"),
    [(0, [5, 10, 15, 20]), (3, [5, 10, 15, 20]), (4, [6, 10, 15, 20]), (5, [10, 15, 20]), (9, [11, 15, 20])],
)
def test_the_audit_of_the_first_step_of_an_epoch_is_that_of_its_second(applied, steps):
    assert steps == audited_steps(applied=applied)


def test_members_without_micro_batches_take_no_part_and_records_have_the_numbers_of_workers():
    one = auditor((0, 0), (0, 4), (4, 8), rank=2, step=5)
    audit = one.begin(EVERY, 5)
    assert ([1, 2], [11, 12], ["box-1", "box-2"]) == (list(one.among), one.numbers, one.hosts)
    assert (range(4), range(4, 8)) == (audit.block, audit.own_block)


def test_one_member_alone_and_one_that_follows_audit_nothing():
    assert auditor((0, 0), (0, 8), step=5).begin(EVERY, 5) is None
    assert auditor((0, 4), (4, 8), step=5, follows=True).begin(EVERY, 5) is None
