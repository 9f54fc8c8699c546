"""Runs that hang: each ends in time with status 6, and names the rank that the others wait for, or what does not fit.

Real ranks that break a small recipe; what only differs in words is judged from scripted recordings in `test_verdict.py`.
"""

import re
import sys
import time
import venv
from pathlib import Path

import pytest

from tests.recipes.peers import PEERS
from ttlaunch import contract

pytestmark = pytest.mark.mpi

ROOT = Path(contract.__file__).parents[1]
TIMEOUT_S = 2
WITHIN_S = TIMEOUT_S + 5.0

TRAINER = """\
import os, pathlib, signal, time
import torch
from ttlaunch.train import barrier


def wait_for_nothing():
    part = f"fault-{os.getpid()}"
    pathlib.Path(part).write_text("now")
    os.replace(part, "fault")


def peer(cfg, ctx):
    one = torch.zeros(2)
    for step in range(1, 4):
        ctx.step = step
        ctx.traffic.begin_step(step)
        exchange(ctx, one, step)
        ctx.report(step)


def around(ctx, one):
    pending = ctx.isend(one, dest=(ctx.rank + 1) % ctx.world_size)
    ctx.recv(torch.zeros(2), source=(ctx.rank - 1) % ctx.world_size)
    pending.wait()


def exchange(ctx, one, step):
    around(ctx, one)
    if step == 2:
        hang(ctx, one)
"""
HANGS = {
    "sleeps": (
        "    if ctx.rank == 1:\n        wait_for_nothing()\n        time.sleep(600)\n    around(ctx, one)",
        3,
        (
            "R014",
            1,
            "has not moved for SECONDS s: 2 ranks wait for it, and it waits for none, in `hang` at trainer.py:36",
        ),
    ),
    "recv-recv": (
        "    wait_for_nothing()\n    ctx.recv(one, source=1 - ctx.rank)\n    ctx.send(one, dest=1 - ctx.rank)",
        2,
        ("R015", None, "waits in a circle, {}: all of them receive and none sends"),
    ),
    "wrong-tag": (
        (
            "    wait_for_nothing()\n    if ctx.rank == 0:\n        ctx.recv(one, source=1, tag=5)\n"
            "    else:\n        ctx.send(one, dest=0, tag=6)\n        ctx.recv(one, source=0)"
        ),
        2,
        ("R016", 0, "waits for tag 5 of rank 1 (peer), which has sent it tag 6 instead"),
    ),
    "stopped": (
        (
            "    if ctx.rank == 0:\n        wait_for_nothing()\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
            "    around(ctx, one)"
        ),
        2,
        ("R013", 0, "was stopped by a signal, and nobody resumed it within SECONDS s"),
    ),
    "data-loader": (
        (
            "    if ctx.rank == 1:\n        os.mkfifo('data')\n        wait_for_nothing()\n        open('data').read()\n"
            "    around(ctx, one)"
        ),
        2,
        (
            "R014",
            1,
            "has not moved for SECONDS s: 1 rank waits for it, and it waits for none, in `hang` at trainer.py:37",
        ),
    ),
}


NOT_THERE = """\
import os, pathlib, time

if os.environ.get("TTLAUNCH_RANK") == "1":
    pathlib.Path("fault").write_text("now")
    time.sleep(600)
"""


def rounded(text):
    """The message, whatever time a busy machine took to look."""
    return re.sub(r"(for|within) [2-4] s", r"\1 SECONDS s", text)


@pytest.fixture
def start_recipe(here, start_run):
    """`start_recipe(body, ranks, *options)` runs a small recipe whose second step does something else."""
    (here / "mine").mkdir()
    (here / "mine/recipe.py").write_text(PEERS)
    (here / "mine/train.yaml").write_text("{}\n")

    def start(body, ranks, *options):
        (here / "mine/trainer.py").write_text(f"{TRAINER}\n\ndef hang(ctx, one):\n{body}\n")
        return start_run("mine", "-n", str(ranks), *options)

    return start


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_noticed_in_time_and_the_right_rank_is_named(start_recipe, name):
    body, ranks, (code, rank, cause) = HANGS[name]
    run = start_recipe(body, ranks, "--hang-timeout", str(TIMEOUT_S))
    run.wait_for_file("fault")
    began = time.monotonic()
    status = run.ends(within_s=WITHIN_S)
    print(f"\n{name}: {time.monotonic() - began:.1f} s\n{run.stderr}")
    assert status == 6, run.stderr
    failure = run.report["failure"]
    assert (run.report["status"], failure["class"], failure["code"]) == ("hung", "hung", code)
    named = failure["rank"]
    assert rank in {None, named}
    circle = f"{named} → {1 - named} → {named}"
    said = f"error[{code}]: rank {named} (peer, localhost) {cause.format(circle)} in step 2\n"
    assert said in rounded(run.stderr)
    assert len(failure["evidence"]) == ranks, "a line for each rank says whom it waits for"
    stacks = {path.name for path in (run.run_folder / "stacks").iterdir()}
    assert stacks >= {f"rank-{other}.txt" for other in range(ranks) if other != rank}, "a stopped one cannot answer"
    assert run.processes() == []
    assert run.scratch_folders() == []


def test_a_rank_that_leaves_out_what_all_do_together_is_named(start_recipe):
    """It goes on to the next step, where it waits for the others, who wait for it in the barrier."""
    body = "    if ctx.rank == 2:\n        return wait_for_nothing()\n    barrier(ctx, among=ctx.ranks('peer'))"
    run = start_recipe(body, 3, "--hang-timeout", str(TIMEOUT_S))
    assert run.ends(within_s=60) == 6, run.stderr
    assert re.match(
        r"error\[R016\]: rank 2 \(peer, localhost\) has not sent rank (0|1) \(peer\) `barrier` of tag 30000 in step 2, "
        r"as rank (1|0) has, and waits for another message in step 3\n",
        run.stderr,
    )
    assert run.processes() == []


def test_a_rank_that_never_comes_to_mpi_init_is_named(start_recipe, here, monkeypatch):
    """It sleeps before it has imported anything, so that the others never get out of MPI_Init."""
    (here / "site").mkdir()
    (here / "site/sitecustomize.py").write_text(NOT_THERE)
    monkeypatch.setenv("PYTHONPATH", str(here / "site"))
    run = start_recipe("    pass", 2, "--hang-timeout", str(TIMEOUT_S))
    assert run.ends(within_s=60) == 6, run.stderr
    assert run.report["failure"]["rank"] == 1
    assert re.match(
        r"error\[R014\]: rank 1 \(peer, localhost\) has not moved for \d+ s: 1 rank waits for it, and it waits for none, "
        r"(and runs `python[0-9.]*` without a Python stack|in `<module>` at sitecustomize.py:5) while it was starting\n",
        run.stderr,
    )
    assert "rank 0 (peer)  waits for rank 1  MPI_Init" in run.stderr
    assert run.processes() == []


def test_a_slow_run_that_gets_on_is_left_alone(start_recipe):
    """Each of its waits is shorter than the timeout but the one that is announced; all of them together are longer."""
    body = (
        "    for _ in range(4):\n        time.sleep(0.7 * ctx.rank)\n        around(ctx, one)\n"
        "    if ctx.rank:\n        with ctx.announced('evaluation'):\n            time.sleep(3)\n    around(ctx, one)"
    )
    run = start_recipe(body, 2, "--hang-timeout", str(TIMEOUT_S))
    assert run.ends(within_s=90) == 0, run.stderr
    assert run.report["status"] == "done"


@pytest.mark.core
def test_a_program_is_judged_by_its_output_if_a_timeout_is_named(here, start_run):
    (here / "work.py").write_text("import time\nprint('begins', flush=True)\ntime.sleep(600)\n")
    run = start_run("work.py", "-n", "2", "--hang-timeout", str(TIMEOUT_S))
    assert run.ends(within_s=40) == 6
    said = "no rank has printed anything for SECONDS s, and all of them are at the same place\n"
    assert f"error[R017]: {said}" in rounded(run.stderr)
    assert run.report["failure"]["code"] == "R017"
    assert run.processes() == []


STUCK = """\
import os, signal, time
signal.signal(signal.SIGUSR2, lambda *_: print("the script's own signal", flush=True))
os.closerange(3, 256)
with open("mine.txt", "w") as mine:  # has a descriptor that was closed
    def wait_for_a_batch():
        time.sleep(600)
    wait_for_a_batch()
"""


def test_without_py_spy_a_script_writes_its_stacks_and_keeps_its_own_signals_and_files(here, start_run, monkeypatch):
    """In an environment that has all packages but not the program py-spy."""
    venv.create(here / "venv", with_pip=False)
    [packages] = (here / "venv/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(
        "\n".join([str(ROOT), *(path for path in sys.path if path.endswith("-packages"))])
    )
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (here / "work.py").write_text(STUCK)
    run = start_run("work.py", "-n", "2", "--hang-timeout", str(TIMEOUT_S), python=here / "venv/bin/python")
    assert run.ends(within_s=60) == 6, run.stderr
    for rank in (0, 1):
        text = (run.run_folder / contract.stacks_file(rank)).read_text()
        assert re.search(r"Current thread 0x\w+ .*\n  File \".*work.py\", line 6 in wait_for_a_batch\n", text)
    assert "work.py:6" in run.report["failure"]["evidence"][0]
    assert "the script's own signal" not in run.stdout
    assert "" == (here / "mine.txt").read_text()


RING = """\
import ctypes, os, pathlib, signal, sys, threading, time
from mpi4py import MPI

comm = MPI.COMM_WORLD


def load():
    raise ValueError("shard 7 is short")


def main():
    for step in range(400):
        if step == 30 and comm.rank == 1:
            match sys.argv[1]:
                case "another program":
                    os.execvp("sleep", ["sleep", "600"])
                case "finalize":
                    return
                case "holds the interpreter":
                    ctypes.PyDLL(None).sleep(600)
                case "another collective":
                    comm.bcast(1, root=0)
                case "thread":
                    threading.Thread(target=load, name="loader").start()
                    threading.Event().wait()
                case "stopped child":
                    child = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
                    os.kill(child, signal.SIGSTOP)
                    os.waitpid(child, 0)
                case "stopped shim":
                    os.kill(os.getppid(), signal.SIGSTOP)
                case "stopped launcher":
                    os.kill(int(pathlib.Path("launcher").read_text()), signal.SIGSTOP)
        comm.allreduce(1)


pathlib.Path(f"up-{comm.rank}").write_text("up")
while sys.argv[1] == "stopped launcher" and not pathlib.Path("launcher").exists():
    time.sleep(0.05)
main()
"""


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("another program", "R017", "runs `sleep` without a Python stack and sleeps in "),
        ("finalize", "R017", "has left its program and waits while it exits, as in MPI_Finalize, apart from the "),
        ("holds the interpreter", "R017", "is in `main` at ring.py:20, apart from the other 3 ranks; no rank has "),
        ("another collective", "R017", "is in `main` at ring.py:22, apart from the other 3 ranks; no rank has "),
        ("thread", "R017", "its thread `loader` had raised `ValueError: shard 7 is short`"),
        ("stopped child", "R013", "cannot go on: its child `sleep` (process "),
        ("stopped shim", "R013", "cannot go on: its shim (process "),
    ],
    ids=[
        "another program",
        "finalize",
        "holds the interpreter",
        "another collective",
        "thread",
        "stopped child",
        "stopped shim",
    ],
)
def test_the_rank_of_a_program_that_holds_up_the_others_is_named(here, start_run, kind, code, said):
    pytest.importorskip("mpi4py")
    (here / "ring.py").write_text(RING)
    run = start_run("ring.py", "-n", "4", "--hang-timeout", str(TIMEOUT_S), "--", kind)
    assert run.ends(within_s=60) == 6, run.stderr
    failure = run.report["failure"]
    assert (code, 1, "hung") == (failure["code"], failure["rank"], failure["class"])
    assert said in failure["cause"]
    assert run.processes() == []


def test_a_stopped_mpirun_is_named_when_its_ranks_cannot_exit(here, start_run):
    (here / "ring.py").write_text(RING)
    run = start_run("ring.py", "-n", "2", "--hang-timeout", str(TIMEOUT_S), "--", "stopped launcher")
    run.wait_for_file("up-1")
    (here / "launcher").write_text(str(run.mpirun()))
    assert run.ends(within_s=60) == 6, run.stderr
    failure = run.report["failure"]
    assert ("R064", None, "localhost") == (failure["code"], failure["rank"], failure["host"])
    assert f"(process {run.mpirun()}) on this machine" in failure["cause"]
    assert run.processes() == []
