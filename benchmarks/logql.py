"""Ask a real engine of LogQL the queries of the user's document, and let Grafana's grammar read every query that we write.

    PYTHONPATH=. python benchmarks/logql.py [--tools DIR]

qryn (npm) answers as Loki does, and keeps its data in chdb (PyPI), a ClickHouse in a process; it is not Loki itself. Both and the
grammar (`@grafana/lezer-logql`) are installed in a folder of their own, about 1 GB, which `--tools` keeps for the next time.

A run with a failing worker trains on this machine and is sent with `?job=smolcluster`. To be met: no query has an error in the
grammar, and each of the five selectors finds exactly the lines that a plain filter over the run's logs finds, also after the run
was sent a second time; `count_over_time` counts as many.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ttlaunch.running.metrics.grafana_dashboards import DASHBOARDS, LOKI

SCRIPT = """\
import os, time
rank = int(os.environ["RANK"])
for epoch in range(3):
    print(f"12:00:0{epoch} | worker | INFO | Epoch {epoch} loss {1 / (epoch + 1)}", flush=True)
    print(f"12:00:0{epoch} | worker | DEBUG | Epoch state of rank {rank}", flush=True)
    time.sleep(0.1)
if rank == 1:
    raise ValueError("bucket 7")
time.sleep(5)
"""
GRAMMAR = """\
import {parser} from '@grafana/lezer-logql'
import {readFileSync} from 'fs'
const wrong = JSON.parse(readFileSync(0)).filter(query => {
  let bad = false
  parser.parse(query).iterate({enter: node => { bad ||= node.type.isError }})
  return bad
})
console.log(JSON.stringify(wrong))
"""
Line = tuple[int, str, str, str]
"""Rank, host, level and text of a line."""
QUERIES: dict[str, Callable[[Line], bool]] = {
    '{job="smolcluster-worker"}': lambda _: True,
    '{job="smolcluster-server"}': lambda _: False,
    '{host="worker-rank0-localhost"}': lambda line: line[0] == 0,
    '{level="ERROR"}': lambda line: line[2] == "ERROR",
    '{level="INFO"} |= "Epoch"': lambda line: line[2] == "INFO" and "Epoch" in line[3],
}
COUNT = 'count_over_time({job="smolcluster-worker"}[10m])'
_VARIABLES = {"$job": "ttlaunch", "$host": ".+", "$level": ".+", "$text": ""}
_PATIENCE_S = 90.0
_INSTALLED = "installed"
"""A file in the folder of tools that is made when all of them are there."""


def main() -> int:
    """Print a line for each query; status 1 if one is wrong, 77 if a tool cannot be had."""
    parser = argparse.ArgumentParser(description="Ask a real engine of LogQL.")
    parser.add_argument("--tools", type=Path, help="the folder in which the tools are installed, and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as name:
        folder = Path(name)
        tools = (options.tools or folder / "tools").absolute()
        problem = _install(tools)
        if problem:
            print(f"skipped: {problem}")
            return 77
        is_read = _read_by_grammar(tools)
        run = _fail_a_run(folder)
        with _engine(tools, folder) as url:
            is_met = _ask_all(url, run)
    return 0 if is_read and is_met else 1


def _install(tools: Path) -> str | None:
    """Install what is missing; return why that is not possible."""
    if not (shutil.which("npm") and shutil.which("node")):
        return "node and npm are not installed"
    tools.mkdir(parents=True, exist_ok=True)
    if (tools / _INSTALLED).exists():
        return None
    npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tools)]
    commands = [
        [*npm, "qryn@3.2.39"],
        [*npm, "@grafana/lezer-logql"],
        [sys.executable, "-m", "venv", str(tools / "chdb")],
        [str(tools / "chdb/bin/pip"), "install", "-q", "chdb==4.4.0"],
    ]
    for argv in commands:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"`{' '.join(argv)}` ended with {done.returncode}: {done.stderr.strip()[-200:]}"
    (tools / _INSTALLED).touch()
    return None


def _read_by_grammar(tools: Path) -> bool:
    queries = [
        q for panels in DASHBOARDS.values() for one in panels if one.source == LOKI for q in one.queries.values()
    ]
    for name, value in _VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    queries += [*QUERIES, COUNT, '{level="INFO"} | run="a" | rank="1"']
    (tools / "grammar.mjs").write_text(GRAMMAR)
    asked = json.dumps([*queries, "{level=}"])
    done = subprocess.run(["node", "grammar.mjs"], cwd=tools, input=asked, capture_output=True, text=True, check=True)
    wrong = json.loads(done.stdout)
    is_met = wrong == ["{level=}"]  # a query that is wrong on purpose: the grammar looks
    print(f"grammar: {len(queries)} queries, wrong: {[one for one in wrong if one != '{level=}']}: {_verdict(is_met)}")
    return is_met


def _fail_a_run(folder: Path) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "ttlaunch", "run", "-n", "2", "train.py"]
    subprocess.run(argv, cwd=folder, env=_environment(folder), capture_output=True, check=False)
    (run,) = (folder / "runs").glob("2*")
    return run


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(Path(__file__).parents[1])}


def _printed(run: Path) -> Iterator[Line]:
    """Every line of the run's logs, with its level by the rule of the documentation, and the line about the failure."""
    for path in sorted((run / "logs").glob("rank-*.std*")):
        rank = int(re.findall(r"rank-(\d+)", path.name)[0])
        for text in path.read_text().splitlines():
            own = re.search(r"\| (INFO|DEBUG) \|", text)
            level = own[1] if own else "ERROR" if path.suffix == ".stderr" else "INFO"
            yield rank, f"worker-rank{rank}-localhost", level, text
    failure = "error[R002]: rank 1 (rank, localhost) raised ValueError; `ValueError: bucket 7`"
    yield 1, "worker-rank1-localhost", "ERROR", failure


def _ask_all(url: str, run: Path) -> bool:
    lines, verdicts = list(_printed(run)), []
    for time_sent in ("first", "second"):
        argv = [sys.executable, "-m", "ttlaunch", "logs", str(run), "--to", f"loki={url}?job=smolcluster"]
        done = subprocess.run(argv, env=_environment(run.parent), capture_output=True, text=True, check=False)
        print(f"{time_sent} time: {(done.stdout + done.stderr).strip()}")
        _wait(lambda: len(_query(url, '{job="smolcluster-worker"}')) >= len(lines))
        if time_sent == "first":
            counted = sum(max(int(float(value)) for _, value in one) for one in _series(url, COUNT))
            verdicts.append(counted == len(lines))
            print(f"{COUNT} counts {counted}: {_verdict(verdicts[-1])}")
    for query, is_wanted in QUERIES.items():
        expected = sorted(line[3] for line in lines if is_wanted(line))
        found = {*_query(url, query)}  # qryn keeps what comes twice, Loki does not
        verdicts.append(expected == sorted(text for _, text in found))
        print(f"{query:34} {len(found):3} of {len(expected):3} lines: {_verdict(verdicts[-1])}")
    return all(verdicts)


def _query(url: str, query: str) -> list[tuple[str, str]]:
    return [value for one in _series(url, query) for value in one]


def _series(url: str, query: str) -> list[list[tuple[str, str]]]:
    now = time.time_ns()
    asked = {"query": query, "start": now - 3600 * 10**9, "end": now + 3600 * 10**9, "limit": 5000, "step": "30s"}
    address = f"{url}/loki/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310 - our own server
        return [[(value[0], value[1]) for value in one["values"]] for one in json.load(answer)["data"]["result"]]


@contextmanager
def _engine(tools: Path, folder: Path) -> Iterator[str]:
    """Start chdb's bridge and qryn, and yield the address."""
    database, port = _free_port(), _free_port()
    names = {"CLICKHOUSE_SERVER": "127.0.0.1", "CLICKHOUSE_PORT": str(database), "CLICKHOUSE_DB": "qryn"}
    variables = {**os.environ, **names, "CLICKHOUSE_AUTH": "default:", "PORT": str(port), "HOST": "127.0.0.1"}
    bridge = [str(tools / "chdb/bin/python"), str(Path(__file__).with_name("logql_bridge.py")), str(database)]
    with ExitStack() as stack:
        stack.enter_context(_started([*bridge, str(folder / "data")], variables))
        _wait(lambda: _answers(f"http://127.0.0.1:{database}/ping"))
        stack.enter_context(_started(["node", str(tools / "node_modules/qryn/qryn_node.js")], variables))
        _wait(lambda: _answers(f"http://127.0.0.1:{port}/ready"))
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _started(argv: list[str], variables: dict[str, str]) -> Iterator[None]:
    with subprocess.Popen(argv, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own server
            return True
    except OSError:
        return False


def _wait(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not is_so():
        if time.monotonic() > until:
            raise SystemExit("the engine did not answer in time")
        time.sleep(0.5)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _verdict(is_met: bool) -> str:  # noqa: FBT001 - one word for it
    return "met" if is_met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
