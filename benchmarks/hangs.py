"""Let ranks get stuck in every way, and compare who is named, where and when, with who was stuck.

    python benchmarks/hangs.py [--engine agents] [--count 18] [--seed 0] [--timeout 3] [--folder .benchmarks] [--minutes 10] [--fresh]
    python benchmarks/hangs.py --false-alarms [--engine agents] [--count 7] [--factor 10]

The rank that gets stuck and the step in which it does are drawn from the seed; every hang is made once, then again. A hang is
right if the rank, its line and the code are, and the run was found to hang, with status 6, within the timeout and 5 s after the
rank got stuck, or after the last of the others came to wait for it.
Without py-spy a rank that is stopped or has not begun to start cannot say its line, and none is asked for.

With `--engine agents`, which has no MPI, the ranks talk over gRPC.

`--false-alarms` starts runs that are slow but get on (`calm_runs.py`), `factor` times faster than real ones and with a timeout
that is as much shorter; none may be ended.

Each run is a line in `FOLDER/hangs.jsonl` or `FOLDER/calm.jsonl`; the same command goes on after the last one, as long as what
judges hangs was not changed.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ttlaunch.flight_recorder import read_recorder

sys.path.insert(0, str(Path(__file__).parent))
from calm_runs import Calm, calm_runs
from stuck_runs import STUCK, ended, engine_options, failure, started

WITHIN_S = 5.0
LONGEST_S = 180.0
STEPS, LATEST_STEP = 40, 12
JUDGES = (
    "running/hang/hangs",
    "running/hang/waits",
    "running/hang/verdict",
    "running/hang/mismatch",
    "running/hang/stacks",
    "agent/stack_dump",
    "flight_recorder",
)
_NEEDS_PY_SPY = {"stopped", "compiled_code", "before_mpi"}


class Hang(NamedTuple):
    """A way to get stuck.

    Attributes:
        ranks: Of the run.
        code: That is to be told.
        guilty: How far the ranks that may be named come after the one that was ordered.
        program: The recipe.
    """

    ranks: int
    code: str
    guilty: tuple[int, ...] = (0,)
    program: str = "peers"


HANGS = {
    "circle_of_2": Hang(3, "R015", (0, 1)),
    "circle_of_3": Hang(4, "R015", (0, 1, 2)),
    "order_of_collectives": Hang(3, "R016"),
    "wrong_tag": Hang(2, "R016"),
    "wrong_source": Hang(3, "R016"),
    "wrong_shape": Hang(3, "R016"),
    "left_out": Hang(3, "R016"),
    "gradients_not_sent": Hang(3, "R016", program="tiers"),
    "sleeps": Hang(3, "R014"),
    "data_loader": Hang(3, "R014"),
    "stopped": Hang(3, "R013"),
    "locked_file": Hang(3, "R014"),
    "endless_loop": Hang(3, "R014"),
    "compiled_code": Hang(3, "R014"),
    "first_step": Hang(3, "R014"),
    "import": Hang(3, "R014"),
    "before_mpi": Hang(3, "R014"),
    "service_role": Hang(3, "R014", program="tiers"),
}


def main() -> int:
    """Start, look, count."""
    parser = argparse.ArgumentParser(description="Let ranks get stuck in every way, and see who is named.")
    parser.add_argument("--count", type=int, default=None, help="runs, those of earlier calls included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default=None, help="which starts the ranks; the first with MPI unless said")
    parser.add_argument("--timeout", type=float, default=3.0, help="for `--hang-timeout`, seconds")
    parser.add_argument("--only", choices=HANGS, help="one way only")
    parser.add_argument("--false-alarms", action="store_true", help="runs that get on")
    parser.add_argument("--factor", type=float, default=10.0, help="how many times faster than real ones those are")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / ".benchmarks")
    parser.add_argument("--minutes", type=float, default=None, help="after which no other run is started")
    parser.add_argument("--fresh", action="store_true", help="forget what was kept")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    name = "calm" if options.false_alarms else "hangs"
    kept = options.folder / f"{name}.jsonl"
    if options.fresh:
        kept.unlink(missing_ok=True)
    about = {"code": _code_hash(), "seed": options.seed, "timeout": options.timeout, "factor": options.factor}
    about["engine"] = options.engine
    if options.false_alarms:
        jobs = _calm_jobs(options.seed, options.factor, options.engine)
        count = options.count or len(calm_runs(random.Random(0), 1.0))  # noqa: S311 - nothing secret
    else:
        jobs, count = _hang_jobs(options), options.count or len(HANGS)
    found = _go_on(kept, about, jobs, count=1 if options.only else count, minutes=options.minutes)
    return _show_calm(found) if options.false_alarms else _show_hangs(found)


Job = tuple[str, Callable[[Path], dict[str, Any]]]
"""Its name, and what runs it in a folder."""


def _go_on(
    kept: Path, about: dict[str, Any], jobs: Iterator[Job], *, count: int, minutes: float | None
) -> list[dict[str, Any]]:
    """All results, those of earlier calls first."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    found = [entry for line in lines if (entry := json.loads(line)).items() >= about.items()]
    if found:
        print(f"going on after {len(found)} runs")
    began = time.monotonic()
    for number, (name, job) in enumerate(jobs):
        if number >= count or (minutes and time.monotonic() - began > 60 * minutes):
            break
        if number < len(found):
            continue
        with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
            entry = {**about, "name": name, **job(Path(folder) / "run")}
        found.append(entry)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{number + 1:4} {name:36} {entry['verdict']}", flush=True)
    return found


def _hang_jobs(options: argparse.Namespace) -> Iterator[Job]:
    limit = ["--hang-timeout", str(options.timeout), *engine_options(options.engine)]
    for turn in range(10**6):
        chance = random.Random(f"{options.seed} {turn}")  # noqa: S311 - nothing secret
        for name, hang in HANGS.items():
            rank, step = chance.randrange(hang.ranks), chance.randint(2, LATEST_STEP)
            if hang.program == "tiers":
                rank = 2 if name == "service_role" else rank % 2
            step = 1 if name == "first_step" else step
            if options.only in {None, name}:
                yield name, _hang_job(name, rank, step, limit)


def _hang_job(name: str, rank: int, step: int, limit: list[str]) -> Callable[[Path], dict[str, Any]]:
    def run(folder: Path) -> dict[str, Any]:
        hang = HANGS[name]
        order = {"hang": name, "rank": rank, "step": step, "steps": STEPS, "pace": []}
        words = [hang.program, "-n", str(hang.ranks), *limit]
        process = started(words, order, folder, before_mpi=name == "before_mpi")
        end = ended(process, within_s=LONGEST_S)
        began = _stood_still(folder)
        ended_s = round(time.time() - began, 2) if began else None
        told = failure(end.stdout)
        place = told.get("place") or ""
        known = {"rank": rank, "step": step, "named": told.get("rank"), "told": told.get("code")}
        known |= {
            "line": _marked(place),
            "seconds": _after(told.get("time"), began),
            "ended": ended_s,
            "status": end.returncode,
        }
        known |= {"said": told.get("cause") or end.stderr[-300:]}
        return {**known, "verdict": _judged(name, known, float(limit[1]))}

    return run


def _stood_still(folder: Path) -> float | None:
    """When the rank got stuck, or the last of the others came to wait for it; seconds since the epoch."""
    if not (folder / "begun").exists():
        return None
    boxes = [read_recorder(path.read_bytes()) for path in folder.glob("runs/*/blackbox/*.box")]
    waits = [box.seconds(box.waiting.begun) for box in boxes if box is not None and box.waiting]
    return max([float((folder / "begun").read_text()), *waits])


def _after(told: float | None, began: float | None) -> float | None:
    return None if told is None or began is None else round(told - began, 2)


def _judged(name: str, known: dict[str, Any], timeout_s: float) -> str:
    """`right`, or what is not."""
    hang = HANGS[name]
    wrong = []
    if known["named"] not in {(known["rank"] + step) % hang.ranks for step in hang.guilty}:
        wrong.append(f"rank {known['named']} for {known['rank']}")
    if known["told"] != hang.code:
        wrong.append(f"{known['told']} for {hang.code}")
    has_line = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if known["line"] != name and (has_line or name not in _NEEDS_PY_SPY):
        wrong.append(f"line of {known['line']}")
    if known["status"] != 6:
        wrong.append(f"status {known['status']}")
    if known["seconds"] is None or known["seconds"] > timeout_s + WITHIN_S:
        wrong.append(f"after {known['seconds']} s")
    return "right" if not wrong else f"WRONG: {', '.join(wrong)}; {known['said']}"


def _marked(place: str) -> str | None:
    """The name that stands in a comment at `file:line` of the recipe."""
    file, _, line = place.rpartition(":")
    lines = Path(STUCK, *Path(file).parts[-2:]).read_text().splitlines() if file.endswith(".py") and _ours(file) else []
    words = lines[int(line) - 1].partition("# stuck: ")[2] if 0 < int(line or 0) <= len(lines) else ""
    return words or None


def _ours(file: str) -> bool:
    return Path(STUCK, *Path(file).parts[-2:]).exists()


def _calm_jobs(seed: int, factor: float, engine: str | None) -> Iterator[Job]:
    for turn in range(10**6):
        chance = random.Random(f"calm {seed} {turn}")  # noqa: S311 - nothing secret
        for one in calm_runs(chance, factor):
            yield one.name, _calm_job(one, engine)


def _calm_job(one: Calm, engine: str | None) -> Callable[[Path], dict[str, Any]]:
    def run(folder: Path) -> dict[str, Any]:
        began = time.monotonic()
        limit = engine_options(engine, is_recipe=not one.words[0].endswith(".py"))
        limit += [] if one.timeout_s is None else ["--hang-timeout", str(one.timeout_s)]
        at = one.words.index("--") if "--" in one.words else len(one.words)
        process = started([*one.words[:at], *limit, *one.words[at:]], one.order, folder)
        if one.sleep_s:
            _put_to_sleep(process, folder, one.sleep_s)
        end = ended(process, within_s=LONGEST_S)
        said = failure(end.stdout).get("cause")
        verdict = "left alone" if end.returncode == 0 else f"WRONG: status {end.returncode}; {said or end.stderr}"
        return {"seconds": round(time.monotonic() - began, 1), "limit": one.timeout_s, "verdict": verdict}

    return run


def _put_to_sleep(process: subprocess.Popen[str], folder: Path, seconds: float) -> None:
    """Stop whoever watches the run, once its ranks take steps."""
    while process.poll() is None and not list(folder.glob("runs/*/records/rank-0.ledger.jsonl")):
        time.sleep(0.05)
    told = [json.loads(path.read_text()) for path in folder.glob("runs/*/launcher.json")]
    watcher = int(told[0]["pid"]) if told else process.pid
    os.kill(watcher, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(watcher, signal.SIGCONT)


def _show_hangs(found: list[dict[str, Any]]) -> int:
    print(f"\n{'hang':24}{'runs':>6}{'right':>7}{'told':>9}{'ended':>9}")
    for name in HANGS:
        runs = [entry for entry in found if entry["name"] == name]
        if runs:
            right = sum(entry["verdict"] == "right" for entry in runs)
            told, end = (max(entry[what] or LONGEST_S for entry in runs) for what in ("seconds", "ended"))
            print(f"{name:24}{len(runs):6}{right:7}{told:7.1f} s{end:7.1f} s")
    right = sum(entry["verdict"] == "right" for entry in found)
    print(f"right in rank, line, code and time: {right} of {len(found)}: {'met' if right == len(found) else 'MISSED'}")
    return 0 if right == len(found) else 1


def _show_calm(found: list[dict[str, Any]]) -> int:
    alarms = [entry for entry in found if entry["verdict"] != "left alone"]
    print(f"false alarms: {len(alarms)} in {len(found)} runs: {'MISSED' if alarms else 'met'}")
    return 1 if alarms else 0


def _code_hash() -> str:
    package, digest = Path(__file__).parents[1] / "ttlaunch", hashlib.sha256()
    for path in [*(package / f"{name}.py" for name in JUDGES), *sorted(STUCK.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
