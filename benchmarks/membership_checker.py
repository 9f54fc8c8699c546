"""Explore every order of events of elastic runs that are larger than those of the tests: no leaf twice, and always an end.

    python benchmarks/membership_checker.py [--minutes 5] [--only NAME] [--fresh]

What is explored is the coordinator's and the workers' own code (`ttlaunch/membership`), among processes that crash, come, leave
and are counted as lost although they live, and with orders that are late, repeated and lost (`tests/membership/world.py` has
the rules). After that it breaks the protocol in one place after another, each of which must be found out.

Each setting is a line in `.benchmarks/membership_checker.jsonl`; the same command goes on after the last one, as long as the code
has not changed. A setting whose states do not fit into what is left of the time is tried again by the next command. Ends
with 1 if a rule is broken or a mutant lives. Takes about 1 GB of memory.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".benchmarks" / "membership_checker.jsonl"
LONGEST_TRACE = 15
MOST_STATES = 1_200_000

sys.path.insert(0, str(ROOT))

from tests.membership.explorer import Findings, explore  # noqa: E402
from tests.membership.mutants import MUTANTS, setting_of  # noqa: E402
from tests.membership.process import Work  # noqa: E402
from tests.membership.world import Budget, Setting, World  # noqa: E402

_THREE = Work(micro_batches=3)
SETTINGS = {
    "2 workers: crash, suspicion": Setting(budget=Budget(crashes=1, suspicions=1)),
    "2 workers: 2 suspicions": Setting(budget=Budget(suspicions=2)),
    "2 workers: 2 crashes, a join": Setting(budget=Budget(crashes=2, joins=1)),
    "2 workers: join, leave, lost order": Setting(budget=Budget(joins=1, leaves=1, lost_orders=1)),
    "2 workers, from the start: crash, suspicion, lost order": Setting(
        budget=Budget(crashes=1, suspicions=1, lost_orders=1), is_running=False
    ),
    "2 workers, at least 2: crash, join, suspicion": Setting(
        minimum=2, budget=Budget(crashes=1, joins=1, suspicions=1)
    ),
    "2 workers, 2 steps with validation: crash, join": Setting(
        work=Work(steps=2, validates=True), budget=Budget(crashes=1, joins=1)
    ),
    "2 workers, 2 steps of 2 buckets: crash, suspicion": Setting(
        work=Work(steps=2, buckets=2), budget=Budget(crashes=1, suspicions=1)
    ),
    "1 worker: 2 joins, 2 leaves": Setting(workers=1, budget=Budget(joins=2, leaves=2), follows=False),
    "1 worker, the other follows: join, crash, lost order": Setting(
        workers=1, work=Work(steps=2), budget=Budget(joins=1, crashes=1, lost_orders=1)
    ),
    "2 workers, the third follows: join, crash": Setting(
        maximum=3, work=Work(micro_batches=3, steps=2), budget=Budget(joins=1, crashes=1)
    ),
    "3 owners of slots: 2 crashes": Setting(
        workers=3, maximum=3, work=Work(micro_batches=3, slots=0), budget=Budget(crashes=2)
    ),
    "3 owners of slots: a leave": Setting(
        workers=3, maximum=3, work=Work(micro_batches=3, slots=0), budget=Budget(leaves=1)
    ),
    "3 owners of slots: a broken connection": Setting(
        workers=3, maximum=3, work=Work(micro_batches=3, slots=0), budget=Budget(breaks=1)
    ),
    "2 owners of slots: crash, join": Setting(
        maximum=3, work=Work(micro_batches=3, slots=0), budget=Budget(crashes=1, joins=1), follows=False
    ),
    "3 workers: crash": Setting(workers=3, maximum=3, work=_THREE, budget=Budget(crashes=1)),
    "3 workers: suspicion": Setting(workers=3, maximum=3, work=_THREE, budget=Budget(suspicions=1)),
    "3 workers: leave": Setting(workers=3, maximum=3, work=_THREE, budget=Budget(leaves=1)),
    "3 workers, 2 buckets: crash": Setting(
        workers=3, maximum=3, work=Work(micro_batches=3, buckets=2), budget=Budget(crashes=1)
    ),
    "2 workers, then 3: crash, join": Setting(maximum=3, work=_THREE, budget=Budget(crashes=1, joins=1)),
}


def main() -> int:
    """Explore what was not explored yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="ends after about so long (default 5)")
    parser.add_argument("--only", default="", help="settings and mutants whose name contains this")
    parser.add_argument("--fresh", action="store_true", help="explore everything anew")
    options = parser.parse_args()
    if options.fresh:
        KEPT.unlink(missing_ok=True)
    done = {line["name"]: line for line in _kept()}
    ends = time.monotonic() + 60 * options.minutes
    wrong = 0
    for name, setting, expected in _cases():
        if options.only not in name:
            continue
        line = done.get(name) or _explored(name, setting, ends - time.monotonic())
        if line is None:
            sys.stdout.write(f"{name:60} not finished in the time; the same command tries it again\n")
            continue
        is_right = _is_right(line, expected)
        wrong += not is_right
        verdict = "right" if is_right else "WRONG"
        what = f"found after {len(line['trace'])} events (at most {LONGEST_TRACE})" if expected is not None else ""
        what = (
            what or f"{line['ended']} ends, {line['stuck']} stuck (at most 0), {line['excused']} with too few workers"
        )
        sys.stdout.write(f"{name:60} {verdict}  {line['states']:8} states {line['seconds']:6.1f} s  {what}\n")
        if not is_right:
            sys.stdout.write(f"    {line['mistake'] or 'nothing found'}: {', '.join(line['trace'])}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{wrong} wrong (at most 0)\n")
    return int(wrong > 0)


def _cases() -> Iterator[tuple[str, Setting, str | None]]:
    for name, setting in SETTINGS.items():
        yield name, setting, None
    for name, (_, _, expected) in MUTANTS.items():
        yield f"mutant: {name}", setting_of(name), expected


def _is_right(line: dict[str, object], expected: str | None) -> bool:
    mistake, trace = str(line["mistake"]), line["trace"]
    assert isinstance(trace, list)
    if expected is None:
        return not mistake
    return bool(mistake) and expected in mistake and len(trace) <= LONGEST_TRACE


def _explored(name: str, setting: Setting, seconds: float) -> dict[str, object] | None:
    if seconds <= 0:
        return None
    found: Findings = explore(World(setting), most_states=MOST_STATES, most_s=seconds)
    if not found.is_complete:
        return None
    line = {"name": name, "code": _code(), **asdict(found), "trace": list(found.trace)}
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def _kept() -> list[dict[str, object]]:
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return [line for line in map(json.loads, lines) if line["code"] == _code()]


def _code() -> str:
    """Return a digest of the code that is explored and of that which explores it."""
    paths = [*(ROOT / "ttlaunch" / "membership").glob("*.py"), *(ROOT / "tests" / "membership").glob("*.py")]
    sources = b"".join(path.read_bytes() for path in sorted(paths) if not path.name.startswith("test_"))
    return hashlib.sha256(sources).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
