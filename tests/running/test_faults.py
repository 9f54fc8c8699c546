"""Whatever breaks, in whichever role: the run ends in time, names who broke first, and leaves nothing behind.

The seconds from the fault to the end of the command are printed (`pytest -s`).
"""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.forked import FORKED

pytestmark = pytest.mark.mpi

RECIPES = Path(__file__).parents[2] / "recipes"
WITHIN_S = 5.0
"""What the run may take from the fault to its end."""

TINY = """\
training_config: {steps: 60, batch_size: 4, micro_batch_size: 2, validation_sequences: 4}
transformer_config: {num_blocks: 1, num_heads: 2, embedding_dim: 16, max_sequence_length: 16}
multihost_config: {num_workers: 2}
"""
# Appended to a recipe's trainer: a rank breaks when it is about to begin its third step.
BREAKS = """

_whole_{role} = {role}


def {role}(cfg, ctx):
    import os, pathlib, signal, time
    steps = ctx.steps

    def steps_until_it_breaks(cfg):
        for step in steps(cfg):
            if step == 3 and ctx.rank == {rank}:
                pathlib.Path("fault.part").write_text(str(time.time()))
                os.replace("fault.part", "fault")
                {fault}
            yield step

    ctx.steps = steps_until_it_breaks
    _whole_{role}(cfg, ctx)
"""
ROLES = {"worker": 1, "aggregator": 2, "optimizer": 3}
FAULTS = {
    "exception": ('raise ValueError("bucket 7 is short")', "R002", "raised ValueError"),
    "exit-3": ("os._exit(3)", "R003", "exited with status 3"),
    "exit-0": ("os._exit(0)", "R005", "left with status 0 before its role was finished"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "R004", "was killed by SIGKILL"),
    "segv": ("os.kill(os.getpid(), signal.SIGSEGV)", "R004", "crashed with SIGSEGV"),
}
# A rank that computes outside MPI: what mpirun is known to leave behind.
BUSY = """\
import os, pathlib, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
rank = os.environ["TTLAUNCH_RANK"]
pathlib.Path(f"part-{rank}").write_text(str(os.getpid()))
os.replace(f"part-{rank}", f"ready-{rank}")
end = time.monotonic() + 120
while time.monotonic() < end:
    sum(range(1000))
"""


ESCAPE = "__import__('subprocess').Popen(['sleep', '600'], start_new_session=True)\n"


def assert_nothing_is_left(run):
    assert run.processes() == []
    assert run.scratch_folders() == []


def fill(file):
    """Write until the disk is full."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while filler.write(bytes(size)):
                    pass


def assert_failed(run, *, code, rank, role, cause):
    """The message and the report name the same first failure."""
    said = f"rank {rank} ({role}, localhost) {cause}"
    assert run.stderr.partition("error[")[2].partition("\n")[0] == f"{code}]: {said}", run.stdout + run.stderr
    failure = run.report["failure"]
    assert (failure["code"], failure["rank"], failure["role"], failure["host"]) == (code, rank, role, "localhost")
    assert (run.report["status"], run.report["exit_status"]) == ("failed", 1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("role", ROLES)
def test_a_broken_rank_ends_the_run_and_is_named(here, start_run, role, fault):
    statement, code, cause = FAULTS[fault]
    shutil.copytree(RECIPES / "hierarchical_parallel", here / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    with (here / "mine/trainer.py").open("a") as file:
        file.write(BREAKS.format(role=role, rank=ROLES[role], fault=statement))
    (here / "train.yaml").write_text(TINY)
    run = start_run("mine", "-c", "train.yaml", *FORKED)
    broke = float(run.wait_for_file("fault"))
    status = run.ends(within_s=WITHIN_S - (time.time() - broke))
    print(f"\n{role} {fault}: {time.time() - broke:.1f} s")
    assert status == 1
    assert_failed(run, code=code, rank=ROLES[role], role=role, cause=f"{cause} in step 3")
    assert run.report["failure"]["step"] == 3
    last = [rank["last_operation"] for rank in run.report["ranks"]]
    assert [True] * 4 == [bool(one and one["operation"] and one["bytes"]) for one in last], "boxes outlive their ranks"
    assert_nothing_is_left(run)


@pytest.mark.core
def test_a_script_that_raises_does_not_hang_its_peers(here, start_run):
    (here / "work.py").write_text(
        "from mpi4py import MPI\nif MPI.COMM_WORLD.rank:\n    1 / 0\nMPI.COMM_WORLD.barrier()\n"
    )
    run = start_run("work.py", "-n", "2")
    assert run.ends(within_s=20) == 1
    assert_failed(run, code="R002", rank=1, role="rank", cause="raised ZeroDivisionError")
    assert run.report["failure"]["place"] == f"{here}/work.py:3"
    assert "ZeroDivisionError: division by zero" in run.stderr
    assert_nothing_is_left(run)


@pytest.mark.core
def test_a_rank_killed_from_outside_is_named(here, start_run):
    (here / "work.py").write_text(BUSY)
    run = start_run("work.py", "-n", "2")
    run.wait_for_file("ready-0")
    os.kill(int(run.wait_for_file("ready-1")), signal.SIGKILL)
    broke = time.monotonic()
    assert run.ends(within_s=WITHIN_S) == 1
    print(f"\nSIGKILL of a rank: {time.monotonic() - broke:.1f} s")
    assert_failed(run, code="R004", rank=1, role="rank", cause="was killed by SIGKILL")
    assert_nothing_is_left(run)


def test_a_rank_killed_while_the_disk_is_full_is_named(here, start_run, make_disk):
    """Whoever writes that it has ended is the first to meet the full disk."""
    disk = make_disk("8m")
    (here / "work.py").write_text(BUSY)
    run = start_run("work.py", "-n", "2", "--engine", "openmpi", "--runs-dir", str(disk))
    other, killed = (int(run.wait_for_file(f"ready-{rank}")) for rank in range(2))
    fill(disk / "filler")
    os.kill(killed, signal.SIGKILL)
    assert run.ends(within_s=WITHIN_S) == 1
    assert "error[R004]: rank 1 (rank, localhost) was killed by SIGKILL\n" in run.stderr
    assert "the run folder can no longer be used: no space left on device" in run.stderr
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.core
def test_a_killed_shim_takes_its_rank_along_and_is_named(here, start_run):
    (here / "work.py").write_text(BUSY)
    run = start_run("work.py", "-n", "2", "--", "stubborn")
    run.wait_for_file("ready-0")
    run.wait_for_file("ready-1")
    os.kill(run.records(1)[0]["shim_pid"], signal.SIGKILL)
    broke = time.monotonic()
    assert run.ends(within_s=WITHIN_S) == 1
    print(f"\nSIGKILL of a shim: {time.monotonic() - broke:.1f} s")
    assert_failed(run, code="R006", rank=1, role="rank", cause="was lost: its shim was killed from outside")
    assert_nothing_is_left(run)


def test_a_killed_mpirun_is_named_and_no_rank_is_blamed(here, start_run):
    (here / "work.py").write_text(BUSY)
    run = start_run("--engine", "openmpi", "work.py", "-n", "2", "--", "stubborn")
    run.wait_for_file("ready-0")
    run.wait_for_file("ready-1")
    os.kill(run.mpirun(), signal.SIGKILL)
    broke = time.monotonic()
    assert run.ends(within_s=WITHIN_S) == 1
    print(f"\nSIGKILL of mpirun: {time.monotonic() - broke:.1f} s")
    assert run.stderr.startswith("error[R008]: mpirun was killed by SIGKILL; no rank had failed\n")
    assert (run.report["failure"]["code"], run.report["failure"]["rank"]) == ("R008", None)
    assert_nothing_is_left(run)


@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGUSR1, 9, "time limit")],
    ids=["ctrl-c", "term", "time limit"],
)
def test_a_signal_to_the_launcher_ends_every_rank(here, start_run, number, status, word, manner):
    (here / "work.py").write_text(BUSY)
    run = start_run("work.py", "-n", "2", "--grace", "1", "--", manner)
    run.wait_for_file("ready-0")
    run.wait_for_file("ready-1")
    run.process.send_signal(number)
    sent = time.monotonic()
    assert run.ends(within_s=WITHIN_S) == status
    print(f"\n{number.name} of the launcher, ranks {manner}: {time.monotonic() - sent:.1f} s")
    assert (run.report["status"], run.report["exit_status"]) == (word, status)
    assert run.report["failure"] is None
    assert "error" not in run.stderr
    assert f"\n{word}: work on local, 2 ranks, " in run.stdout
    assert_nothing_is_left(run)


def test_a_killed_supervisor_leaves_nothing_and_is_named(here, start_run, until):
    (here / "work.py").write_text(BUSY.replace("rank =", ESCAPE + "rank =", 1))
    run = start_run("work.py", "-n", "2", "--", "stubborn")
    run.wait_for_file("ready-0")
    run.wait_for_file("ready-1")
    assert len(run.scratch_folders()) == 1
    os.kill(run.supervisor(), signal.SIGKILL)
    sent = time.monotonic()
    assert run.ends(within_s=WITHIN_S) == 1
    name = run.run_folder.name
    assert run.stderr.startswith(f"error[R050]: the supervisor of {name} was killed by SIGKILL\n"), run.stderr
    left_s = WITHIN_S - (time.monotonic() - sent)
    until(lambda: run.processes() == [] and run.scratch_folders() == [], within_s=left_s, what="nothing is left")
    print(f"\nSIGKILL of the supervisor: {time.monotonic() - sent:.1f} s")


def test_a_grandchild_that_escapes_is_killed_and_reported(here, start_run):
    (here / "work.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('done')\n"
    )
    run = start_run("work.py")
    assert run.ends(within_s=20) == 0
    assert run.report["leftovers"] == 1
    assert "\n  left behind      1 process, killed\n" in run.stdout
    assert_nothing_is_left(run)


def test_a_program_that_cannot_be_executed_is_named(here, start_run):
    (here / "work.sh").write_text("#!/no/such/interpreter\n")
    (here / "work.sh").chmod(0o755)
    run = start_run("work.sh", "-n", "2")
    assert run.ends(within_s=20) == 1
    failure = run.report["failure"]
    assert (failure["code"], failure["role"]) == ("R007", "rank")
    why = f"there is no `/no/such/interpreter`, which the first line of {here / 'work.sh'} names"
    cause = f"could not be started: {why}"
    assert run.stderr.partition("error[")[2].startswith(f"R007]: rank {failure['rank']} (rank, localhost) {cause}\n")


def test_events_tell_the_history_of_a_failed_run(here, start_run):
    (here / "work.py").write_text("raise SystemExit(3)\n")
    run = start_run("work.py")
    assert run.ends(within_s=20) == 1
    events = [json.loads(line)["event"] for line in (run.run_folder / "events.jsonl").read_text().splitlines()]
    assert events[:2] == ["prepared", "start"]
    # The engine may have ended before the failure was noticed, or before it was ended.
    assert events[2:] in (["end"], ["failed", "end"], ["failed", "ending", "end"])
