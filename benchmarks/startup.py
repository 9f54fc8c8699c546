"""Start-up of the command line, as ratios to importing the libraries it cannot do without.

    python benchmarks/startup.py [--rounds 21]

Each round times both commands and, right before each, `python -c "import typer, pydantic, yaml"`; the median of the
ratios is to stay at or below 2.5.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

_TTLAUNCH = str(Path(sys.executable).with_name("ttlaunch"))
_COMMANDS = {"ttlaunch --help": [_TTLAUNCH, "--help"], "ttlaunch validate local": [_TTLAUNCH, "validate", "local"]}
_BASE = [sys.executable, "-c", "import typer, pydantic, yaml"]


def main() -> None:
    """Print a row per command: ratio and seconds, medians and extremes."""
    parser = argparse.ArgumentParser(description="Measure the start-up of the command line.")
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    print(f"{'command':26} {'ratio':>6} {'least':>6} {'most':>6} {'seconds':>8}")
    for name, command in _COMMANDS.items():
        pairs = [(_seconds(_BASE), _seconds(command)) for _ in range(rounds)]
        ratios = [ours / base for base, ours in pairs]
        seconds = statistics.median(ours for _, ours in pairs)
        print(f"{name:26} {statistics.median(ratios):6.2f} {min(ratios):6.2f} {max(ratios):6.2f} {seconds:8.3f}")


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
