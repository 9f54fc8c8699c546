"""What many ranks cost the launcher: 64 ranks over four hosts with two engines, and 4, 64 and 256 ranks on this machine.

    python benchmarks/many_ranks.py [--rounds 3] [--only hosts|here]

Over hosts (namespaces with their own sshd, which needs root), each command is timed from its start to its end; engine agents is to take at
most 0.5 s more than mpirun with the same checks. On this machine, the supervisor's descriptors, threads and memory must not grow with the
ranks, or hardly, and its processor time in proportion to them.
"""

import argparse
import compileall
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ttlaunch
from tests.cluster.hosts import Cluster

_HOSTS, _PER_HOST = 4, 16
_MOST_EXTRA_S = 0.5
_PROGRAM = ["sh", "-c", "true"]
_WORK_S = 6
_PATIENCE_S = 120


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Measure what many ranks cost.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["hosts", "here"])
    options = parser.parse_args()
    compileall.compile_dir(Path(ttlaunch.__file__).parent, quiet=1)  # as an installation does
    print(f"load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        if options.only != "here":
            _over_hosts(Path(folder), options.rounds)
        for ranks in (4, 64, 256) if options.only != "hosts" else ():
            _here(Path(folder), ranks)


def _over_hosts(folder: Path, rounds: int) -> None:
    with Cluster(hosts=_HOSTS) as cluster:
        lab, ranks = folder / "configurations/lab", str(_HOSTS * _PER_HOST)
        lab.mkdir(parents=True)
        (lab / "hosts.txt").write_text(cluster.hostfile(slots=_PER_HOST), encoding="utf-8")
        run = [sys.executable, "-m", "ttlaunch", "run", "--on", "lab", "--ranks", ranks, "--engine"]
        commands = {engine: [*run, engine, "--", *_PROGRAM] for engine in ("openmpi", "agents")}
        for command in commands.values():  # the first run copies the code
            _seconds(cluster, command, folder)
        taken = [{name: _seconds(cluster, one, folder) for name, one in commands.items()} for _ in range(rounds)]
    for name in commands:
        seconds = [one[name] for one in taken]
        extra = statistics.median(one[name] - one["openmpi"] for one in taken)
        limit = f"   {extra:+.2f} s to openmpi, at most +{_MOST_EXTRA_S}" if name != "openmpi" else ""
        print(f"{name:14} {statistics.median(seconds):6.2f} s   {min(seconds):.2f} to {max(seconds):.2f}{limit}")


def _seconds(cluster: Cluster, command: list[str], folder: Path) -> float:
    """Seconds that a command takes; the benchmark ends if it fails."""
    began = time.perf_counter()
    process = cluster.popen(
        "launcher", command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = process.communicate(timeout=_PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} … failed:\n{errors}")
    return time.perf_counter() - began


def _here(folder: Path, ranks: int) -> None:
    """Print the largest values of a run's supervisor, which is asked ten times a second."""
    (folder / "hosts.txt").write_text(f"localhost slots={ranks}\n", encoding="utf-8")
    words = ["run", "--hostfile", "hosts.txt", "-n", str(ranks), "--engine", "agents", "--runs-dir", f"runs-{ranks}"]
    command = [sys.executable, "-m", "ttlaunch", *words, "--", "sleep", str(_WORK_S)]
    view = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    found: list[tuple[float, ...]] = []
    while view.poll() is None:
        for path in folder.glob(f"runs-{ranks}/*/launcher.json"):
            found += _usage(json.loads(path.read_text(encoding="utf-8"))["pid"])
        time.sleep(0.1)
    descriptors, threads, megabytes, seconds = map(max, zip(*found, strict=True))
    values = f"{descriptors} descriptors, {threads} threads, {megabytes} MB, {seconds:.2f} s of processor time"
    print(f"{ranks:4} ranks here: status {view.returncode}; supervisor: {values}")


def _usage(pid: int) -> list[tuple[float, ...]]:
    """The number of open files and threads, the most memory and the processor time of a process; nothing if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        times = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only their number
        threads, kilobytes = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("Threads", "VmHWM"))
    except (OSError, IndexError):
        return []
    return [(descriptors, threads, kilobytes // 1024, sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))]


if __name__ == "__main__":
    main()
