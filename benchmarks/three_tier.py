"""What messages cost a step: three tiers against none and against naive ones, data parallelism against torch's own.

    PYTHONPATH=. python benchmarks/three_tier.py [--rounds 3] [--set KEY=VALUE]

The model is a transformer of 4 blocks, 256 wide, on 64 bytes of text (3.3 million parameters, S = 13.2 MB); a step sees 32
sequences in 8 micro-batches of 4, shared by 2 workers; AdamW, and the norm is clipped. Every rank has one thread. On 2
cores, the aggregator and the optimizer get no core of their own: what they compute, the workers lose.

`without messages` is the same workers doing the same but for the messages, with the other ranks asleep; `naive` sends a
blocking MPI message for each parameter, workers in rank order (`benchmarks/three_tier_baselines`). It is measured as
Open MPI runs it on a host whose slots suffice, where a rank that waits in a blocking call keeps a core busy, and once more
with what ttlaunch tells mpirun, that waiting ranks yield: the first is what one writes and starts first, the second shows
how much of that is the protocol alone. Variants take turns; a figure is the median time between two steps of the first
worker, the first 20 left out, in which buckets are tuned.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from trainings import median_step_s, train

_SETTINGS = {
    "training_config.steps": 34,
    "training_config.batch_size": 32,
    "training_config.micro_batch_size": 4,
    "training_config.validation_interval": 1000,
    "training_config.validation_sequences": 2,
    "transformer_config.num_blocks": 4,
    "transformer_config.num_heads": 4,
    "transformer_config.embedding_dim": 256,
    "transformer_config.max_sequence_length": 64,
    "multihost_config.num_workers": 2,
    "checkpoint_config.interval": "null",
}
_SKIPPED = 20
_BASELINES = str(Path(__file__).parent / "three_tier_baselines")
_VARIANTS = {
    "without messages": (_BASELINES, 4, {"baseline_config.exchange": "none"}),
    "three tiers": ("hierarchical_parallel", 4, {}),
    "naive three tiers": (_BASELINES, 4, {"baseline_config.exchange": "naive"}),
    "naive, yielding": (_BASELINES, 4, {"baseline_config.exchange": "naive"}),
    "data parallel": ("data_parallel", 2, {"data_parallel_config.reduction": "canonical"}),
    "torch DDP, gloo": ("data_parallel", 2, {"data_parallel_config.reduction": "fast"}),
}
_SPINNING = {"naive three tiers"}
_RATIOS = (  # label, numerator, denominator, limit, whether the limit is the least
    ("three tiers / without messages", "three tiers", "without messages", 1.15, False),
    ("naive / three tiers", "naive three tiers", "three tiers", 2.5, True),
    ("naive, yielding / three tiers", "naive, yielding", "three tiers", None, True),
    ("data parallel / torch DDP", "data parallel", "torch DDP, gloo", 1.0, False),
)


def main() -> None:
    """Print every variant's step, and the ratios with their limits."""
    parser = argparse.ArgumentParser(description="Measure what messages cost a step.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another model or batch")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        for _ in range(options.rounds):
            for name in _VARIANTS:
                seconds[name].append(_step_seconds(name, Path(folder), extra=options.set))
    for name, found in seconds.items():
        print(f"{name:34} {statistics.median(found) * 1e3:8.1f} ms   {min(found) * 1e3:.1f} to {max(found) * 1e3:.1f}")
    for label, above, below, limit, is_least in _RATIOS:
        ratio = statistics.median(one / other for one, other in zip(seconds[above], seconds[below], strict=True))
        if limit is None:
            print(f"{label:34} {ratio:8.2f}")
            continue
        is_met = ratio >= limit if is_least else ratio <= limit
        bound = f"{'at least' if is_least else 'at most'} {limit:.2f}"
        print(f"{label:34} {ratio:8.2f}      {bound}   {'met' if is_met else 'MISSED'}")


def _step_seconds(name: str, folder: Path, *, extra: list[str]) -> float:
    """The median step of one run."""
    recipe, ranks, settings = _VARIANTS[name]
    words = ["-n", str(ranks), *(word for setting in extra for word in ("--set", setting))]
    if name in _SPINNING:
        words += ["--mpi-args", "--mca mpi_yield_when_idle 0"]
    return median_step_s(train(recipe, _SETTINGS | settings, folder=folder, words=words), skipped=_SKIPPED)


if __name__ == "__main__":
    main()
