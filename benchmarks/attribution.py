"""Break a rank in every way, on this machine and across hosts, and compare who is named, and as what, with who was broken.

    PYTHONPATH=. python benchmarks/attribution.py [--results FILE] [--place here|hosts] [--start default|agents|warm] [--rounds 4] [--minutes 10]
    PYTHONPATH=. python benchmarks/attribution.py --beside

Every fault of `attribution_cells.py`, times every rank and role of a program without torch (4 ranks over MPI, or over
sockets) and of a small recipe (2 workers and a server), at a random step, times the places: this machine, and three hosts in
namespaces with their own sshd (needs root). A cell is right if the rank, or one of the role's, is named with its host and
the class of its end. With `--start agents`, engine `agents` starts the program over sockets and, in place of the recipe, a
script with DistributedDataParallel over gloo (3 ranks); with `--start warm`, the same as forks of a process that has imported torch.

Each fault is a line in the file of results; the same command makes those that are missing there, as long as what
attributes was not changed. `--beside` breaks each fault once under bare `mpirun` and `torchrun` too, and looks which ranks
they name.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attribution_beside import show_others
from attribution_cells import (
    AGENTS,
    BROKEN,
    BY_KERNEL,
    CLASSES,
    DEFAULT,
    HERE,
    HOSTS,
    ROUNDS,
    WARM,
    Cell,
    is_right,
    plan_cells,
)
from attribution_places import break_cell, control_group, open_place

TO_BE_MET = 0.99
LONGEST_AFTER_S = 2.0
"""Seconds from an exception to the end of the command, of scripts whose exceptions nothing delays."""
AT_ONCE = {"raise", "long message", "raised from another", "assertion", "division by zero", "missing file"}
BREAKS = ("ddp", "faults", "recipe", "ring", "trainer")
ATTRIBUTES = (
    "running/failures/attribution",
    "running/failures/causes",
    "running/failures/stderr_tail",
    "running/failures/name_cause",
    "running/hang/odd_one",
    "running/hang/obstacles",
    "running/hang/verdict",
    "running/hang/hangs",
    "running/ending",
    "running/lost_folders",
    "agent/forked_rank",
    "agent/process_facts",
    "agent/rank_records",
    "agent/start_ranks",
    "rank_exceptions/describe",
    "rank_exceptions/fate",
    "rank_exceptions/outline",
    "rank_exceptions/watch",
)


def main() -> int:
    """Break, look, count; status 1 if less is right than is to be."""
    parser = argparse.ArgumentParser(description="Break a rank in every way, and compare who is named.")
    parser.add_argument(
        "--results", type=Path, default=Path(".benchmarks/attribution.jsonl"), help="where they are kept"
    )
    parser.add_argument("--place", choices=(HERE, HOSTS), action="append", help="only there; both unless said")
    parser.add_argument("--start", choices=(DEFAULT, AGENTS, WARM), default=DEFAULT, help="how ranks are started")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each cell is broken")
    parser.add_argument("--only", choices=tuple(CLASSES), action="append", help="only these faults")
    parser.add_argument("--minutes", type=float, default=None, help="after which no other fault is made")
    parser.add_argument("--fresh", action="store_true", help="forget what was kept")
    parser.add_argument("--beside", action="store_true", help="each fault once under bare mpirun and torchrun")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    if options.beside:
        with tempfile.TemporaryDirectory(prefix="attribution-") as scratch, control_group("beside") as group:
            show_others(Path(scratch), group)
        return 0
    began, found = time.monotonic(), []
    for place in options.place or (HERE, HOSTS):
        found += _at(place, options, began)
    return _show(found)


def _at(place: str, options: argparse.Namespace, began: float) -> list[dict[str, Any]]:
    """All results of a place, those of earlier calls included."""
    about = {"code": _code_hash()}
    kept = _kept(options.results, about)
    cells = [
        cell
        for cell in plan_cells(place, options.start, options.rounds)
        if options.only is None or cell.fault in options.only
    ]
    missing = [cell for cell in cells if cell.key not in kept]
    print(f"{place}: {len(cells) - len(missing)} faults are there, {len(missing)} are to be made", flush=True)
    if missing:
        with tempfile.TemporaryDirectory(prefix="attribution-") as scratch, open_place(place) as machine:
            for number, cell in enumerate(missing):
                if options.minutes and time.monotonic() - began > 60 * options.minutes:
                    break
                entry = {**about, **cell._asdict(), **break_cell(cell, machine, Path(scratch, str(number)))}
                kept[cell.key] = entry
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
                verdict = "right" if is_right(entry) else f"WRONG: {entry['named']}, {entry['class']}, {entry['said']}"
                print(f"{number + 1:4} {place:6}{cell.program:8} {cell.fault:30} {cell.who}: {verdict}", flush=True)
    return [entry for entry in kept.values() if (entry["place"], entry["start"]) == (place, options.start)]


def _kept(results: Path, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the file has of the code as it is now, by the cell's key."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    entries = [entry for line in lines if (entry := json.loads(line)).items() >= about.items()]
    return {Cell(*(entry[name] for name in Cell._fields)).key: entry for entry in entries}


def _show(found: list[dict[str, Any]]) -> int:
    places = [place for place in (HERE, HOSTS) if any(entry["place"] == place for entry in found)]
    made = Counter((entry["fault"], entry["place"]) for entry in found)
    right = Counter((entry["fault"], entry["place"]) for entry in found if is_right(entry))
    print(f"\n{'fault, right of made':32}" + "".join(f"{place:>12}" for place in places))
    for fault in CLASSES:
        counts = [f"{right[fault, place]} of {made[fault, place]}" for place in places]
        if any(made[fault, place] for place in places):
            print(f"{fault:32}" + "".join(f"{count:>12}" for count in counts))
    if not any(made[BY_KERNEL, place] for place in places):
        print(f"not made: {BY_KERNEL}; we may make no control group")
    for place in places:
        seconds = [entry["seconds"] for entry in found if entry["place"] == place and entry["program"] == "program"]
        if seconds:
            print(
                f"a run of the program, {place}: {statistics.median(seconds):.1f} s at the median, {max(seconds):.1f} s at most"
            )
        after = [
            one["after_s"] for one in found if one["place"] == place and one["fault"] in AT_ONCE and one.get("after_s")
        ]
        if after:
            print(
                f"from an exception to the end of the command, {place}: {statistics.median(after):.1f} s at the median, "
                f"{max(after):.1f} s at most of {len(after)} (limit {LONGEST_AFTER_S:g} s)"
            )
    share = right.total() / made.total() if made else 0.0
    verdict = "met" if share >= TO_BE_MET else "MISSED"
    print(
        f"right in rank, host and cause: {right.total()} of {made.total()}, {share:.1%} (to be met: {TO_BE_MET:.0%}): {verdict}"
    )
    return 0 if share >= TO_BE_MET else 1


def _code_hash() -> str:
    package, digest = Path(__file__).parents[1] / "ttlaunch", hashlib.sha256()
    for path in [*(package / f"{name}.py" for name in ATTRIBUTES), *(BROKEN / f"{name}.py" for name in BREAKS)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
