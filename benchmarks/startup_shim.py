"""What a shim takes to start, run a rank that does nothing, and end, against the shim of another commit.

    mkdir ../base && git archive COMMIT | tar -x -C ../base
    python benchmarks/startup_shim.py ../base [--rounds 60]

Each round runs both, the one first in turn; the median of the differences is to stay at or below 2 ms. Processor time says
more than the clock where other work goes on. The last row has the imports alone, as `-X importtime` counts them.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ttlaunch import contract

_HERE = Path(__file__).parents[1]
_RANK = "SOME_RANK"


def main() -> None:
    """Print both medians and the differences in milliseconds."""
    parser = argparse.ArgumentParser(description="Measure the start-up of the shim.")
    parser.add_argument("base", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = _write_plan(Path(folder))
        for what, measure in (
            ("whole shim", _seconds),
            ("its processor time", _processor_seconds),
            ("imports", _import_seconds),
        ):
            pairs = _interleaved(measure, plan, options.base, options.rounds)
            differences = sorted(ours - base for base, ours in pairs)
            low, high = differences[len(pairs) // 4], differences[3 * len(pairs) // 4]
            base, ours = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
            print(
                f"{what:18}  base {base:6.2f} ms  here {ours:6.2f} ms  difference {statistics.median(differences) * 1e3:+.2f} ms"
                f"  (quarter to quarter {low * 1e3:+.2f} to {high * 1e3:+.2f}, {len(pairs)} rounds)"
            )


def _interleaved(
    measure: Callable[[Path, Path], float], plan: Path, base: Path, rounds: int
) -> list[tuple[float, float]]:
    for place in (base, _HERE):
        measure(place, plan)  # the byte code is on disk from here on
    pairs = []
    for number in range(rounds):
        first, second = (base, _HERE) if number % 2 else (_HERE, base)
        taken = {first: measure(first, plan)}
        taken[second] = measure(second, plan)
        pairs.append((taken[base], taken[_HERE]))
    return pairs


def _write_plan(folder: Path) -> Path:
    """A plan of one rank that both versions understand, of a program that ends at once."""
    row = {"rank": 0, "local_rank": 0, "host": "localhost", "role": "rank", "environment": {}}
    engine = {"names": {"launcher": "-", "rank_variables": [_RANK], "network_variables": []}}
    plan = {"format": contract.PLAN_FORMAT, "recipe": None, "rank_command": ["/bin/true"], "engine": engine}
    plan |= {"working_folder": str(folder), "environment": {}, "managed": [], "world_size": 1, "ranks": [row]}
    path = folder / contract.PLAN_FILE
    path.write_text(json.dumps(plan), encoding="utf-8")
    return path


def _command(place: Path, plan: Path, *options: str) -> list[str]:
    return [sys.executable, "-I", "-S", *options, str(place / "ttlaunch" / "agent" / "shim.py"), str(plan)]


def _environment() -> dict[str, str]:
    """With the rank's number under the names of both versions."""
    return {**os.environ, _RANK: "0", "PMIX_RANK": "0", contract.ENV_SCRATCH: "/tmp"}  # noqa: S108 - only named


def _seconds(place: Path, plan: Path) -> float:
    began = time.perf_counter()
    subprocess.run(_command(place, plan), env=_environment(), check=True)
    return time.perf_counter() - began


def _processor_seconds(place: Path, plan: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(_command(place, plan), env=_environment(), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _import_seconds(place: Path, plan: Path) -> float:
    """All that the shim imports, itself included, without what the interpreter imports anyway."""
    answer = subprocess.run(
        _command(place, plan, "-X", "importtime"), env=_environment(), check=True, capture_output=True, text=True
    )
    lines = [line.split("|") for line in answer.stderr.splitlines() if line.startswith("import time:")]
    return sum(int(own.split(":")[1]) for own, _, _ in lines[1:]) / 1e6


if __name__ == "__main__":
    main()
