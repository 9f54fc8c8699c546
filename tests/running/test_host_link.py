"""The launcher's end of the line to an agent: connections break and are made again, until a host must count as lost."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.hosts.transport.memory import MemoryTransport
from ttlaunch.running.agents.agent_starter import write_piece
from ttlaunch.running.agents.host_link import HostLink

DEADLINE_S = 60.0


class Flaky(LocalTransport):
    """This machine behind a network that can be taken away."""

    def __init__(self):
        super().__init__("box")
        self.up = True
        self.begun = []

    def connect(self, **_):
        if not self.up:
            raise HostError("box", Trouble.UNREACHABLE, "no answer on port 22 within 1 s")

    def start(self, command, **limits):
        self.connect()
        self.begun.append(super().start(command, **limits))
        return self.begun[-1]

    def breaks(self):
        self.up = False
        self.begun[-1].kill()


class Linked:
    """A run on this machine and the link to its agent."""

    def __init__(self, folder, *, lease_s=15.0):
        self.run_id = f"linked-{os.getpid()}-{folder.name}"
        self.there, self.here, self.scratch = folder / "there" / self.run_id, folder / "here", folder / "s"
        self.events, self.transport = [], Flaky()
        arguments = {
            "run_id": self.run_id,
            "folder": str(self.there),
            "scratch": str(self.scratch),
            "socket": str(self.scratch / "a"),
            "lease_s": lease_s,
            "ranks": list(range(8)),
            "files": {},
        }
        self.link = HostLink(
            self.transport, arguments, ranks=range(8), last_step=0, python="python3", keep=self.keep, note=self.note
        )
        self.link.start()
        self.link.follow()
        self.rank = subprocess.Popen(["sleep", "600"], env={**os.environ, "TTLAUNCH_RUN_ID": self.run_id})

    def keep(self, piece, body):
        write_piece(self.here / piece.name, piece, body)

    def note(self, kind, **values):
        self.events.append(kind)

    def print(self, data):
        with (self.there / "logs/rank-0.stdout").open("ab") as file:
            file.write(data)

    def printed(self):
        with contextlib.suppress(OSError):
            return (self.here / "logs/rank-0.stdout").read_bytes()

    def ends(self):
        self.link.end()
        assert self.link.over.wait(DEADLINE_S)

    def close(self):
        self.transport.up = True
        self.ends()
        self.rank.kill()
        self.rank.wait()
        self.transport.close()


@pytest.fixture
def linked(tmp_path):
    made = []

    def make(**options):
        made.append(Linked(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_connection_that_breaks_is_made_again_and_nothing_is_lost(linked, until):
    run = linked()
    run.print(b"before\n")
    until(lambda: run.printed() == b"before\n", within_s=DEADLINE_S, what="the first line is here")
    run.transport.breaks()
    run.print(b"meanwhile\n")
    run.transport.up = True
    until(lambda: run.printed() == b"before\nmeanwhile\n", within_s=DEADLINE_S, what="the second line is here")
    assert (run.rank.poll(), run.events) == (None, ["host_joined_again"])
    run.ends()
    assert (run.link.killed, run.link.lost, run.rank.wait(DEADLINE_S)) == (1, None, -9)


def test_a_host_that_stays_away_is_lost_when_its_ranks_must_have_ended_and_brought_home_when_it_is_back(linked, until):
    run = linked(lease_s=1.5)
    run.transport.breaks()
    run.print(b"alone\n")
    assert run.rank.wait(DEADLINE_S) == -signal.SIGKILL
    assert run.link.lost is None, "the agent ends its ranks before anybody may count on it"
    lost = until(lambda: run.link.lost, within_s=DEADLINE_S, what="the host is lost")
    assert lost.error.notes == ("connecting to it again: no answer on port 22 within 1 s",)
    run.transport.up = True
    run.ends()
    assert run.printed() == b"alone\n"
    assert not run.scratch.exists()


def test_a_host_whose_agent_was_killed_is_lost_at_once_and_swept_in_the_end(linked, until):
    run = linked()
    [agent] = set(_holders(run.scratch / "agent.claim"))
    os.kill(agent, signal.SIGKILL)
    lost = until(lambda: run.link.lost, within_s=DEADLINE_S, what="the host is lost")
    assert lost.error.evidence == "its agent is gone: connection refused"
    seen = run.link.snapshot(7)
    assert (7, (), ()) == (seen.question, seen.stopped, seen.faults)
    assert run.rank.poll() is None
    run.ends()
    assert (run.link.killed, run.rank.wait(DEADLINE_S)) == (1, -9)


def test_a_host_that_is_cut_gets_and_gives_nothing(linked, until):
    run = linked(lease_s=1.5)
    run.link.cut()
    run.print(b"unheard\n")
    assert run.rank.wait(DEADLINE_S) == -signal.SIGKILL
    until(lambda: run.link.lost, within_s=DEADLINE_S, what="the host is lost")
    run.ends()
    assert (run.printed(), run.events) == (None, [])


def test_an_order_that_was_given_while_the_line_was_down_is_carried_out(linked, until):
    run = linked()
    record = run.there / "records/rank-0.progress.jsonl"
    record.write_text(json.dumps({"pid": run.rank.pid, "shim_pid": os.getpid()}) + "\n")
    until((run.here / "records" / record.name).is_file, within_s=DEADLINE_S, what="the rank is known")
    run.transport.breaks()
    run.link.order("signal", ranks=[0], number=int(signal.SIGTERM), marker=None)
    run.transport.up = True
    assert run.rank.wait(DEADLINE_S) == -signal.SIGTERM


def test_orders_to_a_worker_come_in_their_order_and_none_that_was_given_while_the_line_was_down(linked, until):
    run = linked()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
        worker.bind(str(run.scratch / contract.orders_socket(3)))
        worker.settimeout(DEADLINE_S)
        for order in (b"prepare", b"prepare", b"begin"):
            run.link.tell(3, order)
        received = [worker.recv(1 << 20)]
        while received[-1] != b"begin":
            received.append(worker.recv(1 << 20))
        assert [b"prepare", b"begin"] == list(dict.fromkeys(received))
        run.transport.breaks()
        until(lambda: run.link._connection is None, within_s=DEADLINE_S, what="the link has noticed it")
        run.link.tell(3, b"lost")
        run.transport.up = True
        until(lambda: run.events, within_s=DEADLINE_S, what="there is a connection again")
        run.link.tell(3, b"finish")
        assert b"finish" == worker.recv(1 << 20)


def _holders(path):
    """The processes that have a file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == path:
                yield int(link.parts[2])


GARBAGE = [
    b"Welcome to box!\n" * 20,
    contract.pack_frame({"kind": "file", "name": "../x", "offset": 0, "whole": True, "number": 1}, b"x"),
    contract.pack_frame({"kind": "file", "name": "logs/rank-0.stdout", "offset": 0, "whole": False, "number": 9}, b"x"),
    contract.pack_frame({"kind": "alive", "clock": "noon", "done": -1}),
    contract.pack_frame({"kind": "ended", "killed": None}),
    contract.pack_frame({"kind": "refused", "reason": "no word"}),
    b"[" * 100,
]


def test_a_host_that_talks_nonsense_over_every_connection_is_lost_and_named(tmp_path, until):
    kept, said = [], []
    ready = {"kind": "ready", "version": contract.AGENT_VERSION, "time": time.time(), "clock": 1.0, "done": 0}

    def talk(streams):
        said.append(GARBAGE[len(said) % len(GARBAGE)])
        streams.write(contract.pack_frame(ready) + said[-1])
        while streams.read():
            continue
        return 0

    link = HostLink(
        MemoryTransport("box", {"old=78;": talk}),
        {"lease_s": 3.0, "socket": "", "folder": ""},
        ranks=range(8),
        last_step=0,
        python="python3",
        keep=lambda piece, _: kept.append(piece),
        note=lambda *_, **__: None,
    )
    link.start()
    link.follow()
    lost = until(lambda: link.lost, within_s=DEADLINE_S, what="the host is lost")
    assert (lost.error.trouble, kept) == (Trouble.SCRIPT, [])
    assert len(said) > len(GARBAGE), "everything was said"
    link.end()
    assert link.over.wait(DEADLINE_S)


def _answering(ready, said):
    """A host on which an agent greets so; what it is told is kept."""

    def talk(streams):
        streams.write(contract.pack_frame({"kind": "ready", "time": time.time(), "clock": 1.0, "done": 0, **ready}))
        while part := streams.read():
            said.append(part)
        return 0

    arguments = {"lease_s": 3.0, "socket": "", "folder": ""}
    transport = MemoryTransport("box", {"old=78;": talk})
    nothing = {"keep": lambda *_: None, "note": lambda *_, **__: None}
    return HostLink(transport, arguments, ranks=[0], last_step=0, python="python3", **nothing)


@pytest.mark.parametrize("version", [None, contract.AGENT_VERSION + 1])
def test_an_agent_of_another_version_is_refused_at_the_start(version):
    link = _answering({} if version is None else {"version": version}, [])
    with pytest.raises(HostError) as caught:
        link.start()
    assert Trouble.VERSION is caught.value.trouble
    expected = f"its agent is of version {version or 0}, this launcher of {contract.AGENT_VERSION}"
    assert expected == caught.value.evidence


def test_a_host_whose_agent_is_of_another_version_after_a_break_is_lost_at_once(until):
    """The package was replaced while the run went on, so what joins the agent again is not what started it."""
    ready = {"version": contract.AGENT_VERSION}
    link = _answering(ready, [])
    link.start()
    ready["version"] = contract.AGENT_VERSION + 1
    link._connection.stream.process.kill()
    link.follow()
    lost = until(lambda: link.lost, within_s=DEADLINE_S, what="the host is lost")
    assert Trouble.VERSION is lost.error.trouble
    assert "its agent is of version" in lost.error.evidence
    link.end()
    assert link.over.wait(DEADLINE_S)
