"""What compression costs and saves: bytes, GB/s of one core beside a copy and torch's own quantisation, and the loss.

    PYTHONPATH=. python benchmarks/compression.py [--rounds 7] [--megabytes 64] [--steps 150] [--kinds none int8 ...]

Codecs encode and decode a gradient of so many megabytes on one thread, in turns with a copy of it, the bound of any codec,
and with torch's `quantize_per_channel` in blocks of 256, scales included. Figures are medians of the rounds, of the
float32 bytes that go in or come out: by the clock, which also counts the time that others had the core, and by the time
that the core worked. Ratios are medians of those within a round, by the core's time. Then `data_parallel` trains its default
model with each kind, error feedback on, and int8 also without. To be met: int8 has at least 3.9 times fewer bytes, encodes
and decodes at 1 GB/s or more of the core's time, and ends within 0.5 % of the validation loss of whole gradients.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from trainings import read_report, train

from ttlaunch.recipe import CompressionConfig
from ttlaunch.train import build_codec

KINDS = ("none", "bf16", "int8", "top_k", "powersgd")
_BLOCK = 256
_LEAST_RATIO, _LEAST_GB_PER_S, _MOST_WORSE = 3.9, 1.0, 0.005


def main() -> None:
    """Print both tables and what was met; status 1 if something was not."""
    parser = argparse.ArgumentParser(description="Measure the codecs of gradients.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150, help="of each training; 0: no training")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)  # torch says that its quantisation is to move elsewhere
    is_met = _speeds(options.kinds, rounds=options.rounds, values=options.megabytes * 250_000)
    if options.steps:
        is_met = _losses(options.kinds, steps=options.steps) and is_met
    sys.exit(0 if is_met else 1)


def _speeds(kinds: list[str], *, rounds: int, values: int) -> bool:
    grads_N = torch.randn(values, generator=torch.Generator().manual_seed(0))
    room_N = torch.empty_like(grads_N)
    codecs = {
        kind: build_codec(CompressionConfig(kind=kind, error_feedback=False), values)
        for kind in kinds
        if kind != "none"
    }
    work: dict[str, Callable[[], object]] = {"copy": lambda: room_N.copy_(grads_N)}
    for name, codec in codecs.items():
        payload = codec.encode(grads_N)
        work[f"{name} encode"] = lambda codec=codec: codec.encode(grads_N)
        work[f"{name} decode"] = lambda codec=codec, payload=payload: codec.decode(payload, room_N)
    blocks = grads_N[: values // _BLOCK * _BLOCK].view(-1, _BLOCK)
    quantised = _quantise(blocks)
    work["torch encode"] = lambda: _quantise(blocks)
    work["torch decode"] = quantised.dequantize
    found: dict[str, list[float]] = {name: [] for name in work}
    clock: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            by_clock, of_core = _seconds(call)
            clock[name].append(4e-9 * values / by_clock)
            found[name].append(4e-9 * values / of_core)
    print(f"{'GB/s':16} {'by clock':>9} {'of core':>8} {'of a copy':>10} {'times torch':>12} {'fewer bytes':>12}")
    for name, speeds in found.items():
        kind, _, way = name.partition(" ")
        torch_speeds = found.get(f"torch {way}")
        ratio = f"{_ratio(speeds, torch_speeds):.2f}" if torch_speeds else ""
        fewer = f"{4 * values / codecs[kind].payload_bytes(values):.2f}" if way == "encode" and kind in codecs else ""
        speed = f"{statistics.median(clock[name]):9.2f} {statistics.median(speeds):8.2f}"
        print(f"{name:16} {speed} {_ratio(speeds, found['copy']):10.2f} {ratio:>12} {fewer:>12}")
    if "int8" not in codecs:
        return True
    fewer_bytes = 4 * values / codecs["int8"].payload_bytes(values)
    slowest = min(statistics.median(found[f"int8 {way}"]) for way in ("encode", "decode"))
    return _say(fewer_bytes, at_least=_LEAST_RATIO, what="int8, times fewer bytes") & _say(
        slowest, at_least=_LEAST_GB_PER_S, what="int8, GB/s of the core's time, the slower way"
    )


def _quantise(blocks: Tensor) -> Tensor:
    """What torch has for the same: a scale for each block, all blocks at once."""
    scales = (blocks.abs().amax(1) / 127).double()
    zeros = torch.zeros(len(blocks), dtype=torch.int64)
    return torch.quantize_per_channel(blocks, scales, zeros, 0, torch.qint8)


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of the core."""
    begin, work = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - begin, time.thread_time() - work


def _ratio(ones: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def _losses(kinds: list[str], *, steps: int) -> bool:
    variants = [(kind, True) for kind in kinds] + [("int8", False)] * ("int8" in kinds)
    found = {}
    for kind, feedback in variants:
        found[kind, feedback] = _trained(kind, feedback=feedback, steps=steps)
        name = kind if feedback else f"{kind}, no feedback"
        worse = found[kind, feedback] / found.get(("none", True), found[kind, feedback]) - 1
        print(f"{name:20} validation loss {found[kind, feedback]:.4f}   {worse:+.2%}")
    if ("none", True) not in found or ("int8", True) not in found:
        return True
    worse = abs(found["int8", True] / found["none", True] - 1)
    return _say(-worse, at_least=-_MOST_WORSE, what="int8, difference of the loss, as a share")


def _trained(kind: str, *, feedback: bool, steps: int) -> float:
    """The last validation loss of the recipe's own model on its own text, two workers."""
    settings = {
        "training_config.steps": steps,
        "training_config.validation_sequences": 256,
        "compression_config.kind": kind,
        "compression_config.error_feedback": str(feedback).lower(),
        "checkpoint_config.interval": "null",
    }
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        report = read_report(train("data_parallel", settings, folder=Path(folder)))
    return float(report["last_validation"])


def _say(found: float, *, at_least: float, what: str) -> bool:
    is_met = found >= at_least
    bound = f"at least {at_least}" if at_least > 0 else f"at most {-at_least}"
    print(f"{what}: {abs(found):.4g}   ({bound}: {'met' if is_met else 'NOT MET'})")
    return is_met


if __name__ == "__main__":
    main()
