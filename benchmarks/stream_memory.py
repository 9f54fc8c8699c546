"""Measure the memory of everything that reads a run while its ranks report and print far more than fits in memory.

A run's folder gets a million steps and ten million lines at once, as after a break of a connection, with telemetry. Each
reader gets a process of its own, whose largest resident size is printed beside the limit, with its processor time; the exit status is 1 if one is larger.

    python benchmarks/stream_memory.py [--steps 1000000] [--lines 10000000] [--limit 150] [--only READER]...
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from ttlaunch import contract

LIMIT_MB = 150
_LINES_TOGETHER = 2_000
_STEPS_TOGETHER = 500
_RANKS = 2


def write_run(folder: Path, *, steps: int, lines: int) -> None:
    """Write the folder of a run of two ranks, with its steps and lines shared between them."""
    for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
        (folder / name).mkdir(parents=True)
    rows = [{"rank": rank, "host": "box", "slot": rank, "role": "worker"} for rank in range(_RANKS)]
    plan = {"recipe": None, "program": ["train"], "layout": None, "ranks": rows, "environment": {}, "config": {}}
    (folder / contract.PLAN_FILE).write_text(json.dumps(plan))
    for rank in range(_RANKS):
        _write_lines(folder / contract.progress_file(rank), _progress(steps // _RANKS))
        _write_lines(folder / contract.traffic_file(rank), _telemetry(steps // _RANKS, peer=1 - rank))
        _write_output(folder, rank, lines // _RANKS)


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    with path.open("w") as file:
        file.writelines(lines)


def _progress(steps: int) -> Iterator[str]:
    yield '{"kind": "ready", "time": 1000.0}\n'
    for step in range(1, steps + 1):
        yield f'{{"kind": "step", "time": {1000 + step / 1000}, "step": {step}, "loss": 2.5, "tokens": 64, "grad_norm": 0.5}}\n'


def _telemetry(steps: int, *, peer: int) -> Iterator[str]:
    for first in range(1, steps + 1, _STEPS_TOGETHER):
        last = min(steps, first + _STEPS_TOGETHER - 1)
        times = {str(step): 100 + step % 50 for step in range(first, last + 1)}
        sent = [["all_reduce", 0, "backward", peer, [[first, last, 1, 1, 4096]]]]
        waited = [["all_reduce", "backward", times]]
        spent = [[phase, times] for phase in ("step", "forward", "backward", "update")]
        line = {"format": contract.TRAFFIC_FORMAT, "last": last, "facts": {}, "sent": sent}
        yield json.dumps(line | {"waited": waited, "spent": spent}) + "\n"


def _write_output(folder: Path, rank: int, lines: int) -> None:
    numbers = iter(range(lines))
    with (
        (folder / contract.stdout_file(rank)).open("w") as output,
        (folder / contract.times_file(rank)).open("w") as times,
    ):
        while some := list(islice(numbers, _LINES_TOGETHER)):
            output.writelines(f"sample {number}\n" for number in some)
            times.write(f"{1000 + some[-1] / 1e5} 1 {output.tell()}\n")
    (folder / contract.stderr_file(rank)).touch()


def supervise(path: Path) -> None:
    """Do what the supervisor does with records, output and telemetry."""
    from ttlaunch.running.logs.merge import MergedWriter
    from ttlaunch.running.metrics.event_log import write_event_log
    from ttlaunch.running.metrics.traffic import settle
    from ttlaunch.running.runs.facts import read_facts
    from ttlaunch.running.runs.run_folder import RunFolder
    from ttlaunch.running.watch import Watch

    watch = Watch(read_facts(path), RunFolder(path.name, path))
    with MergedWriter(path, watch) as merged:
        merged.poll()
        watch.read_all()
        merged.finish()
    plan = json.loads((path / contract.PLAN_FILE).read_text())
    assert settle(path, plan, watch.ranks, is_done=True, runs_recipe=True) is not None
    assert write_event_log(path) is not None


def view(path: Path) -> None:
    """Show a run from its beginning, as `run` and `attach` do when their output goes to a file."""
    from ttlaunch.cli.live import PlainView
    from ttlaunch.running.readers.follow import FollowedRun
    from ttlaunch.running.runs.facts import read_facts
    from ttlaunch.running.runs.run_folder import RunFolder

    shown = PlainView(began=0.0, reports_ready=False)
    followed = FollowedRun(RunFolder(path.name, path), read_facts(path), shown, only=range(_RANKS))
    followed.poll()
    followed.finish(None)


def command(*words: str) -> Callable[[Path], None]:
    """Return what runs a command of ttlaunch on the run."""

    def run(path: Path) -> None:
        from ttlaunch.__main__ import main

        sys.argv = ["ttlaunch", words[0], path.name, *words[1:]]
        main()

    return run


READERS: dict[str, Callable[[Path], None]] = {
    "supervisor": supervise,
    "view": view,
    "logs": command("logs"),
    "logs --format json": command("logs", "--format", "json"),
    "report": command("report"),
    "metrics": command("metrics"),
    "diff": command("diff", "run"),
}


def measure(reader: str, path: Path) -> tuple[float, float]:
    """Return the largest resident size in megabytes, and the seconds of processor time, of a reader in its own process."""
    with Path(os.devnull).open("wb") as nothing:
        words = [sys.executable, __file__, "--reader", reader, str(path)]
        process = subprocess.Popen(words, cwd=path.parents[1], stdout=nothing)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{reader} ended with {process.returncode}")
    return used.ru_maxrss / 1000, used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--limit", type=int, default=LIMIT_MB, help="in megabytes")
    parser.add_argument("--only", action="append", choices=READERS)
    parser.add_argument("--reader", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.reader:
        READERS[given.reader[0]](Path(given.reader[1]))
        return 0
    is_over = False
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "runs" / "run"
        write_run(path, steps=given.steps, lines=given.lines)
        print(f"{given.steps:,} steps, {given.lines:,} lines; limit {given.limit} MB")
        for reader in given.only or READERS:
            size_mb, seconds = measure(reader, path)
            is_over |= size_mb > given.limit
            print(
                f"{reader:20} {size_mb:6.0f} MB of {given.limit} {seconds:8.1f} s of processor time{'  TOO MUCH' * (size_mb > given.limit)}",
                flush=True,
            )
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
