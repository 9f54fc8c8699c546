"""What a worker reports reaches the coordinator unchanged, and only under its own number."""

import json

import pytest

from ttlaunch import contract
from ttlaunch.membership.messages import Answered, CutOff, Member, Progressed, Registered, Seat, Share
from ttlaunch.membership.reports import event_of, fields_of
from ttlaunch.records.members import MemberReport
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import read_progress

EVENTS = [
    Registered(Seat(Member(3, 1), "box-2", "10.0.0.2:4000"), None),
    Registered(Seat(Member(3, 0), "box-2"), 0),
    Registered(Seat(Member(3, 0), "box-2"), None, follows=True),
    Answered(Member(3, 0), 4, 17, ((0, 4), (6, 7)), 16),
    Answered(Member(3, 0), 4, None),
    Answered(Member(3, 0), 4, 17, shares=(Share(3, (0, 2)), Share(4, (1, 0))), is_ready=True),
    Progressed(Member(3, 0), 4, 17, 0.25),
    Progressed(Member(3, 0), 4, 60, None, is_done=True),
    CutOff(Member(3, 0), 4, 17),
]


def parsed(**fields):
    return read_progress(json.dumps({"kind": contract.KIND_MEMBER, "time": 1.0, **fields}).encode())


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_survives_the_way_through_a_record(event):
    assert event == event_of(3, parsed(**fields_of(event)))


def test_the_number_is_that_of_the_file_whatever_the_record_contains():
    record = parsed(**fields_of(EVENTS[5]), number=9)
    assert Member(5, 0) == event_of(5, record).member


@pytest.mark.parametrize(
    "wrong",
    [
        {"what": "crowned"},
        {"what": "progressed"},
        {"what": "answered", "held": [[0, 1]] * 5000},
        {"what": "answered", "shares": [[3, [0, 3]]]},
        {"what": "answered", "shares": [[3, [0, 0, 0, 0]]]},
        {"what": "answered", "shares": [[0, []]]},
        {"what": "answered", "shares": [[9000, [1]]]},
        {"what": "answered", "shares": [[2, [0]], [3, [0]], [4, [0]]]},
    ],
)
def test_what_is_no_report_of_a_worker_is_no_event(wrong):
    assert event_of(0, parsed(incarnation=0, **wrong)) is None


@pytest.mark.parametrize(
    "wrong", [{"incarnation": -1}, {"incarnation": 0, "held": [[1]]}, {"incarnation": 0, "epoch": "x"}]
)
def test_a_record_with_a_wrong_field_is_bad(wrong):
    assert isinstance(parsed(what="answered", **wrong), BadRecord)


def test_a_record_is_of_the_class_for_members():
    assert isinstance(parsed(what="x", incarnation=0), MemberReport)
