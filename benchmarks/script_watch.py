"""What it costs to watch the ranks of a script: `python benchmarks/script_watch.py [--ranks N] [--seconds S]`.

`ttlaunch run -n N` starts a script whose ranks import torch, have two child processes each, as a data loader has, and print ten lines with
numbers a second. The kernel counts the processor time of each thread of their shims; the first thread that a shim starts watches the rank, the
others copy what the rank prints. To be met: all watching threads together take at most 0.5 % of a core for 8 ranks.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 0.005
MOST_S = 300.0
SCRIPT = """
import os, time
import torch
torch.zeros(4) @ torch.zeros(4)
for _ in range(2):
    if os.fork() == 0:
        time.sleep(3600)
for step in range(1, 36_000):
    print(f"epoch=1 step={step} loss={1 / step:.4f} lr=1e-4 of rank {os.environ['RANK']}", flush=True)
    time.sleep(0.1)
"""


def main() -> int:
    """Print the share of a core that the shims take; status 1 if the limit is missed."""
    parser = argparse.ArgumentParser(description="Measure the watch over the ranks of a script.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "ttlaunch", "run", "-n", str(given.ranks), "train.py"]
        run = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            shims = _shims(Path(folder), given.ranks, run)
            before = _seconds(shims)
            began = time.monotonic()
            time.sleep(given.seconds)
            took = time.monotonic() - began
            after = _seconds(shims)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(MOST_S)
    watch, copying = ((now - then) / took for now, then in zip(after, before, strict=True))
    verdict = "met" if watch <= LIMIT else "MISSED"
    print(f"load {os.getloadavg()[0]:.1f}; {given.ranks} ranks, {took:.0f} s")
    print(f"copying of the output {copying:8.3%} of a core")
    print(f"watch                 {watch:8.3%} of a core   (at most {LIMIT:.1%}: {verdict})")
    return 0 if watch <= LIMIT else 1


def _shims(folder: Path, number: int, run: subprocess.Popen[bytes]) -> list[int]:
    """Wait until every rank has printed ten lines, and return the processes of the shims."""
    from ttlaunch.records.ranks import Printed, Started, read_progress

    deadline = time.monotonic() + MOST_S
    while time.monotonic() < deadline and run.poll() is None:
        files = [
            list(map(read_progress, file.read_bytes().splitlines()))
            for file in folder.glob("runs/*/records/*.progress.jsonl")
        ]
        if len(files) == number and all(sum(isinstance(one, Printed) for one in records) > 10 for records in files):
            return [one.shim_pid for records in files for one in records if isinstance(one, Started) and one.shim_pid]
        time.sleep(0.5)
    raise SystemExit("the ranks have not begun")


def _seconds(shims: list[int]) -> tuple[float, float]:
    """Return the processor time of the threads that watch, and of all others that the shims have started."""
    watch = others = 0
    for pid in shims:
        threads = {int(path.name): path for path in Path(f"/proc/{pid}/task").iterdir()}
        _, first, *copying = sorted(threads)
        taken = {thread: int((threads[thread] / "schedstat").read_text().split()[0]) for thread in [first, *copying]}
        watch += taken.pop(first)
        others += sum(taken.values())
    return watch / 1e9, others / 1e9


if __name__ == "__main__":
    sys.exit(main())
