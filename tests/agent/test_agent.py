"""The agent: what a run writes on a host comes home, over any number of connections, and nothing outlives its lease."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch import contract
from ttlaunch.agent.run_processes import is_gone
from ttlaunch.errors import HostError
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.hosts.transport.pushed import start_script
from ttlaunch.running.agents.agent_connection import AGENT_MODULES, BRIDGE_MODULES

DEADLINE_S = 60.0
RUN = f"run-{os.getpid()}"
"""Of this process of tests alone: others on this machine kill what carries theirs."""
HELLO = {"kind": "hello", "version": contract.AGENT_VERSION}


class Hosted:
    """A run with an agent on this machine, and the connection to it."""

    def __init__(self, folder, run_id=RUN, *, lease_s=600.0, transport=None, **more):
        self.run_id = run_id
        self.folder = folder / "runs" / run_id
        self.scratch = folder / f"s-{run_id}"
        self.transport = transport or LocalTransport("box")
        self.arguments = {
            "run_id": run_id,
            "folder": str(self.folder),
            "scratch": str(self.scratch),
            "socket": str(self.scratch / "agent"),
            "lock": str(folder / "lock"),
            "lease_s": lease_s,
            "ranks": list(range(8)),
            "files": {"plan.json": "{}", "start": "exec true\n"},
            **more,
        }
        self.received = self.ordered = 0
        self.processes = []
        self.begun = time.monotonic()
        self.first = self.join("start_agent")

    def join(self, script="bridge"):
        """Connect, and say how many pieces have come so far; returns the greeting."""
        beside = AGENT_MODULES if script == "start_agent" else BRIDGE_MODULES
        self.stream = start_script(
            self.transport, script, beside=beside, arguments=self.arguments, timeout_s=DEADLINE_S
        )
        greeting = self.expect()[0]
        self.received = min(self.received, greeting.get("sent", 0))
        if greeting["kind"] == "ready":
            self.send(kind="hello", version=contract.AGENT_VERSION, received=self.received)
        return greeting

    def leave(self):
        self.stream.process.kill()

    def send(self, **header):
        self.stream.send(header, timeout_s=DEADLINE_S)

    def order(self, kind, **values):
        self.ordered += 1
        self.send(kind=kind, order=self.ordered, **values)

    def expect(self):
        return self.stream.expect(timeout_s=DEADLINE_S)

    def start(self, *words):
        environment = {**os.environ, "TTLAUNCH_RUN_ID": self.run_id}
        process = subprocess.Popen(words or ("sleep", "60"), env=environment, start_new_session=True)
        self.processes.append(process)
        until(lambda: self.run_id.encode() in Path(f"/proc/{process.pid}/environ").read_bytes())
        return process

    def write(self, name, data):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def until(self, kind):
        """All frames up to the first of this kind; pieces are confirmed as they come."""
        frames = []
        while not frames or frames[-1][0]["kind"] != kind:
            header, body = self.expect()
            frames.append((header, body))
            if header["kind"] == "file":
                assert header["number"] == self.received + 1
                self.received += 1
                self.send(kind="renew", heard=None, received=self.received)
        return frames

    def ends(self):
        """All that comes after the order to end, up to the farewell."""
        self.order("end")
        frames = self.until("ended")
        self.send(kind="bye")
        assert self.stream.process.wait(timeout_s=DEADLINE_S) == 0
        return frames

    def content(self, frames, name):
        pieces = [(header["offset"], body) for header, body in frames if header.get("name") == name]
        ends = [0, *(offset + len(body) for offset, body in pieces)]
        assert [offset for offset, _ in pieces] == ends[:-1], "nothing is lost, nothing comes twice"
        return b"".join(body for _, body in pieces)

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self.leave()
        if self.scratch.exists() and (greeting := self.join())["kind"] == "ready":
            self.ordered = greeting["done"]
            self.ends()
        self.transport.close()


def until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


WORDS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["renew", "signal", "hello"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@pytest.fixture
def agent_once(hosted):
    """One run for all examples."""
    return hosted()


@pytest.fixture
def hosted(tmp_path):
    made = []

    def make(**arguments):
        made.append(Hosted(tmp_path, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_run_gets_a_private_folder_with_its_files(hosted):
    run = hosted()
    assert run.first["kind"] == "ready"
    assert (run.folder / "plan.json").read_text() == "{}"
    assert run.folder.stat().st_mode & 0o777 == 0o700
    assert run.scratch.stat().st_mode & 0o777 == 0o700


def test_what_ranks_write_comes_home_byte_for_byte(hosted):
    run = hosted()
    data = bytes(range(256)) * 10_000
    run.write("logs/rank-0.stdout", data[:100])
    frames = run.until("file")
    run.write("logs/rank-0.stdout", data[100:])
    frames += run.ends()
    assert run.content(frames, "logs/rank-0.stdout") == data


def test_a_record_comes_whole_and_its_unfinished_form_never(hosted):
    run = hosted()
    run.write("records/rank-0.exit.json.tmp", b"half")
    run.write("records/rank-0.error.unfinished", b"half")
    run.write("records/rank-0.exit.json", b'{"status": 3}')
    files = [header for header, _ in run.ends() if header["kind"] == "file"]
    assert [(header["name"], header["whole"]) for header in files] == [("records/rank-0.exit.json", True)]


def test_an_end_kills_what_still_runs_and_counts_it(hosted):
    run = hosted()
    process = run.start()
    assert run.ends()[-1][0]["killed"] == 1
    assert process.wait(DEADLINE_S) == -9
    assert not run.scratch.exists()
    assert sorted(path.name for path in run.folder.iterdir()) == ["agent.claim", "plan.json", "start"]


def test_a_signal_reaches_the_ranks_that_are_named_and_nothing_else_of_the_run(hosted):
    run = hosted()
    named, unnamed, no_rank = run.start(), run.start(), run.start()
    for number, rank in enumerate((named, unnamed)):
        started = json.dumps({"pid": rank.pid, "shim_pid": os.getpid()})
        run.write(f"records/rank-{number}.progress.jsonl", started.encode() + b"\n")
        run.until("file")
    run.order("signal", ranks=[0, 7], number=signal.SIGUSR1)
    assert named.wait(DEADLINE_S) == -signal.SIGUSR1
    run.until("alive")
    assert [unnamed.poll(), no_rank.poll()] == [None, None]


def test_an_order_to_a_worker_is_passed_on_as_a_datagram_to_its_socket_and_to_no_worker_of_another_host(hosted):
    run = hosted()
    workers = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    for number, worker in zip((3, 8), workers, strict=True):
        worker.bind(str(run.scratch / contract.orders_socket(number)))
        worker.settimeout(DEADLINE_S)
    for number in (8, 5, 3):  # 8 is another host's, 5 has no socket
        run.stream.send({"kind": "tell", "rank": number}, bytes(contract.LARGEST_ORDER), timeout_s=DEADLINE_S)
    assert contract.LARGEST_ORDER == len(workers[0].recv(1 << 20))
    workers[1].settimeout(0)
    with pytest.raises(BlockingIOError):
        workers[1].recv(1 << 20)
    for worker in workers:
        worker.close()


def test_an_agent_takes_no_longer_order_to_a_worker_than_any_launcher_sends(hosted):
    run = hosted()
    run.stream.send({"kind": "tell", "rank": 3}, bytes(contract.LARGEST_ORDER + 1), timeout_s=DEADLINE_S)
    [(refused, _)] = run.until("refused")[-1:]
    assert refused["reason"].startswith("the data are not a launcher's message: {'kind': 'tell'")


def test_a_look_brings_what_is_new_and_says_which_ranks_are_stopped(hosted):
    run = hosted()
    ranks = [run.start(), run.start()]
    for number, rank in enumerate(ranks):
        started = json.dumps({"pid": rank.pid, "shim_pid": os.getpid()})
        run.write(f"records/rank-{number}.progress.jsonl", started.encode() + b"\n")
        run.until("file")
    ranks[1].send_signal(signal.SIGSTOP)
    os.waitpid(ranks[1].pid, os.WUNTRACED)
    box = run.scratch / "blackbox/rank-1.box"
    box.parent.mkdir()
    box.write_bytes(b"box")
    run.order("look", question=7)
    *before, (looked, _) = run.until("looked")
    assert "blackbox/rank-1.box" in [header.get("name") for header, _ in before]
    assert (looked["question"], looked["stopped"], [rank for rank, _ in looked["faults"]]) == (7, [1], [0, 1])


def test_a_removed_folder_is_reported_once_and_so_is_the_folder_around_it_that_is_removed_later(tmp_path, hosted):
    (tmp_path / "outer/inner").mkdir(parents=True)
    run = hosted(needed={"outer": str(tmp_path / "outer"), "inner": str(tmp_path / "outer/inner")})

    def reported():
        frames = [run.expect()[0]]
        while sum(frame["kind"] == "alive" for frame in frames) < 3:
            frames.append(run.expect()[0])
        return [(frame["what"], frame["path"]) for frame in frames if frame["kind"] == "folder_gone"]

    shutil.rmtree(tmp_path / "outer/inner")
    assert [("inner", str(tmp_path / "outer/inner"))] == reported()
    shutil.rmtree(tmp_path / "outer")
    assert [("outer", str(tmp_path / "outer"))] == reported()


def test_processes_of_other_runs_are_left_alone(hosted):
    run, other = hosted(), hosted(run_id=f"{RUN}2")
    process = other.start()
    assert run.ends()[-1][0]["killed"] == 0
    assert process.poll() is None


def test_a_lost_connection_does_not_hurt_and_what_was_underway_comes_again(hosted):
    run = hosted()
    process = run.start()
    first, second = os.urandom(300_000), os.urandom(300_000)
    run.write("logs/rank-0.stdout", first)
    frames = run.until("file")
    run.expect()  # a piece that arrives and is never confirmed
    run.leave()
    run.write("logs/rank-0.stdout", second)
    assert run.join()["kind"] == "ready"
    assert process.poll() is None
    frames += run.ends()
    assert run.content(frames, "logs/rank-0.stdout") == first + second


def test_an_order_that_is_sent_again_is_carried_out_once(hosted):
    run = hosted()
    ranks = [run.start(), run.start()]
    for number, rank in enumerate(ranks):
        started = json.dumps({"pid": rank.pid, "shim_pid": os.getpid()})
        run.write(f"records/rank-{number}.progress.jsonl", started.encode() + b"\n")
        run.until("file")
    run.order("signal", ranks=[0], number=signal.SIGUSR1)
    assert ranks[0].wait(DEADLINE_S) == -signal.SIGUSR1
    run.leave()
    assert run.join()["done"] == 1
    run.send(kind="signal", order=1, ranks=[1], number=signal.SIGUSR1)
    run.until("alive")
    run.until("alive")
    assert ranks[1].poll() is None


def test_a_shard_is_removed_only_when_it_has_arrived(hosted):
    run = hosted()
    folder = "checkpoints/step-3.tmp"
    shard = run.folder / folder / "rank-0.safetensors"
    run.write(f"{folder}/rank-0.safetensors", bytes(200_000))
    run.write(f"{folder}/rank-0.json", b"{}")
    while run.expect()[0].get("name") != f"{folder}/rank-0.json":
        continue
    run.leave()
    run.join()
    assert shard.exists(), "its record came, and nobody has said so"
    frames = run.until("file")
    while frames[-1][0]["name"] != f"{folder}/rank-0.json":
        frames += run.until("file")
    assert run.content(frames, f"{folder}/rank-0.safetensors") == bytes(200_000)
    until(lambda: not shard.exists())


def test_a_run_that_nobody_asks_for_ends_with_its_lease_and_keeps_its_records(hosted):
    run = hosted(lease_s=1.0)
    rank, escaped = run.start("sh", "-c", "trap '' TERM; sleep 60"), run.start()
    run.write("logs/rank-0.stdout", b"hello\n")
    begun = time.monotonic()
    assert (rank.wait(DEADLINE_S), escaped.wait(DEADLINE_S)) == (-9, -9)
    assert time.monotonic() - begun < 6.0
    until(lambda: not run.scratch.exists())
    assert (run.folder / "logs/rank-0.stdout").read_bytes() == b"hello\n"
    gone = run.join()
    reason = "its agent heard nothing from the launching machine for 1 s and ended its ranks"
    assert (gone["kind"], gone["reason"]) == ("gone", reason)


class StepTransport(LocalTransport):
    """Starts commands as the shell of a Slurm step does, whose end of the pipe is `reader`."""

    def __init__(self, fifo):
        super().__init__("box")
        os.mkfifo(fifo)
        self._fifo, self.reader = fifo, os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def start(self, command, **options):
        return super().start(f"export SLURM_JOB_ID=7; exec {contract.STEP_PIPE}>{self._fifo}\n{command}", **options)


@pytest.mark.parametrize("number", [None, signal.SIGSTOP, signal.SIGKILL])
def test_an_agent_that_replaces_another_one_ends_it_and_what_it_left(hosted, number):
    run = hosted()
    rank, agent = run.start(), run.first["pid"]
    if number is not None:
        os.kill(agent, number)
    run.leave()
    run.arguments["replaces"] = agent
    assert "ready" == run.join("start_agent")["kind"]
    assert (rank.wait(DEADLINE_S), is_gone(agent)) == (-signal.SIGKILL, True)
    assert 0 == run.ends()[-1][0]["killed"]


def test_an_agent_that_replaces_another_one_kills_no_process_that_only_has_its_number(hosted):
    run = hosted()
    other = subprocess.Popen(["sleep", "60"])
    run.processes.append(other)
    run.arguments["replaces"] = other.pid
    run.leave()
    agent = run.first["pid"]
    assert "ready" == run.join("start_agent")["kind"]
    assert (other.poll(), is_gone(agent)) == (None, False)
    os.kill(agent, signal.SIGKILL)


def test_ranks_end_with_the_slurm_step_of_their_agent_long_before_its_lease(hosted, tmp_path):
    step = StepTransport(tmp_path / "step")
    run = hosted(transport=step)
    rank = run.start("sh", "-c", "trap '' TERM; sleep 600")
    run.until("alive")
    assert rank.poll() is None
    os.close(step.reader)
    assert rank.wait(DEADLINE_S) == -9
    until(lambda: not run.scratch.exists())
    run.leave()
    step.close()
    run.transport = LocalTransport("box")
    gone = run.join()
    assert (gone["kind"], gone["reason"]) == (
        "gone",
        "its agent noticed that Slurm had ended its step and ended its ranks",
    )


def test_a_lease_that_is_renewed_goes_on(hosted):
    run = hosted(lease_s=1.5)
    process = run.start()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        clock = run.until("alive")[-1][0]["clock"]
        run.send(kind="renew", heard=clock, received=run.received)
    assert process.poll() is None


def test_renewals_that_say_nothing_new_do_not_prolong_the_lease(hosted):
    run = hosted(lease_s=1.5)
    process = run.start()
    clock = run.until("alive")[-1][0]["clock"]
    with contextlib.suppress(HostError):
        while time.monotonic() < run.begun + DEADLINE_S:
            run.send(kind="renew", heard=clock, received=run.received)
            run.until("alive")
    assert time.monotonic() < run.begun + DEADLINE_S
    assert process.wait(DEADLINE_S) == -9


def test_the_agent_is_no_part_of_the_session_that_started_it(hosted):
    run = hosted()
    assert os.getsid(run.first["pid"]) not in {os.getsid(0), run.first["pid"]}
    assert run.run_id.encode() not in Path(f"/proc/{run.first['pid']}/environ").read_bytes()


@given(st.binary(min_size=1, max_size=300) | st.builds(contract.pack_frame, st.dictionaries(st.text(), WORDS)))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_over_its_socket_the_agent_goes_on(agent_once, data):
    run = agent_once
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(run.scratch / "agent"))
        with contextlib.suppress(BrokenPipeError):
            stranger.sendall(contract.pack_frame(HELLO | {"received": run.received}) + data)
            stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(65536):
            continue
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(str(run.scratch / "agent"))
        assert contract.read_frame(launcher.recv)[0]["kind"] == "ready"


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (
            b"\xff" * 8,
            "the data are not a launcher's message: not a frame: b'\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff'",
        ),
        (contract.pack_frame({"kind": "end", "order": 1}), "the data are not a launcher's message: end before hello"),
        (
            contract.pack_frame(HELLO | {"received": 7}),
            "the data are not a launcher's message: 7 pieces received, of which 0 to 0 are in question",
        ),
        (
            contract.pack_frame({"kind": "hello", "received": 0}),
            "the data are not a launcher's message: it is of version 0, this agent of " + str(contract.AGENT_VERSION),
        ),
    ],
)
def test_what_the_agent_does_not_understand_it_names(hosted, frame, reason):
    run = hosted()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(run.scratch / "agent"))
        stranger.sendall(frame)
        assert contract.read_frame(stranger.recv)[0]["kind"] == "ready"
        assert contract.read_frame(stranger.recv)[0] == {"kind": "refused", "reason": reason}
        assert stranger.recv(1) == b""
    run.until("alive")


def test_a_shim_that_vanishes_without_a_record_is_reported_once(hosted):
    run = hosted()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    run.write(
        "records/rank-3.progress.jsonl", json.dumps({"pid": 4194304, "shim_pid": int(gone.stdout)}).encode() + b"\n"
    )
    assert run.until("lost_shim")[-1][0]["rank"] == 3
    later = run.until("alive") + run.until("alive")
    assert [header["kind"] for header, _ in later if header["kind"] == "lost_shim"] == []


def test_a_shim_that_wrote_its_record_is_not_lost(hosted):
    run = hosted()
    run.write("records/rank-3.exit.json", b"{}")
    run.write("records/rank-3.progress.jsonl", b'{"pid": 4194304, "shim_pid": 4194304}\n')
    assert "lost_shim" not in {header["kind"] for header, _ in run.until("alive")}


def test_the_code_is_locked_while_the_run_lives(hosted, tmp_path):
    run = hosted()
    with (tmp_path / "lock").open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run.ends()
        fcntl.flock(file, fcntl.LOCK_EX)


def test_a_folder_that_cannot_be_made_is_refused(hosted, tmp_path):
    (tmp_path / "runs").write_text("a file is in the way")
    first = hosted().first
    assert first["kind"] == "refused"
    assert str(tmp_path / "runs") in first["reason"]


def test_folders_of_old_runs_are_tidied_up_but_not_of_live_ones(hosted, tmp_path):
    for number in range(25):
        (tmp_path / f"runs/2020-01-{number:02}").mkdir(parents=True)
    live = subprocess.Popen(["sleep", "60"], env={**os.environ, "TTLAUNCH_RUN_ID": "2020-01-00"})
    deadline = time.monotonic() + DEADLINE_S
    while b"2020-01-00" not in Path(f"/proc/{live.pid}/environ").read_bytes() and time.monotonic() < deadline:
        pass
    try:
        run = hosted(run_id="2026-01-01")
        left = sorted(path.name for path in run.folder.parent.iterdir())
    finally:
        live.kill()
        live.wait()
    assert left == ["2020-01-00", *(f"2020-01-{number:02}" for number in range(5, 25)), "2026-01-01"]
