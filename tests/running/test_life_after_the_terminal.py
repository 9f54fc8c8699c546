"""A run belongs to its supervisor: what happens to whoever watches it does not hurt it, unless it was meant to."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.agent.run_processes import run_processes
from ttlaunch.cli.session import start_session
from ttlaunch.cli.watching import status_without_run
from ttlaunch.diagnostics import Format

pytestmark = pytest.mark.mpi

# Says its number, waits until it is let go, and says it again.
WAITS = """\
import os, pathlib, time
rank = os.environ["TTLAUNCH_RANK"]
print("begun", flush=True)
pathlib.Path(f"part-{rank}").write_text(str(os.getpid()))
os.replace(f"part-{rank}", f"ready-{rank}")
end = time.monotonic() + 60
while not pathlib.Path("go").exists() and time.monotonic() < end:
    time.sleep(0.02)
print("ended", flush=True)
"""
WITHIN_S = 10
STANDSTILL_S = 5.5


@pytest.fixture
def waiting(here, start_run):
    """A run of two ranks that have begun and wait for a file `go`."""
    (here / "work.py").write_text(WAITS)

    def start(*options):
        run = start_run("work.py", "-n", "2", *options)
        for rank in range(2):
            run.wait_for_file(f"ready-{rank}")
        return run

    return start


def attach(here, *options):
    """A second process that watches the newest run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ttlaunch", "attach", *options],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.core
def test_a_closed_terminal_ends_the_watching_and_not_the_run(here, waiting, until):
    run = waiting()
    run.process.send_signal(signal.SIGHUP)
    assert 129 == run.ends(within_s=WITHIN_S)
    assert run.processes() != []
    (here / "go").touch()
    until((run.run_folder / "report.json").is_file, within_s=WITHIN_S, what="the run ends by itself")
    assert "done" == run.report["status"]


def test_a_terminal_that_hangs_up_does_not_hurt_the_run(here, until):
    (here / "work.py").write_text(WAITS)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ttlaunch", "run", "work.py", "-n", "2"],
        cwd=here,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,  # noqa: PLW1509 - there are no threads here
    )
    os.close(theirs)
    until(lambda: (here / "ready-1").is_file() and (here / "ready-0").is_file(), within_s=30, what="both ranks begin")
    os.close(ours)  # the kernel hangs up
    process.wait(WITHIN_S)
    (here / "go").touch()
    until(lambda: list(here.glob("runs/*/report.json")), within_s=WITHIN_S, what="the run ends by itself")
    (report,) = here.glob("runs/*/report.json")
    assert "done" == json.loads(report.read_text())["status"]


def _take_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_z_stops_the_watching_and_not_the_run(here, waiting, until):
    run = waiting()
    run.process.send_signal(signal.SIGSTOP)  # the kernel ignores SIGTSTP in a session without a shell
    until(lambda: _state(run.process.pid) == "T", within_s=WITHIN_S, what="the view stops")
    (here / "go").touch()
    until((run.run_folder / "report.json").is_file, within_s=WITHIN_S, what="the run ends by itself")
    run.process.send_signal(signal.SIGCONT)
    assert 0 == run.ends(within_s=WITHIN_S)
    assert "×2 ranks 0-1 | ended\n" in run.stdout


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_supervisor_hears_ctrl_c(waiting, until):
    run = waiting("--grace", "1")
    supervisor = run.supervisor()
    os.kill(supervisor, signal.SIGSTOP)
    until(lambda: _state(supervisor) == "T", within_s=WITHIN_S, what="it stops")
    run.process.send_signal(signal.SIGINT)
    assert 130 == run.ends(within_s=WITHIN_S)
    assert [] == run.processes()


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGTERM, 143, ""),
        (signal.SIGKILL, 1, "error[R050]: the supervisor was killed by SIGKILL\n = note: no ranks were running\n\n"),
    ],
)
def test_a_supervisor_that_ends_while_no_ranks_run_has_a_status_of_its_own(number, status, said, capsys):
    session = start_session(lambda _: os.kill(os.getpid(), number) or 0)
    assert status == status_without_run(session.exit_status(), form=Format.FULL)
    assert said == capsys.readouterr().err


def test_a_failure_is_told_although_nobody_reads_the_lines_any_more(here):
    (here / "work.py").write_text("for number in range(9999):\n    print(number, flush=True)\nraise SystemExit(3)\n")
    started = subprocess.Popen(
        [sys.executable, "-m", "ttlaunch", "run", "work.py"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with started as process:
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        said = process.stderr.read()
    first = "error[R003]: rank 0 (rank, localhost) exited with status 3"
    assert (1, first) == (process.returncode, said.splitlines()[0])


def test_a_supervisor_that_is_interrupted_on_and_on_leaves_a_report(waiting, until):
    run = waiting()
    supervisor = run.supervisor()

    def is_over():
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGINT)
        return run.process.poll() is not None

    until(is_over, within_s=WITHIN_S, what="the run ends")
    assert ("interrupted", 130) == (run.report["status"], run.report["exit_status"])


def test_a_full_disk_below_our_output_does_not_hurt_the_run(here):
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "ttlaunch", "run", "--", "echo", "up"],
            cwd=here,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
    said = "stdout cannot be written: no space left on device; the run continues, and its folder keeps all output\n"
    assert (0, said) == (answer.returncode, answer.stderr)


def test_a_run_whose_folder_is_removed_is_ended_at_once(waiting):
    run = waiting()
    folder = run.run_folder
    shutil.rmtree(folder)
    assert 1 == run.ends(within_s=WITHIN_S)
    assert run.stderr.startswith("error[R010]: the run folder can no longer be used: no such file or directory\n")
    assert [] == run_processes(folder.name)


@pytest.mark.core
def test_a_killed_view_takes_the_run_along(here, waiting, until):
    run = waiting("--grace", "1")
    run.process.kill()
    until(lambda: run.processes() == [], within_s=WITHIN_S, what="the run ends")
    until((run.run_folder / "report.json").is_file, within_s=WITHIN_S, what="it is written down")
    assert ("terminated", 143) == (run.report["status"], run.report["exit_status"])
    until(lambda: run.scratch_folders() == [], within_s=WITHIN_S, what="its shared memory is gone")


def test_ctrl_backslash_leaves_the_run_and_attach_shows_every_line(here, waiting):
    run = waiting()
    run.process.send_signal(signal.SIGQUIT)
    assert 0 == run.ends(within_s=WITHIN_S)
    name = run.run_folder.name
    assert f"{name} continues; `ttlaunch attach {name}` shows it again\n" in run.stdout
    (here / "go").touch()
    shown = attach(here, "latest")
    assert 0 == shown.returncode
    headline, begun, ended, done, *_ = shown.stdout.splitlines()
    assert [f"run {name}: work on local, 2 ranks", "×2 ranks 0-1 | begun", "×2 ranks 0-1 | ended"] == [
        headline,
        begun,
        ended,
    ]
    assert done.startswith("done: work on local, 2 ranks, ")
    assert shown.stdout == attach(here, name[-4:]).stdout, "a run that is over shows the same"


def test_a_detached_run_is_attached_to_and_its_exit_status_is_ours(here, until):
    (here / "work.py").write_text(WAITS + "raise SystemExit(3)\n")
    started = subprocess.run(
        [sys.executable, "-m", "ttlaunch", "run", "-d", "work.py", "-n", "2", "--format", "json"],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    said = json.loads(started.stdout)
    assert (
        said["supervisor_pid"]
        == json.loads((here / "runs" / said["run_id"] / contract.LAUNCHER_FILE).read_text())["pid"]
    )
    (here / "go").touch()
    shown = attach(here, "latest", "--format", "json")
    report = json.loads(shown.stdout)
    assert (1, "R003") == (shown.returncode, report["diagnostics"][0]["code"])
    assert (said["run_id"], "failed") == (report["run_id"], report["status"])


def test_ctrl_c_of_an_attached_view_ends_the_run(here, start_run, until):
    (here / "work.py").write_text(WAITS)
    run = start_run("work.py", "-n", "2", "--grace", "1", "-d")
    assert 0 == run.ends(within_s=WITHIN_S)
    until(lambda: (here / "ready-1").is_file() and (here / "ready-0").is_file(), within_s=30, what="both ranks begin")
    process = subprocess.Popen(
        [sys.executable, "-m", "ttlaunch", "attach"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("run ")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert 130 == process.returncode
    assert "interrupted: work on local, 2 ranks" in stdout
    assert stderr.startswith("Ctrl-C: ranks were sent SIGTERM and have 1 s to end")
    assert [] == run.processes()


def test_a_detached_run_that_cannot_start_says_why(here, start_run):
    run = start_run("-d", "no_such_recipe")
    assert 2 == run.ends(within_s=WITHIN_S)
    assert not (here / "runs").exists()


def test_a_supervisor_that_stood_still_writes_it_down(here, waiting, until):
    run = waiting()
    os.kill(run.supervisor(), signal.SIGSTOP)
    time.sleep(STANDSTILL_S)
    os.kill(run.supervisor(), signal.SIGCONT)
    (here / "go").touch()
    assert 0 == run.ends(within_s=WITHIN_S)
    events = [json.loads(line) for line in (run.run_folder / contract.EVENTS_FILE).read_text().splitlines()]
    (still,) = [event for event in events if event["event"] == "stood_still"]
    assert STANDSTILL_S <= still["seconds"] < STANDSTILL_S + WITHIN_S


def test_a_backlog_that_nobody_wants_to_see_is_cut_short(here, until):
    """The reader of the command's output reads nothing while the run comes to its end."""
    (here / "work.py").write_text("for number in range(20_000):\n    print('a long line', number)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "ttlaunch", "run", "work.py"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: list(here.glob("runs/*/report.json")), within_s=30, what="the run ends")
    until(lambda: _waiting(process.stdout) > 60_000, within_s=WITHIN_S, what="the view waits for its reader")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    (folder,) = here.glob("runs/[!.]*/")
    assert (0, f"the rest of what ranks printed is in runs/{folder.name}/logs/\n") == (process.returncode, stderr)
    *shown, done, where, following = stdout.splitlines()
    assert 20_000 > len(shown)
    assert done.startswith("done: work on local, 1 rank, ")
    assert f"  run folder       runs/{folder.name}" == where
    assert f"  next             ttlaunch logs {folder.name[-4:]}" == following


def _waiting(pipe):
    """How many bytes a pipe holds that nobody has read."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
