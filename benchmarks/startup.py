"""Start-up of the command line, as ratios to importing the libraries it cannot do without, and of whole runs, beside the bare program.

    python benchmarks/startup.py [--rounds 21]

Each round times both commands and, right before each, `python -c "import typer, pydantic, yaml"`; the median of the
ratios is to stay at or below 2.5. Then each round times a bare program, and `ttlaunch` with it: a run with engine
`agents` is to take at most 0.20 s more than the program alone, at the median. Processor time, in which all processes of a
run are added, says more than the clock where other work goes on. Byte code is written first, as pip does when it installs.
"""

import argparse
import compileall
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ttlaunch

_TTLAUNCH = str(Path(sys.executable).with_name("ttlaunch"))
_COMMANDS = {"ttlaunch --help": [_TTLAUNCH, "--help"], "ttlaunch validate local": [_TTLAUNCH, "validate", "local"]}
_BASE = [sys.executable, "-c", "import typer, pydantic, yaml"]
_SCRIPT = "print('done')"
_LIMIT_S = 0.20


def main() -> None:
    """Print a row per command: ratio and seconds, medians and extremes; then a row per kind of run."""
    parser = argparse.ArgumentParser(description="Measure the start-up of the command line.")
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    compileall.compile_dir(Path(ttlaunch.__file__).parent, quiet=1)
    print(f"{'command':26} {'ratio':>6} {'least':>6} {'most':>6} {'seconds':>8}")
    for name, command in _COMMANDS.items():
        pairs = [(_seconds(_BASE), _seconds(command)) for _ in range(rounds)]
        ratios = [ours / base for base, ours in pairs]
        seconds = statistics.median(ours for _, ours in pairs)
        print(f"{name:26} {statistics.median(ratios):6.2f} {min(ratios):6.2f} {max(ratios):6.2f} {seconds:8.3f}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("script.py").write_text(_SCRIPT, encoding="utf-8")
        _measure_runs(rounds)
        os.chdir("/")


def _measure_runs(rounds: int) -> None:
    """Time runs of two ranks beside their program alone, in turn, so that other work on the machine meets all of them."""
    run = [_TTLAUNCH, "run", "-n", "2", "--engine"]
    bare, script = ["hostname"], [sys.executable, "script.py"]
    rows = {
        "hostname": (bare, bare),
        "ttlaunch --version": ([_TTLAUNCH, "--version"], bare),
        "plan": ([_TTLAUNCH, "plan", "-n", "2", "--engine", "agents", "--", *bare], bare),
        "run, agents": ([*run, "agents", "--", *bare], bare),
        "run, openmpi": ([*run, "openmpi", "--", *bare], bare),
        "python script.py": (script, script),
        "run script.py, agents": ([*run, "agents", "script.py"], script),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, (command, _bare) in rows.items():
            before = _processor_seconds()
            seconds = _seconds(command)
            taken[name].append((seconds, _processor_seconds() - before))
    print(f"\n{'run':26} {'seconds':>8} {'least':>6} {'processor':>9} {'over the program':>17} {'limit':>6}")
    alone = {tuple(command): name for name, (command, own) in rows.items() if command == own}
    for name, (_command, own) in rows.items():
        seconds, processor = (statistics.median(column) for column in zip(*taken[name], strict=True))
        pairs = zip(taken[name], taken[alone[tuple(own)]], strict=True)
        over = statistics.median(ours - bare for (ours, _), (bare, _) in pairs)
        limit = f"{_LIMIT_S:6.2f}" if name.endswith("agents") else ""
        print(f"{name:26} {seconds:8.3f} {min(taken[name])[0]:6.3f} {processor:9.3f} {over:+17.3f} {limit}")


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
