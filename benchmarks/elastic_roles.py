"""Kill who alone has a part of the state: the optimizer, the aggregator, a server, an owner of `zero`.

    PYTHONPATH=. python benchmarks/elastic_roles.py [--times 3] [--minutes 10] [--seed 0]

Each of them has a shadow. After SIGKILL at a random moment, another member has to have made the next step within 2 s, and the SHA-256 at the end
has to be that of a run that nobody disturbed.

Each round is a line in `.benchmarks/elastic_roles.jsonl`; the same command goes on after the last one, whatever code it was
made with. Ends with 1 if a limit is missed.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".benchmarks" / "elastic_roles.jsonl"
LIMIT_S = 2.0
_STEPS, _FROM, _TO = 60, 8, 30
_WAIT_S = 240.0
_ZERO = ["--set", "zero_config.stage=3"]
ROLES: dict[str, tuple[list[str], int]] = {
    "hierarchical_parallel, optimizer": (["hierarchical_parallel", "-n", "4", "--elastic", "3:4"], 0),
    "hierarchical_parallel, aggregator": (["hierarchical_parallel", "-n", "4", "--elastic", "3:4"], 1),
    "sync_ps, server": (["sync_ps", "-n", "4", "--elastic", "3:4"], 0),
    "zero, owner of slot 0": (["zero", "-n", "3", "--elastic", "2:3", *_ZERO], 0),
    "zero, owner of slot 1": (["zero", "-n", "3", "--elastic", "2:3", *_ZERO], 1),
    "zero, owner of slot 2": (["zero", "-n", "3", "--elastic", "2:3", *_ZERO], 2),
}
"""The command, and the number of the worker that is killed."""

Line = dict[str, Any]


def main() -> int:
    """Make the rounds that are missing, and print what all have shown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=3, help="kills of each role")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    KEPT.parent.mkdir(exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    for number in range(options.times):
        for role, (words, victim) in ROLES.items():
            if len(_kept(role)) <= number and time.monotonic() < ends:
                _keep(role, _kill(words, victim, random.Random(f"{options.seed} {role} {number}")))  # noqa: S311
        for words in {tuple(words): words for words, _ in ROLES.values()}.values():
            if not _kept(" ".join(words)) and time.monotonic() < ends:
                _keep(" ".join(words), {"sha256": _undisturbed(words)})
    return _show()


def _show() -> int:
    missed = count = 0
    for role, (words, _) in ROLES.items():
        lines, expected = _kept(role), {line["sha256"] for line in _kept(" ".join(words))}
        if not lines or not expected:
            continue
        seconds = [line["seconds"] for line in lines]
        same = sum({line["sha256"]} == expected for line in lines)
        missed += len(lines) - same + sum(one > LIMIT_S for one in seconds)
        count += len(lines)
        print(
            f"{role:34} {len(lines):3} kills: {statistics.median(seconds):.2f} s (median; at most {max(seconds):.2f}, limit {LIMIT_S:g}); "
            f"SHA-256 as undisturbed {same}"
        )
    print(f"{missed} missed of {count} kills (at most 0); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return int(missed > 0)


def _command(words: list[str]) -> list[str]:
    ttlaunch = str(Path(sys.executable).with_name("ttlaunch"))
    return [ttlaunch, "run", *words, "--set", f"training_config.steps={_STEPS}"]


def _undisturbed(words: list[str]) -> str:
    with tempfile.TemporaryDirectory() as place:
        process = subprocess.Popen(
            _command(words), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return _digest(process)


def _kill(words: list[str], victim: int, chance: random.Random) -> Line:
    with tempfile.TemporaryDirectory() as place:
        process = subprocess.Popen(
            _command(words), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            found = _killed(process, Path(place), victim, chance)
            return {**found, "sha256": _digest(process)}
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(_WAIT_S)


def _killed(process: "subprocess.Popen[str]", place: Path, victim: int, chance: random.Random) -> Line:
    last, ends = chance.randint(_FROM, _TO), time.monotonic() + _WAIT_S
    while (made := _newest(place))[0] < last:
        _check(process, ends)
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.3))
    pid = next(line["pid"] for line in _records(place, victim) if line["kind"] == "started")
    began = time.time()
    os.kill(pid, signal.SIGKILL)
    made = _newest(place, before=began)
    while True:
        later = [
            line["time"]
            for path in place.glob("runs/[!.]*/records/rank-*.progress.jsonl")
            for line in _lines(path)
            if line["kind"] == "member"
            and line["what"] == "progressed"
            and line["epoch"] > made[1]
            and line["applied"] > made[0]
        ]
        if later:
            return {"seconds": min(later) - began, "step": made[0]}
        _check(process, ends)
        time.sleep(0.01)


def _check(process: "subprocess.Popen[str]", ends: float) -> None:
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < ends, "the run does not get so far"


def _newest(place: Path, *, before: float = float("inf")) -> tuple[int, int]:
    """Return the last step that a member has reported before a time, and its epoch."""
    found = [
        (line["applied"], line["epoch"])
        for path in place.glob("runs/[!.]*/records/rank-*.progress.jsonl")
        for line in _lines(path)
        if line["kind"] == "member" and line["what"] == "progressed" and line["time"] < before
    ]
    return max(found, default=(-1, 0))


def _records(place: Path, number: int) -> list[Line]:
    return [line for path in place.glob(f"runs/[!.]*/records/rank-{number}.progress.jsonl") for line in _lines(path)]


def _lines(path: Path) -> list[Line]:
    """Return the records of a worker; a line that is still being written is not there yet."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _digest(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=2 * _WAIT_S)
    found = [line.split()[-1] for line in output.splitlines() if "sha256" in line]
    assert found, output
    return found[-1]


def _keep(role: str, line: Line) -> None:
    with KEPT.open("a") as file:
        file.write(json.dumps({"role": role, **line}) + "\n")


def _kept(role: str) -> list[Line]:
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return [line for line in map(json.loads, lines) if line["role"] == role]


if __name__ == "__main__":
    sys.exit(main())
