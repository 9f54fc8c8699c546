"""Count the descriptors that a program has open after each of many runs that it starts; exits with 1 if they grow.

    python benchmarks/descriptor_leaks.py [--runs 200]

Each run has one rank on this machine and lasts about a second. A supervisor is a process of its own and ends with its run, so
only the program that calls `ttlaunch.run` could gather descriptors.
"""

import argparse
import os
import tempfile
from pathlib import Path

import ttlaunch

_SETTLED = 5  # runs after which everything that is opened once is open


def main() -> int:
    """Start the runs one after another and compare the last counts with the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("work.py").write_text("print(1)\n", encoding="utf-8")
        for _ in range(runs):
            ttlaunch.run(["python", "work.py"], ranks=1)
            counts.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - names are enough
        os.chdir("/")
    settled = max(counts[:_SETTLED])
    print(f"{runs} runs: {counts[0]} descriptors after the first, {counts[-1]} after the last, {max(counts)} at most")
    return int(max(counts) > settled)


if __name__ == "__main__":
    raise SystemExit(main())
