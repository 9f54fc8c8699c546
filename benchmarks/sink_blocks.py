"""What sending to Loki costs a step: within one run, the sink is stopped and let go on in turns, many times, so that noise cannot pass for a cost.

    PYTHONPATH=. python benchmarks/sink_blocks.py [--parts 4] [--part-s 140] [--calm] [--sinks loki loki-slow loki-busy loki-down]

Two workers of `data_parallel` train on this machine, one torch thread a rank, steps of about 100 ms, and print five lines a step
(`benchmarks/printing/trainer.py`). Their sink is a process of its own. It is stopped (SIGSTOP) and goes on (SIGCONT) in blocks of 4 s in
the order ABBA, then BAAB: a drift of the machine hits both alike. What was printed while it was stopped it sends afterwards, so a block
with it has the lines of two. The server, in this process, takes everything at once (`loki`), answers after 2 s (`loki-slow`), says 429, then 500, and takes what is
sent for the third time (`loki-busy`), or is not there (`loki-down`).

Each four blocks give one ratio, with the sink ÷ without, of: the mean step; the processor time of a rank's step; that of all processes of
the run but the sink, the launcher's among them. Printed is the median with its interval: of so many ratios, two in their order
between which the median lies with 95 %, whatever their distribution. To be met: the upper end at most 1.02. Where the interval
reaches over the limit, nothing is shown, and more parts make it narrower. Beside it: the share of one core that the sink itself takes, in
blocks in which it goes on, which a step can lose at most where ranks keep all cores busy (at most 0.02); for how long a step's writes block the
rank, and the rank waits for a core, with the sink and without.

No line may be lost or doubled: after each part, the lines that the server has (two with the same labels, time and text are one) are
compared with those in the run's folder, before and after the run was sent once more by `ttlaunch logs --to`.

With `--calm`, the ranks are those of a script that computes for 5 ms of 100 and sleeps, so that a machine that does other things does not
stand still: what the sink takes, for how long writes block, and that no line is lost is measured there; the ratios of a training are not.

The same command goes on after the last part, see `kept_trials.py`.
"""

import argparse
import http.server
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kept_trials import MISSING, Row, add_options, exit_status, make_missing, open_folder
from trainings import step_ends

from ttlaunch import contract
from ttlaunch.running.metrics.export import SinkRecord, SinkState, read_sinks, wait_for_sinks
from ttlaunch.running.metrics.log_entries import FAILED

ROOT = Path(__file__).parents[1]
MODES = ("loki", "loki-slow", "loki-busy", "loki-down")
LIMIT = 1.02
CONFIDENCE = 0.95
RATIOS = {"step": "time of a step", "rank": "processor time of a rank's step", "run": "the same of all but the sink"}
RANKS = 2
_SLOW_S = 2.0
_WARM_STEPS, _SETTLE_S = 25, 0.1
_PATIENCE_S = 120.0
_LINES = 5
_SETTINGS = {
    "training_config.steps": 1_000_000,
    "training_config.validation_interval": 1_000_000,
    "training_config.batch_size": 48,
    "checkpoint_config.interval": "null",
    "multihost_config.num_workers": RANKS,
}
ORDER = (False, True, True, False, True, False, False, True)
"""Whether the sink goes on, block by block."""

Found = dict[str, float]


class Step(NamedTuple):
    """What a rank has noted of a step, in seconds."""

    step: int
    begin: float
    end: float
    spent_s: float
    waited_s: float
    writes: int
    writing_s: float
    longest_write_s: float


class Block(NamedTuple):
    """The times between which the sink was stopped or not, and the processor time of others in them."""

    begin: float
    end: float
    run_s: float
    sink_s: float


class Server(http.server.BaseHTTPRequestHandler):
    """Stands for Loki; the name before its path says how it behaves. What it takes is read when the run is over."""

    taken: list[bytes]
    busy_answers = itertools.cycle([429, 500, 204])

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind = self.path.split("/")[1]
        if kind == "loki-slow":
            time.sleep(_SLOW_S)
        status = next(self.busy_answers) if kind == "loki-busy" else 204
        if status == 204:  # what Loki says of lines that it has
            self.taken.append(body)
        self.send_response(status)
        self.end_headers()


def main() -> int:
    """Print a table for each way of the server; status 1 if a limit is missed or a line is lost or doubled."""
    parser = argparse.ArgumentParser(description="Measure what sending to Loki costs a step.")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--part-s", type=float, default=140.0)
    parser.add_argument("--block-s", type=float, default=4.0)
    parser.add_argument("--calm", action="store_true", help="a script that mostly sleeps in place of a training")
    parser.add_argument("--sinks", nargs="+", default=MODES, choices=MODES)
    add_options(parser, folder=".benchmarks/sink_blocks")
    given = parser.parse_args()
    folder = open_folder(given)
    wanted = {
        f"{mode}, {'calm, ' if given.calm else ''}part {part}": partial(
            _part, mode, part_s=given.part_s, block_s=given.block_s, is_calm=given.calm
        )
        for part in range(given.parts)
        for mode in given.sinks
    }
    kept = make_missing(wanted, folder, for_s=given.for_s)
    if not kept:
        return MISSING
    missed = sum(_report(mode, [row for row in kept if row["mode"] == mode]) for mode in given.sinks)
    print(f"{missed} missed (at most 0); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return exit_status(are_met=not missed, made=len(kept), wanted=len(wanted))


def _report(mode: str, rows: list[Row]) -> int:
    """Print what the parts of a mode have measured; return how many limits are missed."""
    fours: list[dict[str, Found]] = [one for row in rows for one in row["fours"]]
    if not fours:
        return 0
    without, beside = ([one[name] for one in fours] for name in ("without", "with"))
    step_ms = 1e3 * statistics.median(one["step"] for one in without)
    print(
        f"\n{mode}: steps of {step_ms:.0f} ms, {len(fours)} times four blocks, {sum(row['lines'] for row in rows)} lines"
    )
    missed = 0
    for name, text in RATIOS.items():
        ratios = [one["with"][name] / one["without"][name] for one in fours]
        low, high = median_interval(ratios)
        verdict = "met" if high <= LIMIT else "MISSED" if low > LIMIT else "not shown"
        missed += verdict == "MISSED"
        print(f"  {text:34} {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})   at most {LIMIT}: {verdict}")
    share = statistics.mean(one["sink"] / one["step"] for one in beside)
    missed += share > LIMIT - 1
    verdict = "met" if share <= LIMIT - 1 else "MISSED"
    print(f"  {'the sink takes of one core':34} {share:.4f}   at most {LIMIT - 1:.2f}: {verdict}")
    for name, text in (("writing", "writes block a rank, µs a step"), ("waited", "a rank waits for a core, µs a step")):
        means = [1e6 * statistics.median(one[name] for one in some) for some in (beside, without)]
        low, high = median_interval([1e6 * (one["with"][name] - one["without"][name]) for one in fours])
        print(f"  {text:34} {means[0]:.0f} with, {means[1]:.0f} without; difference {low:.0f} to {high:.0f}")
    longest = [1e3 * statistics.median(one["longest"] for one in some) for some in (beside, without)]
    print(f"  {'longest write of a block, ms':34} {longest[0]:.2f} with, {longest[1]:.2f} without (medians)")
    wrong = {name: sum(row[name] for row in rows) for name in ("lost", "doubled", "lost_again", "doubled_again")}
    print(f"  lines lost, doubled: {wrong['lost']}, {wrong['doubled']}; sent once more: ", end="")
    print(f"{wrong['lost_again']}, {wrong['doubled_again']}   at most 0: {'MISSED' if any(wrong.values()) else 'met'}")
    return missed + any(wrong.values())


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return two of the values between which the median of what they are drawn from lies with 95 %; infinite ones if they are too few."""
    ordered, count = sorted(values), len(values)
    below, outside = 0.0, -1
    for at in range(count):
        below += math.comb(count, at) / 2**count
        if below > (1 - CONFIDENCE) / 2:
            break
        outside = at
    return (ordered[outside], ordered[count - 1 - outside]) if outside >= 0 else (-math.inf, math.inf)


def _part(mode: str, *, part_s: float, block_s: float, is_calm: bool) -> Row:
    """Train for a while with a sink that is stopped and goes on; the folder is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as scratch, _server() as port:
        folder = Path(scratch)
        recipe = _program(folder, is_calm=is_calm)
        place = f"loki=http://127.0.0.1:{1 if mode == 'loki-down' else port}/{mode}"
        with _training(folder, recipe, place, is_calm=is_calm) as (run, sink):
            blocks = _blocks(run, sink, part_s=part_s, block_s=block_s)
        (record,) = wait_for_sinks(run, patience_s=_PATIENCE_S)
        end = SinkState.FAILED if mode == "loki-down" else SinkState.DONE
        if record.state is not end:
            raise SystemExit(f"the sink of {run} has ended otherwise: {record}")
        lines = _expected(run)
        lost, doubled = (0, 0) if mode == "loki-down" else _compare(lines, Server.taken)
        _send_again(run, folder, port)
        lost_again, doubled_again = _compare(lines, Server.taken)
        steps = [[Step(*json.loads(line)) for line in _times(recipe, rank)] for rank in range(RANKS)]
    fours = [_four(blocks[at : at + 4], ORDER[at % 8 : at % 8 + 4], steps) for at in range(0, len(blocks) - 3, 4)]
    fours = [one for one in fours if one]
    counts = {"lost": lost, "doubled": doubled, "lost_again": lost_again, "doubled_again": doubled_again}
    return {"mode": mode, "lines": sum(lines.values()), **counts, "fours": fours}


def _times(recipe: Path, rank: int) -> list[str]:
    """Return the whole lines that a rank has written of its steps."""
    text = (recipe / f"times-{rank}.jsonl").read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def _program(folder: Path, *, is_calm: bool) -> Path:
    """Make the folder of what is run: a copy of the recipe that prints, or the script."""
    program = folder / "printing"
    if is_calm:
        program.mkdir()
        shutil.copy(ROOT / "benchmarks" / "printing" / "steps.py", program)
    else:
        shutil.copytree(ROOT / "recipes" / "data_parallel", program, ignore=shutil.ignore_patterns("__pycache__"))
        (program / "trainer.py").rename(program / "undisturbed.py")
        shutil.copy(ROOT / "benchmarks" / "printing" / "trainer.py", program)
    (program / "lines.txt").write_text(str(_LINES), encoding="utf-8")
    return program


@contextmanager
def _server() -> Iterator[int]:
    Server.taken = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@contextmanager
def _training(folder: Path, program: Path, place: str, *, is_calm: bool) -> Iterator[tuple[Path, SinkRecord]]:
    """Train with a sink; yields the run's folder and the sink once the ranks are warm, and ends the run."""
    changes = [word for key, value in _SETTINGS.items() for word in ("--set", f"{key}={value}")]
    what = ["-n", str(RANKS), "--sink", place, str(program / "steps.py")]
    command = [
        sys.executable,
        "-m",
        "ttlaunch",
        "run",
        *(what if is_calm else [str(program), "--sink", place, *changes]),
    ]
    with (folder / "printed").open("w") as out:
        training = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    try:
        while not (begun := [run for run in folder.glob("runs/2*") if _steps_of(run, program) > _WARM_STEPS]):
            if training.poll() is not None:
                raise SystemExit((folder / "printed").read_text(encoding="utf-8"))
            time.sleep(0.5)
        (run,) = begun
        (record,) = read_sinks(run)
        yield run, record
    finally:
        training.send_signal(signal.SIGINT)
        training.wait(_PATIENCE_S)


def _steps_of(run: Path, program: Path) -> int:
    """Return how many steps rank 0 has made."""
    times = program / "times-0.jsonl"
    return max(len(step_ends(run)), len(_times(program, 0)) if times.exists() else 0)


def _blocks(run: Path, sink: SinkRecord, *, part_s: float, block_s: float) -> list[Block]:
    """Stop the sink and let it go on, block by block."""
    others = [pid for pid in _processes(run.name) if pid != sink.pid]
    until, blocks = time.monotonic() + part_s, []
    try:
        while len(blocks) % 4 or time.monotonic() < until:
            goes_on = ORDER[len(blocks) % len(ORDER)]
            os.kill(sink.pid, signal.SIGCONT if goes_on else signal.SIGSTOP)
            time.sleep(_SETTLE_S)
            begin, before = time.time(), (_spent_s(others), _spent_s([sink.pid]))
            time.sleep(block_s)
            end, after = time.time(), (_spent_s(others), _spent_s([sink.pid]))
            blocks.append(Block(begin, end, after[0] - before[0], after[1] - before[1]))
    finally:
        os.kill(sink.pid, signal.SIGCONT)
    return blocks


def _processes(run_id: str) -> list[int]:
    """Return the processes of a run: those with its id in their environment, or that were started with its folder's name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            named = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            if run_id.encode() in named:
                found.append(int(folder.name))
    return found


def _spent_s(pids: list[int]) -> float:
    """Return the processor time of some processes, of all their threads that are there."""
    total = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                total += int(file.read_text(encoding="ascii").split()[0])
    return total / 1e9


def _four(blocks: list[Block], order: tuple[bool, ...], steps: list[list[Step]]) -> dict[str, Found]:
    """Return the means of the blocks with the sink and of those without; nothing if no step lies in one, on a machine that does other things."""
    found = [_of_block(block, steps) for block in blocks]
    if not all(found):
        return {}
    return {
        name: {key: statistics.mean(one[key] for one in some) for key in found[0]}
        for name, some in (
            ("with", [one for one, goes_on in zip(found, order, strict=True) if goes_on]),
            ("without", [one for one, goes_on in zip(found, order, strict=True) if not goes_on]),
        )
    }


def _of_block(block: Block, steps: list[list[Step]]) -> Found:
    """Return the means over the steps of all ranks that lie in a block, in seconds."""
    inside = [one for rank in steps for one in rank if block.begin <= one.begin and one.end <= block.end]
    if not inside:
        return {}
    step_s = statistics.mean(one.end - one.begin for one in inside)
    count = (block.end - block.begin) / step_s
    return {
        "step": step_s,
        "rank": statistics.mean(one.spent_s for one in inside),
        "run": block.run_s / count,
        "sink": block.sink_s / count,
        "waited": statistics.mean(one.waited_s for one in inside),
        "writing": statistics.mean(one.writing_s for one in inside),
        "longest": max(one.longest_write_s for one in inside),
    }


def _expected(run: Path) -> Counter[tuple[str, str]]:
    """Count the lines that a run has, by rank and text: what ranks have printed, and what they have reported."""
    lines: Counter[tuple[str, str]] = Counter()
    for rank in range(RANKS):
        for name in (contract.stdout_file, contract.stderr_file):
            lines.update((str(rank), text) for text in (run / name(rank)).read_text(encoding="utf-8").splitlines())
        for record in map(contract.read_record, (run / contract.progress_file(rank)).read_bytes().splitlines()):
            if record and record["kind"] == contract.KIND_STEP:
                lines[str(rank), f"step {record['step']}"] += 1
    return lines


def _compare(lines: Counter[tuple[str, str]], bodies: list[bytes]) -> tuple[int, int]:
    """Return how many lines a server lacks, and how many it has too often, where it keeps one of two with equal labels, time and text."""
    entries: set[tuple[str, str, str]] = set()
    for stream in (stream for body in bodies for stream in json.loads(body)["streams"]):
        for time_ns, text, details in stream["values"]:
            known = text.partition(":")[0] if _is_report(details, text) else text
            if details["stream"] != FAILED and not (details["stream"] == "reported" and not _is_report(details, text)):
                entries.add((details["rank"], known, time_ns + stream["stream"]["level"]))
    there = Counter((rank, text) for rank, text, _ in entries)
    return (lines - there).total(), (there - lines).total()


def _is_report(details: dict[str, Any], text: str) -> bool:
    return details["stream"] == "reported" and text.startswith("step ")


def _send_again(run: Path, folder: Path, port: int) -> None:
    command = [sys.executable, "-m", "ttlaunch", "logs", str(run), "--to", f"loki=http://127.0.0.1:{port}/loki"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
