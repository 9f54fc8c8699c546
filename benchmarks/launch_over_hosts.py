"""From a typed command to the first line of a rank, over three hosts: ttlaunch with two engines, beside a bare mpirun.

    python benchmarks/launch_over_hosts.py [--rounds 9] [--hosts 3] [--per-host 1]

Needs root: the hosts are namespaces with their own sshd. All start the same program over SSH, mpirun with the same settings of
Open MPI; ttlaunch checks every host and compares the code on it first. Rounds take turns, after one of each that does not
count. With mpirun, ttlaunch is to take at most 0.9 s more than mpirun alone.
"""

import argparse
import compileall
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ttlaunch
from tests.cluster.hosts import Cluster

_PROGRAM = ["sh", "-c", "echo up"]
_ATTEMPTS = 5
_PATIENCE_S = 15


def main() -> None:
    """Print seconds of both, medians and extremes, and the difference."""
    parser = argparse.ArgumentParser(description="Measure how long a start over hosts takes.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    options = parser.parse_args()
    compileall.compile_dir(Path(ttlaunch.__file__).parent, quiet=1)  # as an installation does
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder, Cluster(hosts=options.hosts) as cluster:
        lab = Path(folder) / "configurations/lab"
        lab.mkdir(parents=True)
        (lab / "hosts.txt").write_text(cluster.hostfile(slots=options.per_host), encoding="utf-8")
        ranks = str(options.hosts * options.per_host)
        run = [sys.executable, "-m", "ttlaunch", "run", "--on", "lab", "--ranks", ranks, "--engine"]
        commands = {f"run, {engine}": [*run, engine, "--", *_PROGRAM] for engine in ("openmpi", "agents")}
        _first_line(cluster, commands["run, openmpi"], folder)
        commands = {"mpirun": _bare(Path(folder)), **commands}
        for command in commands.values():
            _first_line(cluster, command, folder)
        rounds = [
            {name: _first_line(cluster, command, folder) for name, command in commands.items()}
            for _ in range(options.rounds)
        ]
    medians = {name: statistics.median(one[name] for one in rounds) for name in commands}
    for name in commands:
        seconds = [one[name] for one in rounds]
        print(f"{name:14} {medians[name]:6.2f} s   {min(seconds):.2f} to {max(seconds):.2f}")
    print(f"{'difference':14} {medians['run, openmpi'] - medians['mpirun']:6.2f} s   (openmpi to mpirun, at most 0.9)")
    print(f"{'quotient':14} {medians['run, agents'] / medians['run, openmpi']:6.2f}     (agents to openmpi)")
    print(f"{'quotient':14} {medians['run, agents'] / medians['mpirun']:6.2f}     (agents to mpirun, at most 1.5)")


def _bare(folder: Path) -> list[str]:
    """The mpirun of the run that has just been, with its settings, without what makes it ours."""
    command = next(folder.glob("runs/*/command.sh")).read_text(encoding="utf-8").splitlines()
    words = next(line for line in command if "mpirun" in line and " -n " in line).split(" sh -c ")[0].split()
    kept = []
    while words:
        word = words.pop(0)
        if word in {"-x", "--wdir", "--map-by", "--rankfile", "--hostfile"}:
            words.pop(0)
        else:
            kept.append(word)
    hostfile = folder / "configurations/lab/hosts.txt"
    return [
        "env",
        "OMPI_ALLOW_RUN_AS_ROOT=1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        *kept,
        "--hostfile",
        str(hostfile),
        *_PROGRAM,
    ]


def _first_line(cluster: Cluster, command: list[str], folder: str) -> float:
    """Seconds until a rank's first line comes; the program is let run to its end.

    A bare mpirun in a namespace sometimes ends before its daemons have reported, and says nothing; such a round does not
    count and is done again.
    """
    for _ in range(_ATTEMPTS):
        began = time.perf_counter()
        process = cluster.popen("launcher", command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            seconds = _until_up(process, began)
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            seconds = None
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if seconds is not None and process.returncode == 0:
            return seconds
    raise SystemExit(f"{' '.join(command[:4])} … gave no line in {_ATTEMPTS} attempts")


def _until_up(process: subprocess.Popen[str], began: float) -> float | None:
    """Seconds until the line; None if the output ends, or nothing comes for too long."""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(_PATIENCE_S):
            line = process.stdout.readline()
            if line.rstrip().endswith("up"):
                return time.perf_counter() - began
            if not line:
                return None
    return None


if __name__ == "__main__":
    main()
