"""From a typed command to the first line of a rank, over three hosts: ttlaunch beside a bare mpirun.

    python benchmarks/launch_over_hosts.py [--rounds 9] [--hosts 3]

Needs root: the hosts are namespaces with their own sshd. Both start the same program, one rank a host, with the same
settings of Open MPI, over SSH; ttlaunch checks every host and compares the code on it first. Rounds take turns, after one
of each that does not count; the difference of the medians is to stay at or below 0.9 s.
"""

import argparse
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.hosts import Cluster

_PROGRAM = ["sh", "-c", "echo up"]
_ATTEMPTS = 5
_PATIENCE_S = 15


def main() -> None:
    """Print seconds of both, medians and extremes, and the difference."""
    parser = argparse.ArgumentParser(description="Measure how long a start over hosts takes.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hosts", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder, Cluster(hosts=options.hosts) as cluster:
        lab = Path(folder) / "configurations/lab"
        lab.mkdir(parents=True)
        (lab / "hosts.txt").write_text(cluster.hostfile(), encoding="utf-8")
        ours = [sys.executable, "-m", "ttlaunch", "run", "--on", "lab", "--ranks", str(options.hosts), "--", *_PROGRAM]
        _first_line(cluster, ours, folder)
        bare = _bare(Path(folder))
        _first_line(cluster, bare, folder)
        pairs = [
            (_first_line(cluster, bare, folder), _first_line(cluster, ours, folder)) for _ in range(options.rounds)
        ]
    for name, seconds in (("mpirun", [pair[0] for pair in pairs]), ("ttlaunch run", [pair[1] for pair in pairs])):
        print(f"{name:14} {statistics.median(seconds):6.2f} s   {min(seconds):.2f} to {max(seconds):.2f}")
    medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
    print(f"{'difference':14} {medians[1] - medians[0]:6.2f} s   (at most 0.9)")


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
