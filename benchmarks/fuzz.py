"""Give mutated input to everything that reads what others write, in one process: no crash, no hang, no growth.

A case is a sample with a few changes, and now and then a bomb: deep nesting, a list of millions, numbers of thousands of
digits. It is made from the seed, the target's name and its number alone, so a case that was found can be made again:
`--target NAME --first N --count 1`. The memory that the process has used at most is printed beside its limit. Anything but an
answer or a refusal of the kind that the target allows is a crash; the exit status is then 1.

    python benchmarks/fuzz.py [--target NAME]... [--seed 1] [--first 0] [--count 100000]
"""

import argparse
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from fuzz_cases import Sample, Target, bomb, mutated
from fuzz_files import checkpoints, pretrained, textproto, yaml
from fuzz_hosts import frames, probes, records
from fuzz_terminal import terminal_text
from fuzz_untrusted import gguf, templates, tokenizers

TARGETS: dict[str, Callable[[], Target]] = {
    "frames": frames,
    "records": records,
    "probes": probes,
    "checkpoints": checkpoints,
    "pretrained": pretrained,
    "gguf": gguf,
    "tokenizers": tokenizers,
    "templates": templates,
    "yaml": yaml,
    "textproto": textproto,
    "text": terminal_text,
}
"""Makes each target; a new one is a line here."""

LIMIT_MB = 300
"""The most memory that the process may use, whatever it is given."""
LONGEST_S = 5.0
BYTES_PER_S = 1_000_000
"""A case may take `LONGEST_S`, and longer if it has many bytes; a machine that others use too is not fast."""
BOMB_EVERY = 1_000
_MOST_SHOWN = 20


class HangError(BaseException):
    """A case took too long; no code under test catches it."""


def case(name: str, target: Target, *, seed: int, number: int) -> Sample:
    """A case, from its number alone."""
    dice = random.Random(f"{seed} {name} {number}")  # noqa: S311 - made again from its number
    if number % BOMB_EVERY == BOMB_EVERY - 1:
        sample = dice.choice(target.samples)
        return Sample(bomb(dice, sample.content), sample.read)
    return (target.make or mutated)(dice, target.samples)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `HangError` in the block once the time is over."""

    def give_up(_number: int, _frame: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def run(name: str, *, seed: int, first: int, count: int) -> list[str]:
    """Give a target its cases; returns what went wrong, a text for each case."""
    target = TARGETS[name]()
    found = []
    try:
        for number in range(first, first + count):
            sample = case(name, target, seed=seed, number=number)
            try:
                with at_most(LONGEST_S + target.longer_s + len(sample.content) / BYTES_PER_S):
                    sample.read(sample.content)
            except target.refusals:
                continue
            except HangError:
                found.append(
                    f"{name} {number}: no answer in time: {len(sample.content)} bytes, {sample.content[:200]!r}"
                )
            except Exception:  # noqa: BLE001 - any of them is the finding
                found.append(f"{name} {number}: {sample.content[:200]!r}\n{traceback.format_exc(limit=-3)[-900:]}")
    finally:
        target.close()
    return found


def peak_mb() -> float:
    """The most memory that this process has used, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> int:
    """Run, and print for each target the cases per second, what went wrong, and the memory beside its limit."""
    parser = argparse.ArgumentParser(description="Fuzz everything that reads what others write.")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    wrong = False
    for name in options.target or TARGETS:
        began = perf_counter()
        found = run(name, seed=options.seed, first=options.first, count=options.count)
        took, peak = perf_counter() - began, peak_mb()
        wrong = wrong or bool(found) or peak > LIMIT_MB
        rate = options.count / max(took, 1e-9)
        print(
            f"{name}: {options.count} cases in {took:.0f} s ({rate:.0f} a second), crashes and hangs: {len(found)}, "
            f"peak memory {peak:.0f} MB (limit {LIMIT_MB} MB)",
            flush=True,
        )
        alike = {text.rsplit("\n", 2)[-2:][0]: text for text in found[::-1]}  # the first of those that end alike
        print(*list(alike.values())[:_MOST_SHOWN], sep="\n", end="\n" if found else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
