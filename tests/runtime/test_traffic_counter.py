"""The books of a rank: every message is attributed to operation, bucket, phase, step and edge, and costs almost nothing."""

import json
import time
from functools import partial

import pytest
import torch
from torch import nn

from ttlaunch.runtime.comm.clocks import compare_clocks
from ttlaunch.runtime.comm.collectives import all_gather
from ttlaunch.runtime.comm.counting import CountingCommunicator
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.telemetry.phases import phase, watch_passes
from ttlaunch.runtime.telemetry.trace import Trace
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter, operation


class NullCommunicator:
    """Takes every message and knows nothing of it."""

    rank = 0

    def send(self, tensor, *, dest, tag=0):
        pass

    def recv(self, tensor, *, source, tag=0):
        pass

    def isend(self, tensor, *, dest, tag=0):
        return self

    def irecv(self, tensor, *, source, tag=0):
        return self

    def wait(self):
        pass


class Books:
    """A traffic counter with a file, and a communicator that counts in it."""

    def __init__(self, path, trace=None):
        self.path = path
        self.traffic = TrafficCounter(path, trace=trace)
        self.comm = CountingCommunicator(NullCommunicator(), self.traffic)

    def lines(self):
        self.traffic.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def sent(self):
        return [row for line in self.lines() for row in line["sent"]]


@pytest.fixture
def books(tmp_path):
    return Books(tmp_path / "ledger.jsonl")


def send_norms(comm):
    comm.send(torch.zeros(2), dest=1)


def _receive_norms(comm):
    [comm.irecv(torch.zeros(2), source=1).wait() for _ in range(2)]


def test_a_message_is_attributed_to_operation_bucket_phase_step_and_destination(books):
    books.traffic.begin_step(1)
    with operation(books.comm, "gradients", bucket=3):
        books.comm.isend(torch.zeros(5), dest=2).wait()
    assert [["gradients", 3, "exchange", 2, [[1, 1, 1, 1, 20]]]] == books.sent()


def test_equal_steps_are_one_row_and_no_step_is_lost(books):
    for step in range(1, 101):
        books.traffic.begin_step(step)
        send_norms(books.comm)
        if step % 20 == 0:
            books.traffic.end_step()
            with operation(books.comm, "validation"):
                books.comm.send(torch.zeros(int(step == 100), 3), dest=1)
    assert [
        ["norms", None, "exchange", 1, [[1, 1, 1, 1, 8]]],  # a line of its own, for runs that are soon killed
        ["norms", None, "exchange", 1, [[2, 100, 1, 1, 8]]],
        ["validation", None, "after", 1, [[20, 80, 20, 1, 0], [100, 100, 1, 1, 12]]],
    ] == books.sent()


def test_an_operation_that_nobody_names_is_called_after_its_function_on_both_ends(books):
    send_norms(books.comm)
    _receive_norms(books.comm)
    (line,) = books.lines()
    assert ["norms"] == [row[0] for row in line["sent"]]
    assert {("norms", "start")} == {(name, during) for name, during, _ in line["waited"]}


def test_a_collective_is_called_by_its_name(tmp_path):
    world = InProcessWorld(["peer"] * 2)
    ranks = [Books(tmp_path / f"rank-{rank}") for rank in range(2)]

    def live(rank):
        comm = CountingCommunicator(world.communicator(rank), ranks[rank].traffic)
        all_gather(comm, torch.ones(4), among=[0, 1])
        with operation(comm, "losses"):
            all_gather(comm, torch.ones(4), among=[0, 1])

    outcome = world.run({0: lambda: live(0), 1: lambda: live(1)})
    assert ({}, []) == (outcome.errors, outcome.findings)
    expected = [[name, None, "start", 1, [[0, 0, 1, 1, 8]]] for name in ("all_gather", "losses")]
    assert expected == ranks[0].sent()


def test_the_innermost_name_counts_and_ends_with_its_block(books):
    with operation(books.comm, "outer"):
        with operation(books.comm, "inner"):
            books.comm.send(torch.zeros(1), dest=1)
        books.comm.send(torch.zeros(1), dest=1)
    assert ["inner", "outer"] == [row[0] for row in books.sent()]


def test_a_socket_without_books_is_left_alone():
    comm = NullCommunicator()
    with operation(comm, "gradients"):
        comm.send(torch.zeros(1), dest=1)
    assert vars(comm) == {}


def test_time_spent_waiting_is_entered_for_its_step_and_operation(books):
    class Slow(NullCommunicator):
        def wait(self):
            time.sleep(0.02)

    comm = CountingCommunicator(Slow(), books.traffic)
    books.traffic.begin_step(7)
    with operation(comm, "weights"):
        arriving = comm.irecv(torch.zeros(1), source=1)
    time.sleep(0.02)  # what is done meanwhile is not exposed
    arriving.wait()
    books.traffic.end_step()
    (line,) = books.lines()
    ((name, during, times),) = line["waited"]
    assert ("weights", "exchange", ["7"]) == (name, during, list(times))
    spent = {kind: times["7"] for kind, times in line["spent"] if "7" in times}
    assert 20_000 <= times["7"] < spent["step"] - 20_000 + 1


def test_passes_of_a_model_are_told_apart_and_what_backward_hooks_send_is_theirs(books):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    watch_passes(model, books.traffic)
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(books.traffic.phase) or send_norms(books.comm)
    )
    books.traffic.begin_step(1)
    output = model(torch.ones(2, 4))
    assert "exchange" == books.traffic.phase
    output.sum().backward()
    assert (["backward"], "exchange") == (seen, books.traffic.phase)
    with phase(books, "update"):
        assert "update" == books.traffic.phase
    with torch.no_grad():
        model(torch.ones(2, 4))
    books.traffic.end_step()
    (line,) = books.lines()
    assert [["norms", None, "backward", 1, [[1, 1, 1, 1, 8]]]] == line["sent"]
    spent = {kind for kind, times in line["spent"] if "1" in times}
    assert {"exchange", "forward", "backward", "update", "after", "step"} == spent


def test_phases_of_a_step_add_up_to_its_time(books):
    books.traffic.begin_step(1)
    for name in ("forward", "backward", "update"):
        books.traffic.enter(name)
        time.sleep(0.002)
        books.traffic.leave()
    books.traffic.end_step()
    (line,) = books.lines()
    spent = {kind: times.get("1", 0) for kind, times in line["spent"]}
    parts = sum(spent[kind] for kind in ("exchange", "forward", "backward", "update"))
    assert abs(spent["step"] - parts) <= 4  # each is cut to whole microseconds


def test_waits_of_every_verb_are_within_their_step(books):
    """A communicator that takes everything at once makes nobody wait longer than the step took."""
    books.traffic.begin_step(1)
    verbs = {
        "a": lambda: books.comm.send(torch.zeros(2), dest=1),
        "b": lambda: books.comm.recv(torch.zeros(2), source=1),
        "c": lambda: books.comm.isend(torch.zeros(2), dest=1),
        "d": books.comm.irecv(torch.zeros(2), source=1).wait,
    }
    for name, verb in verbs.items():
        with operation(books.comm, name):
            verb()
    books.traffic.end_step()
    (line,) = books.lines()
    spent = {kind: times.get("1", 0) for kind, times in line["spent"]}
    waits = {name: times.get("1", 0) for name, _, times in line["waited"]}
    assert set("abc") <= set(waits)
    assert 0 <= sum(waits.values()) <= spent["step"]


def test_long_runs_are_written_as_they_go(books):
    for step in range(1, 5001):
        books.traffic.begin_step(step)
        send_norms(books.comm)
    written = [json.loads(line) for line in books.path.read_text().splitlines()]
    assert [(0, 1), (2, 2002), (2003, 4003)] == [(line["first"], line["last"]) for line in written]
    lines = books.lines()
    assert [line["first"] for line in lines][1:] == [line["last"] + 1 for line in lines][:-1]
    assert 5000 == sum((row[1] - row[0]) // row[2] + 1 for line in lines for row in line["sent"][0][4])


def test_the_longer_a_run_the_rarer_its_lines(books, monkeypatch):
    """A day of steps of 10 s, of which every line could have a row for each of thousands of buckets."""
    clock = iter(range(0, 10**18, 10**9))
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    books.traffic._began = books.traffic._flushed = 0
    steps = 0
    while next(clock) < 86_400 * 10**9:
        steps += 1
        books.traffic.begin_step(steps)
    monkeypatch.undo()
    lines = books.lines()
    assert steps == lines[-1]["last"] > 10_000
    assert len(lines) < 200


def test_a_rank_that_counts_no_steps_has_written_what_it_answered_seconds_ago(books, monkeypatch):
    """It may be killed at any time in a day; what it has answered since its last line is lost."""
    now = 0
    monkeypatch.setattr(time, "monotonic_ns", lambda: now * 10**9)
    books.traffic._began = books.traffic._flushed = 0
    books.traffic.facts_now = lambda: {"tokens": now}
    for now in range(86_400):
        books.traffic.write_if_due()
        if now in {60, 900, 86_399}:
            written = [json.loads(line)["facts"]["tokens"] for line in books.path.read_text().splitlines()]
            assert now - max(3, now // 400) <= written[-1] <= now
    assert books.path.stat().st_size < 1 << 20


def test_books_that_cannot_be_written_do_not_end_the_run(tmp_path):
    class Recording(NullCommunicator):
        def send(self, tensor, *, dest, tag=0):
            sent.append((dest, tensor.numel()))

    sent = []
    traffic = TrafficCounter(tmp_path / "missing" / "ledger.jsonl")
    comm = CountingCommunicator(Recording(), traffic)
    traffic.begin_step(1)
    comm.send(torch.zeros(3), dest=1)
    traffic.close()
    comm.send(torch.zeros(4), dest=2)
    assert [(1, 3), (2, 4)] == sent
    assert not (tmp_path / "missing").exists()


def test_clocks_are_compared_within_the_error_that_is_told():
    """All ranks of this world have one clock, so the right answer is 0."""
    world = InProcessWorld(["peer"] * 3)
    found = {}

    def live(rank):
        found[rank] = compare_clocks(world.communicator(rank), world_size=3)

    outcome = world.run({rank: partial(live, rank) for rank in range(3)})
    assert ({}, [], (0, 0)) == (outcome.errors, outcome.findings, found[0])
    for offset, error in (found[1], found[2]):
        assert abs(offset) <= error < 1e9


def test_a_trace_ends_after_the_steps_that_were_asked_for(tmp_path):
    trace = Trace(tmp_path / "trace.jsonl", steps=2)
    books = Books(tmp_path / "ledger.jsonl", trace=trace)
    for step in range(1, 6):
        books.traffic.begin_step(step)
        send_norms(books.comm)
        _receive_norms(books.comm)
        books.traffic.end_step()
    books.traffic.close()
    written = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert ["step 1", "step 2"] == [event[1] for event in written if event[2] == "step"]
    assert [1, 2] == [event[3]["number"] for event in written if event[0] == "send"]
    assert [1, 2, 3, 4] == [event[3]["number"] for event in written if event[0] == "recv"]


def test_a_trace_has_both_ends_of_a_message_under_its_operation_and_bucket(tmp_path):
    books = Books(tmp_path / "ledger.jsonl", trace=Trace(tmp_path / "trace.jsonl", steps=1))
    books.traffic.begin_step(1)
    with operation(books.comm, "gradients", bucket=3):
        books.comm.isend(torch.zeros(5), dest=2, tag=7).wait()
        books.comm.irecv(torch.zeros(2), source=1, tag=8).wait()
    books.traffic.end_step()
    events = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    sent = {"peer": 2, "tag": 7, "number": 1, "bytes": 20, "step": 1}
    received = {"peer": 1, "tag": 8, "number": 1, "bytes": 8, "step": 1}
    assert [("send", "gradients 3", sent), ("recv", "gradients 3", received)] == [
        (event[0], event[1], event[3]) for event in events if event[0] in {"send", "recv"}
    ]
    spans = [(event[1], event[2], event[5]) for event in events if event[0] == "span" and "gradients" in event[1]]
    assert ("send gradients 3", "send", sent) in spans
    assert ("wait: send gradients 3", "wait", sent) in spans
    assert ("recv gradients 3", "recv", received) in spans


def test_messages_are_numbered_by_peer_tag_and_direction(tmp_path):
    """Both ends of a message find each other by these numbers."""
    books = Books(tmp_path / "ledger.jsonl", trace=Trace(tmp_path / "trace.jsonl", steps=1))
    books.traffic.begin_step(1)
    for peer, tag in ((1, 0), (2, 0), (1, 7), (1, 0)):
        books.comm.send(torch.zeros(1), dest=peer, tag=tag)
        books.comm.recv(torch.zeros(1), source=peer, tag=tag)
    books.traffic.end_step()
    events = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    for kind in ("send", "recv"):
        facts = [event[3] for event in events if event[0] == kind]
        assert [(1, 0, 1), (2, 0, 1), (1, 7, 1), (1, 0, 2)] == [
            (fact["peer"], fact["tag"], fact["number"]) for fact in facts
        ]


def test_a_trace_of_steps_without_end_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr("ttlaunch.runtime.telemetry.trace._MOST_EVENTS", 10)
    trace = Trace(tmp_path / "trace.jsonl", steps=10**6)
    for _ in range(100):
        trace.span("send norms", "send", began=0, ended=1)
    trace.close()
    assert 10 == len((tmp_path / "trace.jsonl").read_text().splitlines())
