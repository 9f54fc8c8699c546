"""One SHA-256 over all layouts and numbers of workers: the table of `ttlaunch parity` for 200 steps, with real ranks.

    python benchmarks/bits.py [--model llama] [--steps 200] [--simulate] [--fresh]

One process, two tiers, three tiers and data parallelism with 1, 2, 3 and 4 workers, pipelines of 2, 3 and 4 stages, ZeRO,
parameter servers and `classic_dp` without a lead; dropout and clipping on, fp32, 12 micro-batches a step in 3 accumulations.
To be met: one class. Interrupted, the same command goes on: results are kept in `.benchmarks/bits.jsonl`, and count as long as
nothing that computes was changed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

KEPT = Path(__file__).parents[1] / ".benchmarks" / "bits.jsonl"


def main() -> int:
    """Run the command, and say how long it took."""
    parser = argparse.ArgumentParser(description="One SHA-256 over all layouts and numbers of workers.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt", help="what is trained")
    parser.add_argument("--simulate", action="store_true", help="all ranks of a cell in one process")
    parser.add_argument("--fresh", action="store_true", help="forget the results that were kept")
    options = parser.parse_args()
    if options.fresh:
        KEPT.unlink(missing_ok=True)
    KEPT.parent.mkdir(exist_ok=True)
    began = time.monotonic()
    words = ["--steps", str(options.steps), "--accumulation", "3", "--precision", "fp32", "--out", str(KEPT)]
    words += ["--model", options.model]
    simulate = ["--simulate"] if options.simulate else []
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    status = subprocess.run([sys.executable, "-m", "ttlaunch", "parity", *words, *simulate], check=False).returncode
    print(f"took {time.monotonic() - began:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
