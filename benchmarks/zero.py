"""ZeRO stage 3 against torch's FSDP2 in the same run, what ranks keep at every stage, and bytes against the formula.

    PYTHONPATH=. python benchmarks/zero.py [--rounds 5] [--set KEY=VALUE]   0 rounds: only the table of stages

The model is a transformer of 6 blocks, 256 wide, on 64 bytes of text (4.9 million parameters, S = 20 MB); a step sees 16
sequences, shared by 2 workers; AdamW, and the norm is clipped. Every rank has one thread. `FSDP2` is torch's `fully_shard`
over gloo around the same model (`benchmarks/zero_baseline`), started by the same command. Both are measured with one
micro-batch a rank, which suits FSDP2 best, and with four, of which it gathers layers for each. Variants take turns; a figure is the
median time between two steps of the first worker, the first five left out. To be met: FSDP2 / zero at least 1.0.

Then each stage runs two steps on 2, 3 and 4 ranks: bytes a parameter that the rank with most of them keeps between steps, as
the ranks measured it, against 16, 8 + 8/n, 4 + 12/n and 16/n (within 1 %); and sent bytes divided by the recipe's formula.
"""

import argparse
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainings import median_step_s, read_report, train

_SETTINGS = {
    "training_config.steps": 20,
    "training_config.batch_size": 16,
    "training_config.validation_interval": 1000,
    "training_config.validation_sequences": 2,
    "transformer_config.num_blocks": 6,
    "transformer_config.num_heads": 4,
    "transformer_config.embedding_dim": 256,
    "transformer_config.max_sequence_length": 64,
    "multihost_config.num_workers": 2,
    "checkpoint_config.interval": "null",
}
_SKIPPED = 5
_BASELINE = str(Path(__file__).parent / "zero_baseline")
_VARIANTS = {
    "zero 3, 1 micro-batch a rank": ("zero", 8),
    "FSDP2, 1 micro-batch a rank": (_BASELINE, 8),
    "zero 3, 4 micro-batches a rank": ("zero", 2),
    "FSDP2, 4 micro-batches a rank": (_BASELINE, 2),
}
_LEAST_RATIO = 1.0
_PROMISED = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}
"""Bytes a parameter that every rank has, and those that n ranks share."""


def main() -> None:
    """Print steps with their ratio, then the table of stages."""
    parser = argparse.ArgumentParser(description="Measure ZeRO against FSDP2, and what its stages keep and send.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another model or batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        if options.rounds:
            _measure_steps(options.rounds, Path(folder), extra=options.set)
        _measure_stages(Path(folder))


def _measure_steps(rounds: int, folder: Path, *, extra: Sequence[str]) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    for _ in range(rounds):
        for name, (recipe, micro_batch) in _VARIANTS.items():
            settings = _SETTINGS | {"training_config.micro_batch_size": micro_batch}
            run = train(recipe, settings, folder=folder, words=[word for one in extra for word in ("--set", one)])
            seconds[name].append(median_step_s(run, skipped=_SKIPPED))
        print("round:", ", ".join(f"{name} {found[-1] * 1e3:.0f} ms" for name, found in seconds.items()), flush=True)
    for name, found in seconds.items():
        print(f"{name:32} {statistics.median(found) * 1e3:8.1f} ms   {min(found) * 1e3:.1f} to {max(found) * 1e3:.1f}")
    names = list(_VARIANTS)
    for own, other in zip(names[::2], names[1::2], strict=True):
        ratios = [theirs / ours for ours, theirs in zip(seconds[own], seconds[other], strict=True)]
        ratio = statistics.median(ratios)
        verdict = "met" if ratio >= _LEAST_RATIO else "NOT MET"
        print(f"{other} / {own}: {ratio:.2f}   median of the rounds, at least {_LEAST_RATIO:.1f}: {verdict}")


def _measure_stages(folder: Path) -> None:
    print("\nstage  ranks  bytes a parameter  promised  ratio   sent / formula")
    for stage, (own_bytes, shared_bytes) in _PROMISED.items():
        for ranks in (2, 3, 4):
            promised = own_bytes + shared_bytes / ranks
            values = {"training_config.steps": 2, "zero_config.stage": stage, "multihost_config.num_workers": ranks}
            run = train("zero", _SETTINGS | values | {"training_config.micro_batch_size": 2}, folder=folder)
            kept = max(_kept(run, ranks))
            print(
                f"{stage:5}  {ranks:5}  {kept:17.3f}  {promised:8.3f}  {kept / promised:.4f}"
                f"   {_share_of_formula(run):14.3f}",
                flush=True,
            )


def _kept(run: Path, ranks: int) -> list[float]:
    """Bytes a parameter, by rank."""
    found = []
    for rank in range(ranks):
        text = (run / "records" / f"rank-{rank}.progress.jsonl").read_text(encoding="utf-8")
        found.append(float(re.findall(r'"bytes a parameter, rank \d+": ?([0-9.]+)', text)[-1]))
    return found


def _share_of_formula(run: Path) -> float:
    edges = read_report(run)["traffic"]["edges"]
    return float(sum(edge["bytes"] for edge in edges) / sum(edge["formula_bytes"] for edge in edges))


if __name__ == "__main__":
    main()
