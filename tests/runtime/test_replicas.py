"""Torch's all-reduces as a rank's flight recorder tells them: begun in the backward pass, then waited for one after the other."""

import pytest
import torch

from ttlaunch import contract
from ttlaunch.flight_recorder import GROUP, read_recorder
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.runtime.parallel.gradients.replicas import AllReduceRecords
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter


@pytest.fixture
def books(tmp_path):
    """Books of two buckets, and what their box says now."""
    one = AllReduceRecords(
        TrafficCounter(recorder=FlightRecorder(tmp_path / contract.recorder_file(0), rank=0)), [0, 1]
    )
    return one, lambda: read_recorder((tmp_path / contract.recorder_file(0)).read_bytes())


def done():
    future = torch.futures.Future()
    future.set_result(torch.zeros(2))
    return future


def test_a_rank_that_is_still_in_its_backward_pass_waits_for_none(books):
    one, box = books
    one.begin(0, 400)
    one.begin(1, 80)
    assert box().waiting is None
    assert {(GROUP, box().operations[-1].tag, False): 2} == box().channels


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_it_then_waits_for_those_that_are_not_done_whatever_their_order(books, order):
    one, box = books
    began = [one.begin(0, 400), one.begin(1, 80)]
    one.begin_wait()
    first = box().waiting
    assert ("torch's all_reduce", 0, 400, 1) == (first.name, first.bucket, first.nbytes, first.message)
    one.end(done(), bucket=order[0], size=8, began=began[order[0]])
    assert order[1] == box().waiting.bucket
    one.end(done(), bucket=order[1], size=8, began=began[order[1]])
    assert box().waiting is None


def test_each_end_is_a_sign_of_life(books):
    one, box = books
    began = one.begin(0, 400)
    one.begin(1, 80)
    before = box().moved
    one.end(done(), bucket=0, size=400, began=began)
    assert before != box().moved


def test_those_that_are_done_before_the_last_has_begun_are_not_waited_for(books):
    one, box = books
    one.end(done(), bucket=0, size=400, began=one.begin(0, 400))
    one.begin_wait()
    assert box().waiting is None


def test_ranks_of_one_group_give_it_one_name_and_those_of_another_a_different_one(tmp_path):
    boxes = [FlightRecorder(tmp_path / contract.recorder_file(rank), rank=rank) for rank in range(2)]
    assert boxes[0].join_group([0, 1]) == boxes[1].join_group([0, 1])
    assert boxes[0].join_group([0, 1]) != boxes[1].join_group([1, 2])
    assert 0 == boxes[0].join_group()
