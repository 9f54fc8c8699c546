"""Break runs in every way in which one can end, and look whether anything of them is left, here and on every host.

    python benchmarks/chaos.py [--count 200] [--seed 0] [--start default] [--results FILE] [--only WORDS] [--minutes 10] [--lease 15]

Faults: Ctrl-C once and twice, SIGTERM; SIGKILL of the view, the supervisor, mpirun, a shim, an agent; a host that loses
power, and one that is cut off. Times ranks that simply compute, that ignore SIGTERM, and that have a child in a session of
its own, also one that has forked twice. Times this machine and, as root, three hosts in namespaces with their own sshd.
Ranks meet once over MPI and compute outside it then, where mpirun is known to leave them behind. A closed terminal, Ctrl-Z and
a link that flaps are tried too: a run has to come to its end in spite of them.

Right after the fault every environment on this machine is read, which those of the hosts are part of, until no process
carries the run's id, and its folders in shared memory and those of MPI are gone on every host. That has to be so within the
lease and five seconds.

With `--start agents` no mpirun takes part, and in its place `start_ranks` is killed, over hosts that of one host; with `--start warm`, ranks are forks of it.

Each run is a line in FILE; the same command goes on after the last one, whatever code it was made with. `--only` takes the
cells whose names contain all its words, such as `--only "hosts shim"`. The table at the end counts all of FILE.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from chaos_scene import Run, break_run, mend, start_run

from tests.cluster.hosts import Cluster
from ttlaunch import contract

FAULTS = (
    "Ctrl-C",
    "Ctrl-C twice",
    "SIGTERM",
    "SIGKILL of the view",
    "SIGKILL of the supervisor",
    "SIGKILL of mpirun",
    "SIGKILL of a shim",
    "closed terminal",
    "Ctrl-Z",
)
OVER_HOSTS = ("SIGKILL of an agent", "power cut of a host", "cut-off host", "flapping link")
KINDS = ("plain", "stubborn", "setsid", "forked")
STARTS = {"default": (), "agents": ("--engine", "agents"), "warm": ("--engine", "agents", "--warm")}
"""The options of `run` for each way to start ranks. The program names MPI, so by default mpirun starts it."""
HARMLESS = ("closed terminal", "Ctrl-Z", "flapping link")
HEALTHY_S = 10.0
"""How long ranks have to do that nothing is to hurt."""
_LONG_S = 300.0
_VIEW_S = 40.0
_LOOK_S = 0.05
_AFTERWARDS_S = 20.0


class Cell(NamedTuple):
    """What is broken where."""

    place: str
    start: str
    fault: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.place}: {self.fault}, {self.kind} ranks" + ("" if self.start == "default" else f", {self.start}")


def main() -> int:
    """Break, look, count."""
    parser = argparse.ArgumentParser(description="Break runs in every way and look what is left of them.")
    parser.add_argument("--count", type=int, default=200, help="runs, those of earlier calls included")
    parser.add_argument("--seed", type=int, default=0)
    results = Path(__file__).parents[1] / ".benchmarks/chaos.jsonl"
    parser.add_argument("--results", type=Path, default=results, help="a line for each run is added")
    parser.add_argument("--start", choices=STARTS, default="default", help="how ranks are started")
    parser.add_argument("--only", default="", help="words that the name of a cell has to contain")
    parser.add_argument("--minutes", type=float, default=None, help="after which no other run is begun")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--lease", type=float, default=contract.LEASE_S, help="seconds, of runs over hosts")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    began, done = time.monotonic(), Counter(_cell_of(entry) for entry in _read(options.results))
    has_hosts = os.geteuid() == 0
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(hosts=options.hosts)) if has_hosts else None
        for number, cell in enumerate(_cells(options.start, options.seed, options.only, has_hosts=has_hosts), start=1):
            if number > options.count or (options.minutes and time.monotonic() - began > 60 * options.minutes):
                break
            if done[cell] > 0:
                done[cell] -= 1
                continue
            entry = _try(cell, cluster if cell.place == "hosts" else None, lease_s=options.lease)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            print(f"{number:4} {_told(cell, entry)}", flush=True)
    return _show(_read(options.results))


def _read(results: Path) -> list[dict[str, Any]]:
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def _cell_of(entry: dict[str, Any]) -> Cell:
    return Cell(entry["place"], entry["start"], entry["fault"], entry["kind"])


def _cells(start: str, seed: int, only: str, *, has_hosts: bool) -> Iterator[Cell]:
    """Every cell once in an order drawn at random, again and again."""
    cells = [Cell("here", start, fault, kind) for fault in FAULTS for kind in KINDS]
    if has_hosts:
        cells += [Cell("hosts", start, fault, kind) for fault in (*FAULTS, *OVER_HOSTS) for kind in KINDS]
    cells = [cell for cell in cells if all(word in cell.name for word in only.split())]
    if not cells:
        raise SystemExit(f"no cell has `{only}` in its name")
    for turn in range(10**6):
        chance = random.Random(f"{seed} {turn}")  # noqa: S311 - nothing secret
        chance.shuffle(cells)
        yield from cells


def _try(cell: Cell, cluster: Cluster | None, *, lease_s: float) -> dict[str, Any]:
    """Start a run, break it, and watch it go."""
    seconds = HEALTHY_S if cell.fault in HARMLESS else _LONG_S
    limit_s = lease_s + contract.AFTER_LEASE_S
    with tempfile.TemporaryDirectory(prefix="ttl-chaos-") as folder:
        run = start_run(
            Path(folder), cell.kind, options=STARTS[cell.start], seconds=seconds, cluster=cluster, lease_s=lease_s
        )
        try:
            break_run(run, cell.fault)
            clean_s, left = _wait_until_clean(run, limit_s + (seconds if cell.fault in HARMLESS else 0.0))
            mend(run, cell.fault)
            status, outcome = _status(run), run.outcome()
        finally:
            run.remove()
    return {**cell._asdict(), "clean_s": clean_s, "left": left, "status": status, "run": outcome, "lease_s": lease_s}


def _wait_until_clean(run: Run, limit_s: float) -> tuple[float | None, list[str]]:
    """Seconds until nothing was left, None if something stays for good; and what was left when the limit was over."""
    began, late = time.monotonic(), []
    while left := run.left():
        waited_s = time.monotonic() - began
        late = left if waited_s > limit_s and not late else late
        if waited_s > limit_s + _AFTERWARDS_S:
            return None, late
        time.sleep(_LOOK_S)
    return round(time.monotonic() - began, 2), late


def _status(run: Run) -> int | None:
    """What the command that was typed ended with; None if it does not end."""
    try:
        return run.view.wait(_VIEW_S)
    except subprocess.TimeoutExpired:
        return None


def _told(cell: Cell, entry: dict[str, Any]) -> str:
    after = "never clean" if entry["clean_s"] is None else f"clean after {entry['clean_s']:.1f} s"
    late = f", LEFT {'; '.join(entry['left'])}" if entry["left"] else ""
    return f"{cell.name:56} status {entry['status']}, {entry['run']}: {after}{late}"


def _show(found: list[dict[str, Any]]) -> int:
    """The table of all results: how many runs, what was left of how many, and the slowest."""
    rows = defaultdict(list)
    for entry in found:
        rows[entry["place"], entry["start"], entry["fault"]].append(entry)
    print(
        f"\n{'where':7}{'started by':12}{'fault':28}{'runs':>6}{'orphans':>9}{'folders':>9}{'median':>9}{'slowest':>9}"
    )
    for place, start, fault in sorted(rows):
        _show_row(place, start, fault, entries=rows[place, start, fault])
    _show_row("all", "", "", entries=found)
    endless = [entry for entry in found if entry["status"] is None]
    healthy = [entry for entry in found if entry["fault"] in HARMLESS]
    hurt = [entry for entry in healthy if entry["run"] != "done"]
    wrong = [entry for entry in found if entry["run"] == "done" and entry not in healthy]
    print(f"commands that did not end: {len(endless)}; runs that were broken and said to be done: {len(wrong)}")
    print(f"runs that were hurt by what must not hurt: {len(hurt)} of {len(healthy)}")
    return 1 if endless or wrong or hurt or any(entry["left"] for entry in found) else 0


def _show_row(place: str, start: str, fault: str, *, entries: list[dict[str, Any]]) -> None:
    orphans = sum(any(thing.startswith("process ") for thing in entry["left"]) for entry in entries)
    folders = sum(any(not thing.startswith("process ") for thing in entry["left"]) for entry in entries)
    times = [entry["clean_s"] for entry in entries if entry["clean_s"] is not None]
    middle, slowest = (f"{statistics.median(times):.1f} s", f"{max(times):.1f} s") if times else ("", "")
    print(f"{place:7}{start:12}{fault:28}{len(entries):6}{orphans:9}{folders:9}{middle:>9}{slowest:>9}")


if __name__ == "__main__":
    sys.exit(main())
