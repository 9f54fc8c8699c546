"""Copying code to hosts: `ttlaunch sync` beside `rsync -az` and `rsync -azc`, whole commands, all hosts in parallel.

    python benchmarks/sync.py [--rounds 5] [--hosts 4] [--files 2000] [--megabytes 50] [--delay-ms 10]

Needs root and rsync: the hosts are namespaces with their own sshd, their disks in memory. A project of text (the sources
of Python's standard library, shuffled) with one file in twenty of random bytes, a fifth of the whole, is copied three
times: to hosts that have nothing, again without a change, and after a change of one file. Then once more with a delay
of so many milliseconds each way. Rounds take turns; the medians are printed with what they are to stay at or below.
`rsync -az` compares sizes and times only, `rsync -azc` contents, as ttlaunch does.

ttlaunch is compiled before, as an installed package is.

After an answer that brought something new, hosts of ttlaunch copy the release for the next sync. Nothing else is measured
until they have; how long that takes is printed below the table.
"""

import argparse
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cluster.hosts import Cluster

_CASES = ("cold", "nothing changed", "one file changed")
_LIMITS = {"-azc": 1.0, "-az": 1.3}
"""By the options of rsync, the largest ratio of ttlaunch's time to rsync's."""
_RANDOM_EVERY = 20
_RANDOM_SHARE = 0.2


def main() -> None:
    """Print a row for each case, with and without delay."""
    parser = argparse.ArgumentParser(description="Measure how long copying to hosts takes.")
    for name, default in (("rounds", 5), ("hosts", 4), ("files", 2000), ("megabytes", 50), ("delay-ms", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    size_mb = 12 * options.megabytes + 64
    copying: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder,
        Cluster(hosts=options.hosts, size_mb=size_mb) as cluster,
    ):
        project = Path(folder) / "project"
        write_project(project, files=options.files, size=options.megabytes * 1_000_000)
        (Path(folder) / "lab").mkdir()
        (Path(folder) / "lab/hosts.txt").write_text(cluster.hostfile(), encoding="utf-8")
        _ttlaunch(cluster, project, "--dry-run")
        limits = "".join(f"{f'rsync {options}':>12} {'ratio':>6} {'limit':>6}" for options in _LIMITS)
        print(f"{'round trip':>10}  {'case':17} {'ttlaunch':>9}{limits}")
        for delay_ms in (0, options.delay_ms):
            for host in cluster.hosts:
                cluster.delay(host, delay_ms)
            seconds: dict[str, list[list[float]]] = {case: [] for case in _CASES}
            for _ in range(options.rounds):
                for case, times in _round(cluster, project, copying):
                    seconds[case].append(times)
            for case, rounds in seconds.items():
                _print_row(2 * delay_ms, case, rounds)
    print(f"hosts had copied a new release for the next sync {statistics.median(copying):.2f} s after the answer")


def write_project(folder: Path, *, files: int, size: int) -> None:
    """Make a git repository with so many files of so many bytes together; the same each time."""
    chance = random.Random(1)  # noqa: S311 - no secret depends on it
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)
    random_files = files // _RANDOM_EVERY
    for number in range(files):
        if number < random_files:
            content = chance.randbytes(int(size * _RANDOM_SHARE) // random_files)
        else:
            length = int(size * (1 - _RANDOM_SHARE)) // (files - random_files)
            start = chance.randrange(len(text) - length)
            content = b"# %d\n" % number + text[start : start + length]
        path = folder / f"part{number % 40:02}" / f"file{number:04}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "add", "."], check=True)


def _round(cluster: Cluster, project: Path, copying: list[float]) -> Iterator[tuple[str, list[float]]]:
    """Seconds of ttlaunch, and of rsync with each of its options, for each case; adds to `copying` how long copies took."""
    for case in _CASES:
        if case == "cold":
            for host in cluster.hosts:
                cluster.run(host, ["sh", "-c", "rm -rf ~/copy* ~/.ttlaunch"])
            home = cluster.path("launcher", cluster.environment("launcher")["HOME"])
            shutil.rmtree(home / ".cache/ttlaunch", ignore_errors=True)
        elif case == "one file changed":
            changed = max(project.glob("part*/*.py"))
            changed.write_bytes(changed.read_bytes() + b"# changed\n")
        ours = _ttlaunch(cluster, project)
        began = time.perf_counter()
        while any("python" in words for host in cluster.hosts for words in cluster.pids(host).values()):
            time.sleep(0.01)
        if case != "nothing changed":
            copying.append(time.perf_counter() - began)
        yield case, [ours, *(_rsync(cluster, project, options) for options in _LIMITS)]


def _rsync(cluster: Cluster, project: Path, options: str) -> float:
    """Seconds of rsync; with each of the options it has copies of its own."""
    command = f"rsync {options} --delete --exclude .git ./"
    copies = [f"{command} {shlex.quote(host)}:copy{options}/ &" for host in cluster.hosts]
    return _seconds(cluster, ["sh", "-c", f"{' '.join(copies)} wait"], project)


def _ttlaunch(cluster: Cluster, project: Path, *options: str) -> float:
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{project.parent}/compiled"}
    command = [sys.executable, "-m", "ttlaunch", "sync", "--on", "../lab", *options]
    return _seconds(cluster, command, project, environment=compiled)


def _seconds(
    cluster: Cluster, command: list[str], folder: Path, *, environment: Mapping[str, str] | None = None
) -> float:
    variables = cluster.environment("launcher") | (environment or {})
    began = time.perf_counter()
    answer = cluster.run("launcher", command, cwd=folder, env=variables)
    seconds = time.perf_counter() - began
    if answer.returncode:
        sys.exit(f"{shlex.join(command)} ended with status {answer.returncode}:\n{answer.stderr}")
    return seconds


def _print_row(round_trip_ms: int, case: str, rounds: list[list[float]]) -> None:
    ours, *others = (statistics.median(times) for times in zip(*rounds, strict=True))
    name = f"{round_trip_ms} ms" if round_trip_ms else "none"
    row, missed = f"{name:>10}  {case:17} {ours:8.2f}s", ""
    for limit, rsync in zip(_LIMITS.values(), others, strict=True):
        row += f"{rsync:11.2f}s {ours / rsync:6.2f} {limit:6.1f}"
        missed = "   MISSED" if ours > limit * rsync else missed
    print(row + missed, flush=True)


if __name__ == "__main__":
    main()
