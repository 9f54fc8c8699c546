"""What the canonical order of sums costs: steps of `data_parallel` with `reduction: canonical` and `fast` in turns.

    PYTHONPATH=. python benchmarks/reduction.py [--rounds 5] [--workers 2]

Runs of 40 steps of the recipe's own model and batch (2 blocks, 64 wide, 16 sequences of 64 tokens), one torch thread a
rank, on this machine; the two take turns. A round's figure is the median time between two steps of the first worker,
the first ten left out. To be met: canonical costs at most 10 % more than fast, which is torch's DistributedDataParallel over
gloo.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from trainings import median_step_s, train

_SETTINGS = {
    "training_config.steps": 40,
    "training_config.validation_interval": 1000,
    "checkpoint_config.interval": "null",
}


def main() -> None:
    """Print medians of both and their ratio."""
    parser = argparse.ArgumentParser(description="Measure the canonical reduction against torch's own.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"canonical": [], "fast": []}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        for _ in range(options.rounds):
            for kind, found in seconds.items():
                found.append(_step_seconds(kind, options.workers, Path(folder)))
    for kind, found in seconds.items():
        print(f"{kind:10} {statistics.median(found) * 1e3:8.2f} ms   {min(found) * 1e3:.2f} to {max(found) * 1e3:.2f}")
    ratios = [one / other for one, other in zip(seconds["canonical"], seconds["fast"], strict=True)]
    ratio = statistics.median(ratios)
    verdict = "met" if ratio <= 1.10 else "NOT MET"
    print(f"canonical ÷ fast, median of the rounds: {ratio:.2f}   (at most 1.10: {verdict})")


def _step_seconds(kind: str, workers: int, folder: Path) -> float:
    """The median step of one run."""
    settings = _SETTINGS | {"multihost_config.num_workers": workers, "data_parallel_config.reduction": kind}
    return median_step_s(train("data_parallel", settings, folder=folder), skipped=10)


if __name__ == "__main__":
    main()
