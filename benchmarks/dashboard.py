"""Measure how soon the page shows a folder of many runs, one of them with far more steps and output than fits in memory.

The folder gets 500 runs, of which one has 100,000 steps of 4 ranks and 1 GB of output, and the page is opened as a reader opens it: the
list, then that run's metrics and logs, once without anything in the cache and once with it. Each time and the server's largest
resident size are printed beside their limits; the exit status is 1 if one is larger. Takes about a minute and 1.3 GB of disk.

    python benchmarks/dashboard.py [--runs 500] [--steps 100000] [--log-mb 1000]

With `--pages 3`, it measures instead what open pages cost a run that is active. While two ranks of `data_parallel` train, a server is offered,
and in turns, a few seconds each, nobody reads it or so many readers follow the run: each asks for its facts and first charts, and
reads its stream of events, as a tab of a browser does; the browser's own work is not counted, it may be on another machine. To be
met: a step is at most 1 % longer, as the median over turns with their neighbours; and it is in the streams at most 1 s after it was done. At the end, rank 1 is killed: the page
has to name it at most 2 s later.

    PYTHONPATH=. python benchmarks/dashboard.py --pages 3 [--turns 17] [--turn-s 6]
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainings import step_ends

from ttlaunch import contract
from ttlaunch.running.logs.merge import MERGED_FILE

PAINT_S, INDEX_S, MEMORY_MB = 1.0, 20.0, 200
RANKS = 4
VIEWS = ("runs", "metrics", "logs")
_STEPS_TOGETHER = 500
_WARM_STEPS, _SETTLE_S = 50, 1.0
_BLOCK = 64 << 10
STEP_LIMIT, SHOWN_S, NAMED_S = 1.01, 1.0, 2.0
BIG = "2026-01-02T00-00-00-b166"


def write_runs(folder: Path, *, runs: int, steps: int, log_mb: int) -> None:
    """Write a folder of runs that are done; the newest is the big one."""
    for number in range(runs - 1):
        at = f"2026-01-01T{number // 60 % 24:02}-{number % 60:02}-00"
        write_run(folder / f"{at}-{number:04x}", steps=100, ranks=2, log_mb=0)
    write_run(folder / BIG, steps=steps, ranks=RANKS, log_mb=log_mb)


def write_run(folder: Path, *, steps: int, ranks: int, log_mb: int) -> None:
    """Write the folder of a run that is done."""
    for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
        (folder / name).mkdir(parents=True)
    rows = [{"rank": rank, "host": "box", "slot": rank, "role": "worker", "local_rank": rank} for rank in range(ranks)]
    recipe = {"name": "data_parallel", "folder": "/nowhere"}
    plan = {"recipe": recipe, "layout": None, "hash": "abc", "config": {}, "topology": "local", "ranks": rows}
    (folder / contract.PLAN_FILE).write_text(json.dumps(plan))
    for rank in range(ranks):
        with (folder / contract.progress_file(rank)).open("w") as file:
            file.writelines(_progress(steps, rank))
        with (folder / contract.traffic_file(rank)).open("w") as file:
            file.writelines(_telemetry(steps, peer=(rank + 1) % ranks))
        (folder / contract.exit_file(rank)).write_text(json.dumps({"rank": rank, "time": 2000.0, "status": 0}))
    _write_output(folder, ranks, log_mb << 20)
    report = {"status": "done", "exit_status": 0, "steps": steps, "last_validation": None, "ranks": []}
    (folder / contract.REPORT_FILE).write_text(json.dumps(report))


def _progress(steps: int, rank: int) -> Iterator[str]:
    yield f'{{"kind": "ready", "time": 1000.0, "total_steps": {steps}}}\n'
    for step in range(1, steps + 1):
        loss = 2.5 + 1 / step + (step * 7919 + rank) % 100 / 1000
        yield f'{{"kind": "step", "time": {1000 + step / 1000}, "step": {step}, "loss": {loss}, "tokens": 64, "grad_norm": 0.5}}\n'


def _telemetry(steps: int, *, peer: int) -> Iterator[str]:
    for first in range(1, steps + 1, _STEPS_TOGETHER):
        last = min(steps, first + _STEPS_TOGETHER - 1)
        times = {str(step): 100 + step % 50 for step in range(first, last + 1)}
        sent = [["all_reduce", 0, "backward", peer, [[first, last, 1, 1, 4096]]]]
        spent = [[phase, times] for phase in ("step", "forward", "backward", "update")]
        line = {"format": contract.TRAFFIC_FORMAT, "last": last, "facts": {}, "sent": sent}
        yield json.dumps(line | {"waited": [["all_reduce", "backward", times]], "spent": spent}) + "\n"


def _write_output(folder: Path, ranks: int, size: int) -> None:
    line = (
        b"INFO a line of the output of a rank, as long as such lines usually are, and with nothing of interest in it\n"
    )
    block = line * (_BLOCK // len(line))
    offsets = [0] * ranks
    with (folder / MERGED_FILE).open("w") as merged:
        for number in range(size // len(block)):
            rank = number % ranks
            with (folder / contract.stdout_file(rank)).open("ab") as file:
                file.write(block)
            row = {"rank": rank, "stream": "stdout", "time": 1000 + number / 100, "offset": offsets[rank]}
            merged.write(json.dumps(row | {"length": len(block)}) + "\n")
            offsets[rank] += len(block)


class Page:
    """`ttlaunch dashboard` of a folder, with a cache of its own."""

    def __init__(self, runs: Path, cache: Path) -> None:
        words = [sys.executable, "-m", "ttlaunch", "dashboard", "--runs-dir", str(runs), "--port", "0"]
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env={**os.environ, "XDG_CACHE_HOME": str(cache)}
        )
        assert self._process.stdout is not None
        link = next(line for line in self._process.stdout if line.startswith("open ")).split()[1]
        self._url, _, self._key = link.partition("#key=")
        self.ask("api/about")

    def ask(self, path: str) -> Any:
        """Get what the page asks for."""
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(self._url).port, timeout=300)
        with closing(connection):
            connection.request("GET", f"/{path}", headers={"authorization": f"Bearer {self._key}"})
            answer = connection.getresponse()
            assert answer.status == HTTPStatus.OK
            return json.load(answer)

    def follow(self, run: str, until: threading.Event, delays: list[float]) -> None:
        """Read a run as a tab that shows its metrics does; add how long after each step it came."""
        for path in ("", "/numbers", *(f"/series?name=train/{name}&points=1500" for name in ("loss", "grad_norm"))):
            self.ask(f"api/runs/{run}{path}")
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(self._url).port, timeout=60)
        with closing(connection):
            connection.request("GET", f"/api/runs/{run}/events", headers={"authorization": f"Bearer {self._key}"})
            answer = connection.getresponse()
            while not until.is_set():
                line = answer.readline()
                if line.startswith(b'data: {"points"'):
                    now = time.time()
                    rows = json.loads(line.removeprefix(b"data: "))["points"]
                    delays += [now - when for name, _, _, when, _ in rows if name == "train/loss"]

    def paint(self, view: str) -> float:
        """Return how long what a view asks for takes: all of it one after the other, which a browser does at the same time."""
        began = time.perf_counter()
        run = f"api/runs/{BIG}"
        if view == "runs":
            assert self.ask("api/runs")["runs"]
        elif view == "metrics":
            self.ask(run)
            names = self.ask(f"{run}/numbers")["names"]
            for name in [one for one in ("train/loss", "train/grad_norm", "train/tokens_per_s") if one in names]:
                assert self.ask(f"{run}/series?name={name}&points=1500")["ranks"]
        elif view == "logs":
            self.ask(run)
            assert self.ask(f"{run}/logs?fold=1&lines=300")["lines"]
        return time.perf_counter() - began

    def end(self) -> float:
        """End the server, and return its largest resident size in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        return peak / 1024


def measure(runs: Path, cache: Path) -> list[tuple[str, float, float, str]]:
    """Open the page without and with a cache; rows of name, figure, limit and unit."""
    page = Page(runs, cache)
    found = [(f"{view}, nothing in the cache", page.paint(view), PAINT_S, "s") for view in VIEWS]
    began = time.perf_counter()
    while page.ask("api/runs")["pending"]:
        time.sleep(0.05)  # as the page does
    found.append(("all rows of the list", time.perf_counter() - began, INDEX_S, "s"))
    while page.ask(f"api/runs/{BIG}/numbers")["is_partial"]:
        time.sleep(0.2)
    found.append(("the whole run was read, all charts are whole", time.perf_counter() - began, INDEX_S, "s"))
    assert page.ask(f"api/runs/{BIG}/series?name=train/loss")["ranks"]["0"]["points"] > 1000
    while not next(cache.rglob("measured.json"), None):
        page.ask(f"api/runs/{BIG}/numbers")
        time.sleep(0.2)
    found.append(("server, largest resident size", page.end(), MEMORY_MB, "MB"))
    page = Page(runs, cache)
    found += [(f"{view}, from the cache", page.paint(view), PAINT_S, "s") for view in VIEWS]
    found.append(("server with a cache, largest resident size", page.end(), MEMORY_MB, "MB"))
    used = json.loads(next(cache.rglob("measured.json")).read_text())["used"]
    found.append(("reader of the whole run, largest resident size", used["peak_bytes"] / 2**20, MEMORY_MB, "MB"))
    return found


def measure_pages(scratch: Path, *, pages: int, turns: int, turn_s: float) -> list[tuple[str, float, float, str]]:
    """Train, and read the run in every second turn; rows as those of `measure`."""
    runs = scratch / "runs"
    words = ["-m", "ttlaunch", "run", "data_parallel", "--format", "json"]
    words += ["--set", "training_config.steps=1000000", "--set", "checkpoint_config.interval=null"]
    words += ["--set", "training_config.validation_interval=1000000"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=scratch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as training:
        try:
            while not (begun := [run for run in runs.glob("2*") if len(step_ends(run)) > _WARM_STEPS]):
                if training.poll() is not None:
                    raise SystemExit("the training has ended before anybody looked at it")
                time.sleep(0.5)
            (run,) = begun
            page = Page(runs, scratch / "cache")
            delays: list[float] = []
            spans = [_turn(page, run.name, pages * (number % 2), turn_s, delays) for number in range(turns)]
            named_s = _kill(run, page)
            page.end()
        finally:
            training.send_signal(signal.SIGTERM)
    ends = step_ends(run)
    steps = [statistics.median(b - a for a, b in pairwise(ends) if begin <= a and b <= end) for begin, end in spans]
    # Each turn with readers between two without: what else the machine does changes slowly and hits both.
    ratios = [steps[at] / statistics.mean((steps[at - 1], steps[at + 1])) for at in range(1, turns - 1, 2)]
    print(f"a step of {1e3 * statistics.median(steps[::2]):.1f} ms; ratios {min(ratios):.3f} to {max(ratios):.3f}")
    worst = sorted(delays)[int(0.99 * len(delays))]
    return [
        (f"step with {pages} open pages / without", statistics.median(ratios), STEP_LIMIT, ""),
        ("from a step to its event, 99 of 100", worst, SHOWN_S, "s"),
        ("from the death of a rank to its name", named_s, NAMED_S, "s"),
    ]


def _kill(run: Path, page: Page) -> float:
    """Kill rank 1, and return how long it took until the page said so, asked as often as its stream is."""
    records = map(contract.read_record, (run / contract.progress_file(1)).read_bytes().splitlines())
    pid = next(int(record["pid"]) for record in records if record and record["kind"] == contract.KIND_STARTED)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while "rank 1 (worker" not in "".join(one["text"] for one in page.ask(f"api/runs/{run.name}")["diagnostics"][:1]):
        time.sleep(0.1)
    return time.monotonic() - began


def _turn(page: Page, run: str, readers: int, turn_s: float, delays: list[float]) -> tuple[float, float]:
    """Have some readers follow a run for a while; the times between which they all did."""
    until = threading.Event()
    threads = [threading.Thread(target=page.follow, args=(run, until, delays)) for _ in range(readers)]
    for thread in threads:
        thread.start()
    time.sleep(_SETTLE_S)
    begin = time.time()
    time.sleep(turn_s)
    end = time.time()
    until.set()
    for thread in threads:
        thread.join()
    return begin, end


def main() -> int:
    """Write the runs, open the page, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--log-mb", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="keep the runs here, and use those that are there")
    parser.add_argument("--pages", type=int, help="measure what so many open pages cost a run")
    parser.add_argument("--turns", type=int, default=17)
    parser.add_argument("--turn-s", type=float, default=6.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = given.folder or Path(scratch) / "runs"
        if given.pages:
            rows = measure_pages(Path(scratch), pages=given.pages, turns=given.turns, turn_s=given.turn_s)
        else:
            if not runs.exists():
                write_runs(runs, runs=given.runs, steps=given.steps, log_mb=given.log_mb)
            rows = measure(runs, Path(scratch) / "cache")
    for name, figure, limit, unit in rows:
        print(f"{name:<48} {figure:8.3f} {unit:<2}  limit {limit:g} {unit}{'' if figure <= limit else '  TOO MUCH'}")
    return int(any(figure > limit for _, figure, limit, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
