"""The attendant: what a run writes on a host comes home, and nothing of the run outlives the connection."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttlaunch.remote.local import LocalTransport
from ttlaunch.remote.pushed import start_script

DEADLINE_S = 60.0


class Attended:
    """A run with an attendant on this machine."""

    def __init__(self, folder, run_id="run-1"):
        self.run_id = run_id
        self.folder = folder / "runs" / run_id
        self.scratch = folder / f"scratch-{run_id}"
        self.transport = LocalTransport("box")
        self.arguments = {
            "run_id": run_id,
            "folder": str(self.folder),
            "scratch": str(self.scratch),
            "lock": str(folder / "lock"),
            "files": {"plan.json": "{}", "start": "exec true\n"},
        }
        self.stream = start_script(
            self.transport,
            "attend",
            beside=("run_processes", "last_word", "spy"),
            arguments=self.arguments,
            timeout_s=DEADLINE_S,
        )
        self.first = self.stream.expect(timeout_s=DEADLINE_S)[0]
        self.processes = []

    def start(self, *words):
        environment = {**os.environ, "TTLAUNCH_RUN_ID": self.run_id}
        process = subprocess.Popen(words or ("sleep", "60"), env=environment, start_new_session=True)
        self.processes.append(process)
        end = time.monotonic() + DEADLINE_S
        while self.run_id.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes():
            assert time.monotonic() < end  # a process has no environment for a moment while it becomes another program
        return process

    def write(self, name, data):
        with (self.folder / name).open("ab") as file:
            file.write(data)

    def until(self, kind):
        """All frames up to the first of this kind."""
        frames = []
        while not frames or frames[-1][0]["kind"] != kind:
            frames.append(self.stream.expect(timeout_s=DEADLINE_S))
        return frames

    def content(self, frames, name):
        pieces = [(header["offset"], body) for header, body in frames if header.get("name") == name]
        return b"".join(body for _, body in sorted(pieces))

    def close(self):
        self.transport.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def attended(tmp_path):
    made = []

    def make(**arguments):
        made.append(Attended(tmp_path, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_run_gets_a_private_folder_with_its_files(attended):
    run = attended()
    assert run.first["kind"] == "ready"
    assert (run.folder / "plan.json").read_text() == "{}"
    assert run.folder.stat().st_mode & 0o777 == 0o700
    assert run.scratch.stat().st_mode & 0o777 == 0o700


def test_what_ranks_write_comes_home_byte_for_byte(attended):
    run = attended()
    data = bytes(range(256)) * 10_000
    run.write("logs/rank-0.stdout", data[:100])
    frames = run.until("file")
    run.write("logs/rank-0.stdout", data[100:])
    run.stream.send({"kind": "end"}, timeout_s=DEADLINE_S)
    frames += run.until("ended")
    assert run.content(frames, "logs/rank-0.stdout") == data


def test_a_record_comes_whole_and_its_unfinished_form_never(attended):
    run = attended()
    run.write("records/rank-0.exit.json.tmp", b"half")
    run.write("records/rank-0.error.unfinished", b"half")
    run.write("records/rank-0.exit.json", b'{"status": 3}')
    run.stream.send({"kind": "end"}, timeout_s=DEADLINE_S)
    files = [header for header, _ in run.until("ended") if header["kind"] == "file"]
    assert [(header["name"], header["whole"]) for header in files] == [("records/rank-0.exit.json", True)]


def test_an_end_kills_what_still_runs_and_counts_it(attended):
    run = attended()
    process = run.start()
    run.stream.send({"kind": "end"}, timeout_s=DEADLINE_S)
    assert run.until("ended")[-1][0]["killed"] == 1
    assert process.wait(DEADLINE_S) == -9
    assert run.stream.process.wait(timeout_s=DEADLINE_S) == 0
    assert not run.scratch.exists()
    assert sorted(path.name for path in run.folder.iterdir()) == ["plan.json", "start"]


def test_a_signal_reaches_the_ranks_that_are_named_and_nothing_else_of_the_run(attended):
    run = attended()
    named, unnamed, no_rank = run.start(), run.start(), run.start()
    for number, rank in enumerate((named, unnamed)):
        started = json.dumps({"pid": rank.pid, "shim_pid": os.getpid()})
        run.write(f"records/rank-{number}.progress.jsonl", started.encode() + b"\n")
        run.until("file")
    run.stream.send({"kind": "signal", "ranks": [0, 7], "number": signal.SIGUSR1}, timeout_s=DEADLINE_S)
    assert named.wait(DEADLINE_S) == -signal.SIGUSR1
    run.until("alive")
    assert [unnamed.poll(), no_rank.poll()] == [None, None]


def test_a_look_brings_what_is_new_and_says_which_ranks_are_stopped(attended):
    run = attended()
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
    run.stream.send({"kind": "look", "number": 7}, timeout_s=DEADLINE_S)
    *before, (looked, _) = run.until("looked")
    assert "blackbox/rank-1.box" in [header.get("name") for header, _ in before]
    assert (looked["number"], looked["stopped"], [rank for rank, _ in looked["faults"]]) == (7, [1], [0, 1])


def test_processes_of_other_runs_are_left_alone(attended):
    run, other = attended(), attended(run_id="run-12")
    process = other.start()
    run.stream.send({"kind": "end"}, timeout_s=DEADLINE_S)
    assert run.until("ended")[-1][0]["killed"] == 0
    assert process.poll() is None


def test_a_lost_connection_ends_the_run_on_the_host(attended):
    run = attended()
    process = run.start()
    run.stream.process.close_stdin()
    assert process.wait(DEADLINE_S) == -9
    assert run.stream.process.wait(timeout_s=DEADLINE_S) == 0


def test_a_shim_that_vanishes_without_a_record_is_reported_once(attended):
    run = attended()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    run.write(
        "records/rank-3.progress.jsonl", json.dumps({"pid": 4194304, "shim_pid": int(gone.stdout)}).encode() + b"\n"
    )
    assert run.until("lost_shim")[-1][0]["rank"] == 3
    later = run.until("alive")
    assert [header["kind"] for header, _ in later if header["kind"] == "lost_shim"] == []


def test_a_shim_that_wrote_its_record_is_not_lost(attended):
    run = attended()
    run.write("records/rank-3.exit.json", b"{}")
    run.write("records/rank-3.progress.jsonl", b'{"pid": 4194304, "shim_pid": 4194304}\n')
    assert "lost_shim" not in {header["kind"] for header, _ in run.until("alive")}


def test_the_code_is_locked_while_the_run_lives(attended, tmp_path):
    run = attended()
    with (tmp_path / "lock").open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run.stream.send({"kind": "end"}, timeout_s=DEADLINE_S)
        run.until("ended")
        run.stream.process.wait(timeout_s=DEADLINE_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_made_is_refused(attended, tmp_path):
    (tmp_path / "runs").write_text("a file is in the way")
    first = attended().first
    assert first["kind"] == "refused"
    assert str(tmp_path / "runs") in first["reason"]


def test_folders_of_old_runs_are_tidied_up_but_not_of_live_ones(attended, tmp_path):
    for number in range(25):
        (tmp_path / f"runs/2020-01-{number:02}").mkdir(parents=True)
    live = subprocess.Popen(["sleep", "60"], env={**os.environ, "TTLAUNCH_RUN_ID": "2020-01-00"})
    deadline = time.monotonic() + DEADLINE_S
    while b"2020-01-00" not in Path(f"/proc/{live.pid}/environ").read_bytes() and time.monotonic() < deadline:
        pass
    try:
        run = attended(run_id="2026-01-01")
        left = sorted(path.name for path in run.folder.parent.iterdir())
    finally:
        live.kill()
        live.wait()
    assert left == ["2020-01-00", *(f"2020-01-{number:02}" for number in range(5, 25)), "2026-01-01"]
