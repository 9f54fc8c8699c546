"""What a second rank and guesses are worth to a serving run, and bf16: real runs that are asked in turns, without HTTP.

    python benchmarks/serve_ranks.py RUN [--rounds 3] [--tokens 150]

RUN is a training run, such as one of `ttlaunch run data_parallel --set transformer_config.embedding_dim=256 …`; guesses are right as often as its
text repeats itself. All runs are started first, and wait while another one answers; each rank has one thread. A figure is the median over the
rounds of a ratio within one. Ends with 1 if a limit is missed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from ttlaunch.app.ask_head import Head, serving
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.serve import ServeOptions, find_served
from ttlaunch.serving import wire

_ONE_THREAD = ("device_config.threads_per_rank=1",)
_BF16 = (*_ONE_THREAD, "training_config.precision=bf16")
_PROMPTS = (
    "import os\n",
    "class Thing(object):\n    def __init__(self",
    "def main():\n",
    "x = [1, 2",
    "# Copyright",
    "for i in ",
    "return ",
    "    if not ",
)
_RUNS = {
    "one": ServeOptions(guesses=False, overrides=_ONE_THREAD),
    "guessing": ServeOptions(overrides=_ONE_THREAD),
    "two stages": ServeOptions(ranks=2, split="stages", guesses=False, overrides=_ONE_THREAD),
    "bf16": ServeOptions(guesses=False, overrides=_BF16),
}
_RATIOS: tuple[tuple[str, tuple[str, int], tuple[str, int], float | None], ...] = (
    ("two stages, 8 streams / one rank, 8 streams", ("two stages", 8), ("one", 8), 1.6),
    ("two stages, one stream / one rank, one stream", ("two stages", 1), ("one", 1), 0.85),
    ("guesses on / off, one stream", ("guessing", 1), ("one", 1), 1.15),
    ("bf16 / fp32, one stream", ("bf16", 1), ("one", 1), None),
    ("bf16 / fp32, 8 streams", ("bf16", 8), ("one", 8), None),
)


def main() -> int:
    """Start the runs, measure in turns, and print each ratio with its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    with ExitStack() as running:
        heads = {}
        for name, how in _RUNS.items():
            spec, _ = find_served(options.run, how, runs_dir=Path("runs"), working_folder=Path.cwd())
            heads[name] = running.enter_context(serving(spec, Unattended()))
        numbers = iter(range(1, 10**6))
        rounds = [
            {(name, count): _speed(heads[name], count, options.tokens, numbers) for name in _RUNS for count in (1, 8)}
            for _ in range(options.rounds + 1)
        ][1:]  # the first one warms up
    is_missed = False
    for what, above, below, limit in _RATIOS:
        ratios = [one[above] / one[below] for one in rounds]
        median = statistics.median(ratios)
        is_missed |= limit is not None and median < limit
        said = "reported" if limit is None else f"at least {limit}{'' if median >= limit else ', MISSED'}"
        print(f"{what:48} {median:5.2f}  {min(ratios):.2f} to {max(ratios):.2f}  ({said})")
    print(f"one rank, one stream: {statistics.median(one['one', 1] for one in rounds):.0f} tokens/s")
    return int(is_missed)


def _speed(head: Head, count: int, tokens: int, numbers: Iterator[int]) -> float:
    """Tokens per second of so many texts at once."""
    asks = [
        wire.Ask(stream=next(numbers), text=prompt, max_tokens=tokens, temperature=0.8, seed=place)
        for place, prompt in enumerate(_PROMPTS[:count])
    ]
    begun, found = time.perf_counter(), 0
    for message in head.answers(asks):
        found += len(message.ids) if isinstance(message, wire.Tokens) else 0
    return found / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
