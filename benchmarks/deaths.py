"""Kill one rank after the other in runs of an engine, and measure who is named, what is left, and how soon a death is known.

    PYTHONPATH=. python benchmarks/deaths.py [--engine agents] [--kills 100] [--hosts 0] [--ranks 4]

The ranks are connected in a ring over sockets and send without end, so that the others fail a moment after the first. With `--hosts`
they are on hosts in namespaces (needs root). A death counts as known when the supervisor notices that the run has failed. Status 1
if fewer than 99 % of the kills name the right rank, or if something is left.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from tests.cluster.hosts import Cluster
from ttlaunch.agent.run_processes import processes_of_runs
from ttlaunch.running.runs.run_folder import read_events

RING = """
import os, socket, sys, time
rank, size, ports = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 47200
server = socket.create_server(("", ports + rank))
names = sys.argv[1:] or ["127.0.0.1"] * size
while True:
    try:
        out = socket.create_connection((names[(rank + 1) % size], ports + (rank + 1) % size))
        break
    except OSError:
        time.sleep(0.02)
into = server.accept()[0]
print("up", rank, os.getpid(), flush=True)
while True:
    out.sendall(b".")
    if not into.recv(1):
        raise ConnectionResetError("a peer has closed its connection")
    time.sleep(0.001)
"""
TO_BE_MET = 0.99


def main() -> int:
    """Kill, look, count."""
    parser = argparse.ArgumentParser(description="Kill ranks, and measure who is named and how soon.")
    parser.add_argument("--engine", default="agents")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=0, help="0: this machine")
    options = parser.parse_args()
    drawn = random.Random(17)  # noqa: S311 - it chooses victims
    right, left, known = 0, 0, []
    with (
        tempfile.TemporaryDirectory(prefix="deaths-") as folder,
        Cluster(hosts=options.hosts) if options.hosts else nullcontext() as cluster,
    ):
        (Path(folder) / "ring.py").write_text(RING)
        words = ["run", "--engine", options.engine, "-n", str(options.ranks)]
        if cluster is not None:
            per_host = -(-options.ranks // options.hosts)
            (Path(folder) / "hosts.txt").write_text("".join(f"{host} slots={per_host}\n" for host in cluster.hosts))
            words += ["--hostfile", "hosts.txt"]
            names = [cluster.hosts[rank // per_host] for rank in range(options.ranks)]
        else:
            names = []
        for _ in range(options.kills):
            victim = drawn.randrange(options.ranks)
            one = _kill(
                [*words, "ring.py", "--", *names] if names else [*words, "ring.py"], victim, Path(folder), cluster
            )
            right += one["right"]
            left += one["left"]
            known += [] if one["known_s"] is None else [one["known_s"]]
    times = f"known after {statistics.median(known):.3f} s, at most {max(known):.3f} s" if known else "no time is known"
    print(f"{options.engine}: {right} of {options.kills} kills named rightly, {left} processes left; {times}")
    return int(right < TO_BE_MET * options.kills or left > 0)


def _kill(words: list[str], victim: int, folder: Path, cluster: Cluster | None) -> dict[str, float | bool | None]:
    command = [sys.executable, "-m", "ttlaunch", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "cwd": folder}
    started = cluster.popen("launcher", command, **pipes) if cluster else subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    up = 0
    ranks = int(words[words.index("-n") + 1])
    while up < ranks:
        line = started.stdout.readline()
        if not line:
            raise RuntimeError("the run ended before its ranks were up")
        up += "| up " in line
    [run] = [
        path for path in folder.glob("runs/*") if not path.name.startswith(".") and not (path / "report.json").exists()
    ]
    pid = _process_of(victim, run.name, folder=run)
    died = time.time()
    os.kill(pid, signal.SIGKILL)
    started.communicate(timeout=60)
    failure = json.loads((run / "report.json").read_text())["failure"] or {}
    noticed = [event["time"] for event in read_events(run) if event["event"] == "failed"]
    return {
        "right": failure.get("rank") == victim,
        "left": sum(found == run.name for _, found in processes_of_runs()),
        "known_s": noticed[0] - died if noticed else None,
    }


def _process_of(rank: int, run_id: str, *, folder: Path) -> int:
    """Return the process id of a rank as this machine sees it, whatever namespace the rank is in."""
    for pid, found in processes_of_runs():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if found == run_id and b"ring.py" in words and f"TTLAUNCH_RANK={rank}".encode() in environment:
            return pid
    raise RuntimeError(f"no process of rank {rank} of {folder}")


if __name__ == "__main__":
    sys.exit(main())
