"""Break a rank in every way, and compare who is named, and as what, with who was broken.

    python benchmarks/attribution.py [--count 120] [--seed 0] [--folder .benchmarks] [--minutes 10] [--fresh] [--beside]

A fault is drawn from: an exception, sys.exit, os._exit, SIGKILL, SIGSEGV, abort in C, out of memory (a limit of the process; and
by the kernel, where we may make a control group), an import that is not there, a mistake in one role only, and a rank killed
under peers that all notice at once; times every rank and role of a program without torch (4 ranks over MPI, or over
sockets) and of a small recipe (2 workers and a server); at a random step. A cell is right if the rank, or one of the
role's, is named with the class of its end.

Each fault is a line in `FOLDER/attribution.jsonl`; the same command goes on after the last one, as long as what attributes was
not changed. `--beside` breaks each fault once under bare `mpirun` and `torchrun` too, and looks which ranks they name.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

BROKEN = Path(__file__).parent / "broken"
LONGEST_S = 60.0
HANGING_S = 20.0
TO_BE_MET = 0.99
RANKS = 4
ROLES = {"worker": (0, 1), "server": (2,)}
LATEST_STEP = 30
GROUP_BYTES = 1_500_000_000
BY_KERNEL = "out of memory, by the kernel"
CLASSES = {
    "raise": "raised",
    "sys.exit": "exited",
    "os._exit": "exited",
    "SIGKILL": "killed",
    "SIGSEGV": "crashed",
    "abort in C": "crashed",
    "out of memory": "out_of_memory",
    BY_KERNEL: "out_of_memory",
    "import error": "import_error",
    "error in one role": "raised",
    "closed peers": "killed",
}
ATTRIBUTES = ("launch/attribution", "launch/causes", "launch/last_words", "launch/name_cause", "agent/rank_records")
_MPIRUN_NAMES = re.compile(r"\[prterun-[^\]]*@\d+,(\d+)\]|process rank (\d+)|invoked on rank (\d+)")
_TORCHRUN_NAMES = re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL)


class Cell(NamedTuple):
    """A fault, and who has it."""

    program: str
    fault: str
    role: str
    rank: int | None

    @property
    def guilty(self) -> set[int]:
        return {self.rank} if self.rank is not None else set(ROLES[self.role])


def main() -> int:
    """Break, look, count."""
    parser = argparse.ArgumentParser(description="Break a rank in every way, and compare who is named.")
    parser.add_argument("--count", type=int, default=120, help="faults, those of earlier calls included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parents[1] / ".benchmarks", help="where results are"
    )
    parser.add_argument("--minutes", type=float, default=None, help="after which no other fault is made")
    parser.add_argument("--fresh", action="store_true", help="forget what was kept")
    parser.add_argument("--beside", action="store_true", help="each fault once under bare mpirun and torchrun")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = options.folder / "attribution.jsonl"
    if options.fresh:
        kept.unlink(missing_ok=True)
    about = {"code": _code_hash(), "seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="attribution-") as scratch, _control_group() as group:
        if options.beside:
            _beside(Path(scratch), group)
            return 0
        found = _go_on(kept, about, options, Path(scratch), group)
    return _show(found, group)


def _go_on(
    kept: Path, about: dict[str, Any], options: argparse.Namespace, scratch: Path, group: Path | None
) -> list[dict[str, Any]]:
    """All results, those of earlier calls first."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    found = [entry for line in lines if (entry := json.loads(line)).items() >= about.items()]
    if found:
        print(f"going on after {len(found)} faults")
    began = time.monotonic()
    for number, (cell, step) in enumerate(_cells(options.seed, group)):
        if number >= options.count or (options.minutes and time.monotonic() - began > 60 * options.minutes):
            break
        if number < len(found):
            continue
        entry = {**about, **_break(cell, step, scratch / str(number), group)}
        found.append(entry)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        shutil.rmtree(scratch / str(number))
        verdict = "right" if _is_right(entry) else f"WRONG: {entry['class']}, {entry['said']}"
        print(f"{number + 1:4} {cell.program:8} {cell.fault:30} {cell.role} {cell.rank}: {verdict}", flush=True)
    return found


def _cells(seed: int, group: Path | None) -> Iterator[tuple[Cell, int]]:
    """Every cell once in an order drawn at random, again and again, with the step it breaks in."""
    faults = [fault for fault in CLASSES if group is not None or fault != BY_KERNEL]
    cells = []
    for fault in faults:
        if fault == "error in one role":
            cells += [Cell("recipe", fault, role, None) for role in ROLES]
            continue
        cells += [Cell("program", fault, "rank", rank) for rank in range(RANKS)]
        if fault not in {"closed peers", BY_KERNEL}:
            cells += [Cell("recipe", fault, role, rank) for role, ranks in ROLES.items() for rank in ranks]
    for turn in range(10**6):
        chance = random.Random(f"{seed} {turn}")  # noqa: S311 - nothing secret
        chance.shuffle(cells)
        yield from ((cell, chance.randint(1, LATEST_STEP)) for cell in cells)


def _break(cell: Cell, step: int, folder: Path, group: Path | None) -> dict[str, Any]:
    """Run the cell's program with its fault under ttlaunch, and take what it says."""
    words = ["run", "--format", "json"]
    words += ["broken", "-n", "3"] if cell.program == "recipe" else ["ring.py", "-n", str(RANKS)]
    words += ["--", "sockets"] if cell.fault == "closed peers" else []
    began = time.monotonic()
    said = _started([sys.executable, "-m", "ttlaunch", *words], cell, step, folder, group, within_s=LONGEST_S)
    seconds = time.monotonic() - began
    try:
        failure = json.loads(said.stdout)["failure"] or {}
    except ValueError:
        failure = {"cause": (said.stderr or said.stdout)[-300:]}
    known = {"named": failure.get("rank"), "class": failure.get("class"), "said": failure.get("cause")}
    return {**cell._asdict(), "step": step, **known, "seconds": round(seconds, 2)}


def _started(
    command: list[str], cell: Cell, step: int, folder: Path, group: Path | None, *, within_s: float
) -> subprocess.CompletedProcess[str]:
    """The end of a command in a folder with the programs and the order to break; status 124 where it does not end."""
    shutil.copytree(BROKEN, folder / "broken", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("faults.py", "ring.py"):
        shutil.copy(BROKEN / name, folder)
    order = {"fault": cell.fault, "role": cell.role, "rank": cell.rank, "step": step}
    (folder / "fault.json").write_text(json.dumps(order))
    procs = group / "cgroup.procs" if group and cell.fault == BY_KERNEL else None
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        preexec_fn=(lambda: procs.write_text("0")) if procs else None,  # noqa: PLW1509 - we have one thread
    )
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        return subprocess.CompletedProcess(command, 124, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextmanager
def _control_group() -> Iterator[Path | None]:
    """A control group with less memory than the machine, of either version; None where we may not make one."""
    name = f"ttlaunch-attribution-{os.getpid()}"
    for top, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(top, name)
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / "cgroup.procs").exists():
                raise FileNotFoundError(group)  # a folder like any other
            (group / limit).write_text(str(GROUP_BYTES))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    yield None


def _is_right(entry: dict[str, Any]) -> bool:
    cell = Cell(*(entry[name] for name in Cell._fields))
    return entry["named"] in cell.guilty and entry["class"] == CLASSES[cell.fault]


def _show(found: list[dict[str, Any]], group: Path | None) -> int:
    print(f"\n{'fault':32}{'faults':>8}{'right':>8}")
    made, right = (
        Counter(entry["fault"] for entry in found),
        Counter(entry["fault"] for entry in found if _is_right(entry)),
    )
    for fault in CLASSES:
        if made[fault]:
            print(f"{fault:32}{made[fault]:8}{right[fault]:8}")
    if group is None:
        print(f"not made: {BY_KERNEL}; we may make no control group")
    share = right.total() / made.total() if made else 0.0
    verdict = "met" if share >= TO_BE_MET else "MISSED"
    print(
        f"right in rank and cause: {right.total()} of {made.total()}, {share:.1%} (to be met: {TO_BE_MET:.0%}): {verdict}"
    )
    return 0 if share >= TO_BE_MET else 1


def _beside(scratch: Path, group: Path | None) -> None:
    """Each fault once, in rank 2 of the program, under others' launchers: which ranks does their output name?"""
    binaries = Path(sys.executable).parent
    launchers = {
        "mpirun": (
            [str(binaries / "mpirun"), "--oversubscribe", "--bind-to", "none", "-n", str(RANKS), sys.executable],
            _MPIRUN_NAMES,
        ),
        "torchrun": ([str(binaries / "torchrun"), "--nproc-per-node", str(RANKS)], _TORCHRUN_NAMES),
    }
    print(f"{'fault, in rank 2':32}" + "".join(f"{name:24}" for name in launchers))
    for fault in CLASSES:
        if fault == "error in one role" or (fault == BY_KERNEL and group is None):
            continue
        told = []
        for name, (command, pattern) in launchers.items():
            words = [*command, "ring.py", *(["sockets"] if fault == "closed peers" else [])]
            cell, folder = Cell("program", fault, "rank", 2), scratch / f"{name} {fault}"
            ended = _started(words, cell, 5, folder, group, within_s=HANGING_S)
            named = {
                int(next(filter(None, match))) for match in map(_groups, pattern.finditer(ended.stdout + ended.stderr))
            }
            told.append(f"{'hangs' if ended.returncode == 124 else 'ends'}, names {sorted(named) or 'none'}")
        print(f"{fault:32}" + "".join(f"{text:24}" for text in told), flush=True)


def _groups(match: re.Match[str]) -> tuple[str | None, ...]:
    return match.groups()


def _code_hash() -> str:
    package, digest = Path(__file__).parents[1] / "ttlaunch", hashlib.sha256()
    for path in [*(package / f"{name}.py" for name in ATTRIBUTES), *sorted(BROKEN.glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
