"""What supervision costs: shim, guard, launcher and flight recorder on a training step, and on a launch on this machine.

    python benchmarks/supervision_overhead.py [--pairs 9] [--launches 15] [--steps 200]

Steps: `data_parallel` with 2 workers and a small model, under `ttlaunch run` and with the same role functions under a bare
mpirun with the same settings, without shim, flight recorder and records; pairs take turns, which of both is first too. Compared are
medians of a run's steps; the median over pairs has an interval from drawing pairs anew. Where others use the machine,
seconds are noisy, so the processor's time is told as well: what all processes of supervision took between the first and the
last step, of the time of as many cores as there are ranks. To be met: 1 %.

Launches: `ttlaunch run -n 4 -- true` less a bare `mpirun -n 4 true`, and of that the shims, from the run's own `command.sh`.
Fastest and median of rounds that take turns. To be met: 0.25 s.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from trainings import median_step_s, step_ends

from ttlaunch import contract

BARE_RANK = Path(__file__).parent / "supervised/bare_rank.py"
STEP_LIMIT, LAUNCH_LIMIT_S = 0.01, 0.25
RANKS = 2
_SKIPPED = 20  # steps in which buckets are tuned and caches fill
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_RANKS = "ttlaunch.runtime"


class Steps(NamedTuple):
    """A run's steps.

    Attributes:
        median_s: Of the median one.
        share: What supervision took of the processor, of the time of a core for each rank.
        ranks_share: What the ranks took of that; less than all of it where others use the machine.
    """

    median_s: float
    share: float = 0.0
    ranks_share: float = 0.0


def main() -> int:
    """Print both tables; status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description="Measure what supervision costs.")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--launches", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="ttl-overhead-") as folder:
        # As in an installed package, code is compiled once.
        os.environ.clear()
        os.environ.update({**environment, **_ROOT, "PYTHONPYCACHEPREFIX": f"{folder}/compiled", "OMP_NUM_THREADS": "1"})
        is_met = [
            not options.launches or _launches(Path(folder, "launches"), options.launches),
            not options.pairs or _steps(Path(folder, "steps"), options.pairs, options.steps),
        ]
    return 0 if all(is_met) else 1


def _steps(folder: Path, pairs: int, steps: int) -> bool:
    """Take turns with whole trainings."""
    folder.mkdir()
    ratios, seconds = [], []
    runs = [_supervised(folder, steps)]  # also gives the plan that the bare ranks follow
    run = next((folder / "runs").glob("[!.]*-*"))
    for number in range(pairs):
        own = folder / str(number)
        if number % 2:
            supervised, bare = _supervised(folder, steps), _bare(run, own)
        else:
            bare, supervised = _bare(run, own), _supervised(folder, steps)
        ratios.append(supervised.median_s / bare.median_s - 1)
        runs.append(supervised)
        seconds.append(bare.median_s)
    low, high = _interval(ratios)
    share, ranks = (statistics.median(getattr(one, name) for one in runs) for name in ("share", "ranks_share"))
    print(f"a step of {statistics.median(seconds) * 1000:.1f} ms, {pairs} pairs of {steps} steps")
    print(f"  longer under supervision  {statistics.median(ratios):+7.2%}   95 % interval {low:+.2%} to {high:+.2%}")
    used = f"of the processor {share:.2%}, while ranks took {ranks:.0%} of their cores"
    print(f"  {used}   (at most {STEP_LIMIT:.0%}): {_verdict(share <= STEP_LIMIT)}")
    return share <= STEP_LIMIT


def _supervised(folder: Path, steps: int) -> Steps:
    """A training under ttlaunch."""
    words = ["run", "data_parallel", "--ranks", str(RANKS), "--set", f"training_config.steps={steps}"]
    words += ["--set", "checkpoint_config.interval=null", "--set", f"training_config.validation_interval={steps}"]
    before = set((folder / "runs").glob("[!.]*-*"))
    process = subprocess.Popen(
        [sys.executable, "-m", "ttlaunch", *words], cwd=folder, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    _wait(lambda: set((folder / "runs").glob("[!.]*-*")) - before, process)
    [run] = set((folder / "runs").glob("[!.]*-*")) - before
    _wait(lambda: len(step_ends(run)) > _SKIPPED, process)
    began, since = _processor_s(run.name, process.pid), time.monotonic()
    _wait(lambda: len(step_ends(run)) > steps - _SKIPPED, process)
    ended, cores_s = _processor_s(run.name, process.pid), RANKS * (time.monotonic() - since)
    if process.wait():
        raise SystemExit(f"the training failed: {run}")
    beside, ranks = (sum(ended[key][pid] - began[key].get(pid, 0) for pid in ended[key]) for key in ("beside", "ranks"))
    return Steps(median_step_s(run, skipped=_SKIPPED), beside / cores_s, ranks / cores_s)


def _bare(run: Path, out: Path) -> Steps:
    """The same role functions under mpirun alone, with its settings."""
    out.mkdir()
    words = _until_program(run)
    subprocess.run(
        [*words, sys.executable, str(BARE_RANK), str(run), str(out)], cwd=run, check=True, capture_output=True
    )
    times = json.loads((out / "times-0.json").read_text())[_SKIPPED:]
    return Steps(statistics.median(after - before for before, after in itertools.pairwise(times)))


def _until_program(run: Path) -> list[str]:
    """The words of a run's mpirun that come before what it starts."""
    argv: list[str] = json.loads((run / contract.PLAN_FILE).read_text())["engine"]["argv"]
    return argv[: argv.index("-I") - 1]


def _processor_s(run_id: str, view: int) -> dict[str, dict[int, float]]:
    """The processor's time so far of ranks, and of what stands beside them: the view, its children, and all of the run."""
    found: dict[str, dict[int, float]] = {"ranks": {}, "beside": {}}
    launcher = {view, *(child.pid for child in psutil.Process(view).children(recursive=True))}
    for process in psutil.process_iter():
        try:
            words, times = process.cmdline(), process.cpu_times()
            is_of_run = process.pid in launcher or process.environ().get(contract.ENV_RUN_ID) == run_id
            is_supervisor = "ttlaunch" in words and run_id in " ".join(words)
        except psutil.Error:
            continue
        if is_of_run or is_supervisor or process.pid == _supervisor(run_id, view):
            found["ranks" if _RANKS in words else "beside"][process.pid] = times.user + times.system
    return found


def _supervisor(run_id: str, view: int) -> int | None:
    """The process that watches the run, which is not a child of its view."""
    try:
        path = Path(psutil.Process(view).cwd(), "runs", run_id, contract.LAUNCHER_FILE)
        pid: int = json.loads(path.read_text())["pid"]
    except (OSError, ValueError, psutil.Error):
        return None
    return pid


def _launches(folder: Path, rounds: int) -> bool:
    """Take turns with launches of a program that does nothing."""
    folder.mkdir()
    ours = [sys.executable, "-m", "ttlaunch", "run", "-n", "4", "--", "true"]
    _seconds(ours, folder)
    run = next((folder / "runs").glob("[!.]*-*"))
    words = _until_program(run)
    ways = {
        "mpirun": ([*words, "true"], run),
        "with shims": (["sh", str(run / "command.sh")], folder),
        "ttlaunch": (ours, folder),
        "import": ([sys.executable, "-c", "import ttlaunch.cli.main"], folder),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (command, where) in ways.items():
            found[name].append(_seconds(command, where))
    print(f"a launch of 4 ranks that do nothing, {rounds} rounds      median   fastest")
    for text, name, less in (
        ("bare mpirun", "mpirun", None),
        ("shims", "with shims", "mpirun"),
        ("launcher, guard and view", "ttlaunch", "with shims"),
        ("  of it: Python and the command line's imports", "import", None),
        ("all that ttlaunch adds", "ttlaunch", "mpirun"),
    ):
        values = [how(found[name]) - (how(found[less]) if less else 0.0) for how in (statistics.median, min)]
        print(f"  {text:50}{values[0]:7.3f} s{values[1]:8.3f} s")
    shims, added = (min(found[name]) - min(found["mpirun"]) for name in ("with shims", "ttlaunch"))
    print(f"  fastest, shims at most {LAUNCH_LIMIT_S} s: {_verdict(shims <= LAUNCH_LIMIT_S)}")
    print(f"  fastest, all that ttlaunch adds at most {LAUNCH_LIMIT_S} s: {_verdict(added <= LAUNCH_LIMIT_S)}")
    return added <= LAUNCH_LIMIT_S


def _seconds(command: Sequence[str], folder: Path) -> float:
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - began


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies in 95 of 100 drawings."""
    chance = random.Random(0)  # noqa: S311 - nothing secret
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def _verdict(is_met: bool) -> str:  # noqa: FBT001 - what it says
    return "met" if is_met else "MISSED"


def _wait(condition: Callable[[], object], process: "subprocess.Popen[bytes]") -> None:
    while not condition():
        if process.poll() is not None:
            raise SystemExit("the training ended before it was measured")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
