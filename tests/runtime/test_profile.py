"""Torch's profiler on chosen steps: a trace of these and no others, in which messages have the names that the traffic counter uses (E7)."""

import gzip
import json

import pytest
import torch

from ttlaunch.profiling import ENV_PROFILE_STEPS, parse_steps, profile_file
from ttlaunch.runtime.comm.counting import CountingCommunicator
from ttlaunch.runtime.telemetry.profile import StepProfile, open_profile
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter, operation

from .test_traffic_counter import NullCommunicator


def names(run_dir, rank=0):
    content = json.loads(gzip.decompress((run_dir / profile_file(rank)).read_bytes()))
    return [event["name"] for event in content["traceEvents"] if event.get("ph") == "X"]


def train(traffic, steps):
    for step in steps:
        traffic.begin_step(step)
        x_NN = torch.full((4, 4), float(step), requires_grad=True)
        (x_NN @ x_NN).sum().backward()
        with traffic.marked("wait", f"gradients of {step}"):
            pass
        traffic.end_step()


def test_the_trace_has_the_chosen_steps_and_what_was_done_in_them(tmp_path):
    """E7: the trace names steps, torch's operators and the operations of messages."""
    traffic = TrafficCounter(profile=StepProfile(tmp_path, rank=0, steps=range(2, 4)))
    train(traffic, range(1, 5))
    traffic.close()

    found = names(tmp_path)
    assert ["step 2", "step 3"] == sorted(name for name in found if name.startswith("step "))
    assert ["wait gradients of 2", "wait gradients of 3"] == sorted(name for name in found if name.startswith("wait"))
    assert 2 == found.count("MmBackward0")
    assert [profile_file(0)] == [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]


def test_messages_are_named_after_their_verb_and_operation(tmp_path):
    """E7: whichever verb a rank uses."""
    traffic = TrafficCounter(profile=StepProfile(tmp_path, rank=0, steps=range(1, 2)))
    comm = CountingCommunicator(NullCommunicator(), traffic)
    traffic.begin_step(1)
    with operation(comm, "norms", bucket=4):
        comm.send(torch.zeros(1), dest=1)
        comm.recv(torch.zeros(1), source=1)
        comm.isend(torch.zeros(1), dest=1)
        comm.irecv(torch.zeros(1), source=1).wait()
    traffic.end_step()
    traffic.close()
    assert ["send norms", "recv norms", "isend norms", "wait norms"] == [
        name for name in names(tmp_path) if name.endswith(" norms")
    ]


def test_a_run_that_ends_within_the_chosen_steps_keeps_what_it_has(tmp_path):
    traffic = TrafficCounter(profile=StepProfile(tmp_path, rank=3, steps=range(2, 10)))
    train(traffic, range(1, 3))
    traffic.begin_step(3)
    traffic.close()

    assert {"step 2", "step 3"} <= set(names(tmp_path, rank=3))


def test_a_run_that_goes_on_after_the_chosen_steps_records_none(tmp_path):
    traffic = TrafficCounter(profile=StepProfile(tmp_path, rank=0, steps=range(2, 4)))
    train(traffic, range(5, 7))
    traffic.close()

    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", range(5, 6)),
        ("5-7", range(5, 8)),
        ("7-5", None),
        ("0-3", None),
        ("", None),
        ("5-", None),
        ("-5", None),
        ("a", None),
        ("5-6-7", None),
        ("٣", range(3, 4)),
    ],
)
def test_steps_are_a_number_or_two(text, expected):
    assert expected == parse_steps(text)


def test_nothing_is_recorded_unless_it_was_asked_for(tmp_path):
    assert open_profile(tmp_path, rank=0, environment={}) is None
    assert open_profile(tmp_path, rank=0, environment={ENV_PROFILE_STEPS: "2"}) is not None
