"""Kill a sync at many moments: afterwards every host has the old tree or the new one, never a mixture.

    python benchmarks/sync_kill.py [--points 50] [--files 300] [--megabytes 4] [--results FILE]

Needs root: the hosts are namespaces with their own sshd. Each of three victims, the syncing process, what runs of it on
the hosts, and the connections, is killed at so many points, evenly spread over the time from the moment that something
runs on a host until a little after it usually ends; each time there is a new tree to be sent. Then the current project
on each host is compared, file by file, with the tree that the host had before and with the new one, and every release
that lies there with its own manifest. What is left behind is there for the next sync to remove; the last one must leave
nothing. With `--results` what has been measured is kept in a file, and a second start goes on where the first ended.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.cluster.hosts import Cluster
from ttlaunch.agent.releases import check_tree, read_manifest

Tree = dict[bytes, bytes]
_DELAY_MS = 3
_MEASURE_EVERY = 10  # how long a sync takes changes with what else the machine does
_GOLDEN = 0.6180339887
_WITHIN_S = 60.0


def main() -> None:
    """Print how often each victim's end left the old and the new tree; exit with status 1 if one was a mixture."""
    parser = argparse.ArgumentParser(description="Kill syncs at many moments.")
    for name, default in (("points", 50), ("files", 300), ("megabytes", 4), ("hosts", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--results", type=Path, default=None)
    options = parser.parse_args()
    done = _read(options.results)
    with tempfile.TemporaryDirectory(prefix="ttl-kill-") as folder, Cluster(hosts=options.hosts) as cluster:
        bench = _Bench(cluster, Path(folder), files=options.files, size=options.megabytes * 1_000_000)
        bench.sync()
        for victim, kill in (("process", bench.kill_process), ("host", bench.kill_host), ("connection", bench.cut)):
            for point in range(options.points):
                if point % _MEASURE_EVERY == 0:
                    duration = bench.measure()
                if (victim, point) not in {(row["victim"], row["point"]) for row in done}:
                    found = bench.attempt(kill, after_s=duration * _spread(point))
                    done.append({"victim": victim, "point": point, "found": found})
                    _append(options.results, done[-1])
        left = bench.finish()
    mixed = _print_table(done)
    print(f"left behind after the last sync: {left or 'nothing'}")
    sys.exit(1 if mixed or left else 0)


def _spread(point: int) -> float:
    """Numbers between 0 and 1 that lie evenly spread however many of them are taken."""
    return (0.5 + point * _GOLDEN) % 1.0


class _Bench:
    """One project and some hosts, and the trees that they have."""

    def __init__(self, cluster: Cluster, folder: Path, *, files: int, size: int) -> None:
        self._cluster, self._folder, self._project = cluster, folder, folder / "project"
        self._chance = random.Random(1)  # noqa: S311 - no secret depends on it
        self._files, self._size = files, size // files
        (folder / "lab").mkdir()
        (folder / "lab/hosts.txt").write_text(cluster.hostfile(), encoding="utf-8")
        for host in cluster.hosts:
            cluster.delay(host, _DELAY_MS)
        self._change(self._files)

    def measure(self) -> float:
        """How long something runs on the hosts in a sync that nobody kills, their copies included, and a fifth more."""
        self._change(self._files // 2)
        process = self._start()
        self._wait_for_script(process)
        began = time.monotonic()
        process.communicate(timeout=_WITHIN_S)
        self._wait_until_quiet()
        return 1.2 * (time.monotonic() - began)

    def attempt(self, kill: Callable[[subprocess.Popen[str]], None], *, after_s: float) -> dict[str, str]:
        """Kill one sync; what each host has then: `old`, `new` or what is mixed up."""
        before = {host: self._current(host) for host in self._cluster.hosts}
        self._change(self._files // 2)
        process = self._start()
        self._wait_for_script(process)
        time.sleep(after_s)  # the point is the measurement
        kill(process)
        process.communicate(timeout=_WITHIN_S)
        return {host: self._judge(host, before[host]) for host in self._cluster.hosts}

    def kill_process(self, process: "subprocess.Popen[str]") -> None:
        """SIGKILL to the syncing process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def kill_host(self, _: "subprocess.Popen[str]") -> None:
        """SIGKILL to our script on every host."""
        self._kill_on_hosts("python")

    def cut(self, _: "subprocess.Popen[str]") -> None:
        """SIGKILL to what holds the connections on every host."""
        self._kill_on_hosts("sshd: root")

    def finish(self) -> list[str]:
        """Sync once more, undisturbed; what lies beside releases and locks afterwards."""
        self.sync()
        end = time.monotonic() + _WITHIN_S
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def _wait_until_quiet(self) -> None:
        """Wait until the hosts have made their copies for the next sync."""
        end = time.monotonic() + _WITHIN_S
        while any("python" in words for host in self._cluster.hosts for words in self._cluster.pids(host).values()):
            if time.monotonic() > end:
                sys.exit("the hosts are still at work after a sync")
            time.sleep(0.01)

    def _wait_for_script(self, process: "subprocess.Popen[str]") -> None:
        host = self._cluster.hosts[0]
        while process.poll() is None and not any("python" in words for words in self._cluster.pids(host).values()):
            pass

    def _left(self) -> list[str]:
        folders = [self._folder_on(host) / name for host in self._cluster.hosts for name in ("releases", "spare")]
        names = [path.name for folder in folders for path in folder.iterdir()]
        return [name for name in names if len(name.removesuffix(".lock")) != 64]

    def _kill_on_hosts(self, words: str) -> None:
        for host in self._cluster.hosts:
            for pid, command in self._cluster.pids(host).items():
                if words in command:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _change(self, files: int) -> None:
        """Write that many files anew."""
        for number in self._chance.sample(range(self._files), files):
            path = self._project / f"part{number % 10}" / f"file{number}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._chance.randbytes(self._size))

    def _start(self) -> "subprocess.Popen[str]":
        self._wait_until_quiet()
        command = [sys.executable, "-m", "ttlaunch", "sync", "--on", "../lab"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self._cluster.popen("launcher", command, cwd=self._project, start_new_session=True, **streams)

    def sync(self) -> None:
        """Sync, and nobody kills it."""
        process = self._start()
        _, said = process.communicate(timeout=_WITHIN_S)
        if process.returncode:
            sys.exit(f"a sync that nobody killed ended with status {process.returncode}:\n{said}")

    def _folder_on(self, host: str) -> Path:
        """Where ttlaunch keeps code on a host, as this machine sees it."""
        return self._cluster.path(host, self._cluster.environment(host)["HOME"]) / ".ttlaunch"

    def _current(self, host: str) -> Tree:
        """The current project; the link is read once, as by a run: it may change while we read the files."""
        folder = self._folder_on(host)
        return _read_tree(folder / (folder / "current").readlink() / "project")

    def _judge(self, host: str, before: Tree) -> str:
        releases = self._folder_on(host) / "releases"
        for release in releases.iterdir():
            if len(release.name) == 64:
                entries = read_manifest(bytes(release))
                whole = entries is not None and not check_tree(bytes(release), entries, alive=lambda: None)[0]
                if not whole and release.is_dir():  # else it was old, and was taken away while we looked
                    return f"mixed: release {release.name}"
        now = self._current(host)
        if now == _read_tree(self._project):
            return "new"
        return "old" if now == before else "mixed: current"


def _read_tree(folder: Path) -> Tree:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {bytes(path.relative_to(folder)): path.read_bytes() for path in files}


def _read(results: Path | None) -> list[dict[str, object]]:
    if results is None or not results.is_file():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def _append(results: Path | None, row: dict[str, object]) -> None:
    if results is not None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _print_table(done: list[dict[str, object]]) -> int:
    """A row for each victim; how many mixtures there were."""
    print(f"{'killed':12} {'points':>6} {'old':>6} {'new':>6} {'mixed':>6}")
    total = 0
    for victim in dict.fromkeys(row["victim"] for row in done):
        rows = [row for row in done if row["victim"] == victim]
        counts: Counter[str] = Counter()
        for row in rows:
            counts.update(str(found).partition(":")[0] for found in dict(row["found"]).values())  # type: ignore[call-overload]
        total += counts["mixed"]
        print(f"{victim:12} {len(rows):6} {counts['old']:6} {counts['new']:6} {counts['mixed']:6}")
    return total


if __name__ == "__main__":
    main()
