"""Runs whose ranks are forked with `--warm`, when they restart, hang, are broken on purpose or repeated: as with other ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running.conftest import StartedRun
from tests.scripts.launches import FOLDER, losses_in
from ttlaunch import contract
from ttlaunch.agent.run_processes import run_processes
from ttlaunch.agent.stack_dump import find_py_spy

pytestmark = pytest.mark.mpi

RESTARTED = """\
import json, os, random, signal, sys
loaded = "torch" in sys.modules
import torch
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"seen-{rank}-{count}", "w") as file:
    json.dump({"loaded": loaded, "drawn": [random.random(), torch.initial_seed()], "parent": os.getppid()}, file)
if rank == "1" and count == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
STUCK = """\
import faulthandler, os, signal, sys, time
def stuck(rank):
    if rank == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
faulthandler.register(signal.SIGUSR2, open("own-" + os.environ["RANK"], "w"))
open("up-" + os.environ["RANK"], "w").write("up")
stuck(os.environ["RANK"])
"""
WAIT = "import sys, time\nprint('torch' in sys.modules, flush=True)\ntime.sleep(600)\n"
DESCRIPTOR = Path(__file__).parents[2] / "configurations/2loudboxes/mgd.yaml"
BINDINGS = """\
rank_bindings:
  - {rank: 0, mesh_id: 1}
  - {rank: 1, mesh_id: 0, env_overrides: {OMP_NUM_THREADS: "2"}}
mesh_graph_desc_path: mgd.yaml
"""
# As a library with threads that survive a fork: it ends them before each, and starts them again in the parent. It stands in for torch.
THREADS = """\
import os, threading
class Worker:
    def start(self):
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.stop.wait, daemon=True)
        self.thread.start()
    def end(self):
        if hasattr(self, "thread"):
            self.stop.set()
            self.thread.join()
worker = Worker()
os.register_at_fork(before=worker.end, after_in_parent=worker.start)
def initial_seed():
    return 67280421310721
"""


@pytest.fixture
def script(here, start_run):
    """`script(text, *options)` starts two ranks of a script with `--warm`."""

    def start(text, *options, arguments=()):
        (here / "work.py").write_text(text)
        return start_run("--warm", "-n", "2", *options, "work.py", *arguments)

    return start


def printed(folder):
    return [(folder / contract.stdout_file(rank)).read_text() for rank in (0, 1)]


def test_ranks_of_a_restarted_run_are_forked_again_and_draw_other_numbers(script, here):
    run = script(RESTARTED, "--max-restarts", "2")
    assert 0 == run.ends(within_s=120), run.stderr
    seen = {path.name[len("seen-") :]: json.loads(path.read_text()) for path in here.glob("seen-*")}
    assert ["0-0", "0-1", "1-0", "1-1"] == sorted(seen)
    assert all(one["loaded"] for one in seen.values())
    drawn = [number for one in seen.values() for number in one["drawn"]]
    assert len(drawn) == len(set(drawn))


def test_py_spy_finds_the_line_of_a_forked_rank_that_is_stopped(script, skip_or_fail):
    if find_py_spy() is None:
        skip_or_fail("py-spy is not installed")
    run = script(STUCK, "--hang-timeout", "3", arguments=["1"])
    assert contract.STATUS_HUNG == run.ends(within_s=120), run.stderr
    failure = run.report["failure"]
    assert ("R013", 1) == (failure["code"], failure["rank"]), run.stderr
    assert "--> work.py:4:9" in run.stderr


def test_a_forked_rank_answers_sigusr2_by_the_handler_that_its_script_has_set(script, here, until):
    run = script(STUCK, arguments=["none"])
    [run.wait_for_file(f"up-{rank}") for rank in (0, 1)]
    os.kill(run.records(1)[0]["pid"], signal.SIGUSR2)
    until(lambda: "in stuck" in (here / "own-1").read_text(), within_s=60, what="rank 1 has written its stack")
    assert "" == (here / "own-0").read_text()


@pytest.mark.parametrize(
    ("plan", "code", "rank"),
    [
        ("kill rank=1 at 1s", "R004", 1),
        ("stop rank=1 at 1s", "R013", 1),
        ("kill shim=1 at 1s", "R006", 1),
        ("kill mpirun at 1s", "R008", None),
    ],
)
def test_a_fault_in_forked_ranks_or_the_process_that_forks_them_is_named_and_leaves_nothing(here, plan, code, rank):
    """A fault that is due while the process still imports torch breaks the ranks as soon as there are any."""
    (here / "work.py").write_text(WAIT)
    words = ["chaos", "--plan", plan, "--format", "json", "--warm", "-n", "2", "--hang-timeout", "3", "work.py"]
    done = subprocess.run(
        [sys.executable, "-m", "ttlaunch", *words], cwd=here, capture_output=True, text=True, timeout=200, check=False
    )
    found = json.loads(done.stdout)
    failure = found["report"]["failure"]
    expected = (0, ["named"], code, rank)
    assert expected == (done.returncode, [one["outcome"] for one in found["faults"]], failure["code"], failure["rank"])
    assert [] == run_processes(found["run_id"])
    assert [([], [])] == [(one["processes"], one["folders"]) for one in found["left"]]


def test_a_run_with_forked_ranks_is_repeated_with_forked_ranks(script, here):
    run = script("import os, sys; print('torch' in sys.modules, os.environ['RANK'])")
    assert 0 == run.ends(within_s=60), run.stderr
    first = run.run_folder
    words = ["repro", str(first)]
    done = subprocess.run(
        [sys.executable, "-m", "ttlaunch", *words], cwd=here, capture_output=True, text=True, timeout=120, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    [second] = [path for path in here.glob("runs/[!.]*") if path.is_dir() and path != first]
    assert ["True 0\n", "True 1\n"] == printed(first) == printed(second)


SPELLINGS = (["-n", "2"], ["--warm", "-n", "2"], ["--warm", "--standalone", "--nproc-per-node", "2"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_forked_ranks_have_the_losses_of_others_to_the_bit(here, name):
    losses = []
    for options in SPELLINGS:
        folder = here / f"run-{len(losses)}"
        folder.mkdir()
        shutil.copy(FOLDER / f"{name}.py", folder)
        run = StartedRun(folder, [*options, f"{name}.py"])
        try:
            assert 0 == run.ends(within_s=200), run.stderr
        finally:
            run.close()
        losses.append(losses_in(run.stdout))
        assert ("--warm" in options) == json.loads((run.run_folder / contract.PLAN_FILE).read_text()).get("warm", False)
    assert losses[0].startswith("2 ")
    assert [losses[0]] * 3 == losses


def test_a_rank_whose_variables_differ_in_what_torch_reads_starts_by_itself_and_the_others_do_not(here, start_run):
    lab = here / "configurations/lab"
    lab.mkdir(parents=True)
    shutil.copy(DESCRIPTOR, lab / "mgd.yaml")
    (lab / "hosts.txt").write_text("localhost slots=2\n")
    (lab / "rank_bindings.yaml").write_text(BINDINGS)
    (here / "work.py").write_text("import os, sys; print('torch' in sys.modules, os.environ['OMP_NUM_THREADS'])")
    run = start_run("--warm", "--on", "lab", "work.py")
    assert 0 == run.ends(within_s=60), run.stderr
    assert ["True 1\n", "False 2\n"] == printed(run.run_folder)
    reason = "`--warm`: this rank starts by itself, because its OMP_NUM_THREADS differs from the first rank's"
    assert 1 == (run.stdout + run.stderr).count(reason)


def test_no_rank_is_forked_once_the_process_has_a_second_thread(here, start_run):
    (here / "library/torch/_dynamo").mkdir(parents=True)
    (here / "library/torch/__init__.py").write_text(THREADS)
    for name in ("distributed", "_dynamo"):
        (here / "library/torch" / name).mkdir(exist_ok=True)
        (here / "library/torch" / name / "__init__.py").touch()
    (here / "code").mkdir()
    (here / "code/work.py").write_text("import sys; print('torch' in sys.modules)")
    run = start_run("--warm", "-n", "2", "--env", f"PYTHONPATH={here / 'library'}", "code/work.py")
    assert 0 == run.ends(within_s=60), run.stderr
    assert ["True\n", "False\n"] == printed(run.run_folder)
    reason = (
        "`--warm`: this rank starts by itself, because the process that forks the ranks has further threads by now (1)"
    )
    assert 1 == (run.stdout + run.stderr).count(reason), run.stdout + run.stderr
