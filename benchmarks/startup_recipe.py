"""How long `data_parallel` takes from Enter to its first step: a bare mpirun, ttlaunch over gRPC, and ttlaunch with `--warm`.

    PYTHONPATH=. python benchmarks/startup_recipe.py [--ranks 8] [--rounds 3]

mpirun starts the same ranks by itself: the recipe over MPI, from a plan that has been made before, so that it pays for no check. The
three take turns, and so does who begins; a figure is the median until the last rank has finished its first step, with the processor
time of all processes until their end beside it. To be met: `--warm` with 8 ranks on 2 cores 0.50 of mpirun.
"""

import argparse
import compileall
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainings import step_ends, train

import ttlaunch
from ttlaunch import contract

_MOST = 0.50
_SETTINGS = {"training_config.steps": 2, "scheduler_config.warmup_steps": 0}
_OVER_GRPC = {**_SETTINGS, "multihost_config.socket_type": "grpc"}


def main() -> None:
    """Print medians, processor time and the ratio to mpirun."""
    parser = argparse.ArgumentParser(description="Measure the time from Enter to the first step of a recipe.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    compileall.compile_dir(Path(ttlaunch.__file__).parent, quiet=1)  # as an installation does
    found: dict[str, list[tuple[float, float]]] = {"mpirun": [], "ttlaunch": [], "--warm": []}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as name:
        folder = Path(name)
        planned = train("data_parallel", _SETTINGS, folder=folder, words=["-n", str(options.ranks)])
        for at in range(options.rounds):
            for kind in sorted(found, reverse=bool(at % 2)):
                before = _processors_s()
                seconds = _bare_s(planned, options.ranks) if kind == "mpirun" else _run_s(kind, folder, options.ranks)
                found[kind].append((seconds, _processors_s() - before))
    print(f"{options.ranks} ranks, {os.cpu_count()} cores, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    base_s = statistics.median(one[0] for one in found["mpirun"])
    for kind, values in found.items():
        wall_s, cpu_s = (statistics.median(one[place] for one in values) for place in (0, 1))
        goal = f"   at most {_MOST:.2f}" if kind == "--warm" else ""
        print(f"  {kind:9}{wall_s:7.2f} s{cpu_s:8.2f} s of processors   ratio {wall_s / base_s:.2f}{goal}", flush=True)


def _run_s(kind: str, folder: Path, ranks: int) -> float:
    words = ["-n", str(ranks), *(["--warm"] if kind == "--warm" else [])]
    began = time.time()
    run = train("data_parallel", _OVER_GRPC, folder=folder, words=words)
    return max(step_ends(run, rank=rank)[0] for rank in range(ranks)) - began


def _bare_s(planned: Path, ranks: int) -> float:
    """Start the ranks of a plan with mpirun alone, each with the variables that name its rank, and nothing of ttlaunch around them."""
    with tempfile.TemporaryDirectory(prefix="ttl-bench-", dir=planned.parent) as name:
        folder = Path(name)
        shutil.copy(planned / contract.PLAN_FILE, folder)
        (folder / contract.RECORDS_DIR).mkdir()
        fixed = {
            contract.ENV_RUN_ID: contract.BY_HAND,
            contract.ENV_RUN_DIR: name,
            contract.ENV_PLAN: str(folder / contract.PLAN_FILE),
            contract.ENV_WORLD_SIZE: str(ranks),
        }
        rank = f'{contract.ENV_RANK}="$OMPI_COMM_WORLD_RANK" exec "$0" -m ttlaunch.runtime'
        mpirun = [
            str(Path(sys.executable).parent / "mpirun"),
            "--oversubscribe",
            "--allow-run-as-root",
            "-n",
            str(ranks),
        ]
        began = time.time()
        subprocess.run(
            [*mpirun, "sh", "-c", rank, sys.executable],
            env={**os.environ, **fixed, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
        return max(step_ends(folder, rank=rank)[0] for rank in range(ranks)) - began


def _processors_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
