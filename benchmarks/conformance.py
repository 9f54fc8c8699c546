"""Put every way to start ranks through the same cases: who runs, with which variables, what logs hold, how it ends, what is left.

    PYTHONPATH=. python benchmarks/conformance.py [--engine agents] [--minutes 5] [--results FILE] [--fresh]

The cases are in `conformance_cases.py`. Engines: Open MPI 5 beside this interpreter, Open MPI 4 in /usr/bin, MPICH from its wheel, and `agents`;
all but Open MPI 4 also over hosts in namespaces, by SSH and as steps of a Slurm job (both need root). Recipes exchange their messages over gRPC
where ranks have no MPI, and end everywhere with the bits of one process. What this machine does not have is left out and named. Each case is a
line in FILE; the same command makes those that are missing. Status 1 if a case is wrong.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from chaos_scene import seen_from_here
from conformance_cases import CASES, SMALL, Case

from tests.cluster.hosts import CODE, Cluster
from tests.cluster.needs import what_hosts_lack
from tests.cluster.slurm import slurm_cluster, why_no_slurm
from tests.conftest import ROOT, interpreter_with_mpich, interpreter_without_mpirun
from ttlaunch import contract
from ttlaunch.agent.run_processes import kill_run_processes, run_processes

UP_S, END_S, GONE_S = 60.0, 90.0, 30.0
VICTIM = 1
_OF_DEBIAN = next(Path("/usr/lib").glob("*-linux-gnu/libmpi.so.40"), None)


@dataclass
class Place:
    """A way to start ranks.

    Attributes:
        engine: For `--engine`.
        options: Further options of `run`, for a number of ranks.
        python: That runs ttlaunch.
        environment: Of the shell.
        cluster: Its hosts; None: this machine.
        has_mpi: Whether its ranks have MPI.
    """

    engine: str
    options: Callable[[int], list[str]] = lambda _: []
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=lambda: {**os.environ, "PYTHONPATH": str(ROOT)})
    cluster: Cluster | None = None
    has_mpi: bool = True

    def popen(self, command: list[str], folder: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        streams = {name: (folder / name).open("wb") for name in ("stdout", "stderr")}
        options: dict[str, Any] = {**streams, "stdin": subprocess.DEVNULL, "start_new_session": True, "cwd": folder}
        if self.cluster is None:
            return subprocess.Popen(command, env={**self.environment, **environment}, **options)
        return self.cluster.popen(
            "launcher", command, env={**self.cluster.environment("launcher"), **environment}, **options
        )


@contextmanager
def open_mpi_5() -> Iterator[Place]:
    yield Place("openmpi")


@contextmanager
def open_mpi_4() -> Iterator[Place]:
    if not Path("/usr/bin/orted").exists() or _OF_DEBIAN is None:
        raise LookupError("no Open MPI 4 in /usr/bin")
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        python, environment = interpreter_without_mpirun(Path(folder))
        yield Place(
            "openmpi",
            python=str(python),
            environment={**environment, "PATH": "/usr/bin:/bin", "MPI4PY_LIBMPI": str(_OF_DEBIAN)},
        )


@contextmanager
def mpich() -> Iterator[Place]:
    with _interpreter("hydra") as python:
        yield Place("hydra", python=python)


@contextmanager
def agents() -> Iterator[Place]:
    yield Place("agents", has_mpi=False)


@contextmanager
def over_hosts(engine: str) -> Iterator[Place]:
    if lack := what_hosts_lack():
        raise LookupError(lack)
    with (
        _interpreter(engine) as python,
        Cluster(hosts=2, share=_needed(python)) as cluster,
        tempfile.NamedTemporaryFile("w", suffix=".txt") as hosts,
    ):
        hosts.write(cluster.hostfile(slots=4))
        hosts.flush()
        options = ["--hostfile", hosts.name]
        yield Place(engine, lambda _: options, python, cluster=cluster, has_mpi=engine != "agents")


@contextmanager
def in_slurm(engine: str) -> Iterator[Place]:
    if lack := what_hosts_lack() or why_no_slurm():
        raise LookupError(lack)
    with _interpreter(engine) as python, slurm_cluster(hosts=2, share=_needed(python)) as slurm:
        nodes = lambda ranks: ["--on", "slurm:debug", "--nodes", str(min(2, ranks))]  # noqa: E731
        yield Place(engine, nodes, python, cluster=slurm.cluster, has_mpi=engine != "agents")


@contextmanager
def _interpreter(engine: str) -> Iterator[str]:
    """The interpreter of an environment whose mpi4py loads what the engine starts."""
    if engine != "hydra":
        yield sys.executable
        return
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        yield str(interpreter_with_mpich(Path(folder)))


def _needed(python: str) -> tuple[str, ...]:
    """What hosts see of this machine: the code, and the environment of the ranks."""
    return tuple(dict.fromkeys((*CODE, str(Path(python).parents[1]))))


PLACES = {
    "openmpi-5": open_mpi_5,
    "openmpi-4": open_mpi_4,
    "mpich": mpich,
    "agents": agents,
    "openmpi-ssh": partial(over_hosts, "openmpi"),
    "mpich-ssh": partial(over_hosts, "hydra"),
    "agents-ssh": partial(over_hosts, "agents"),
    "openmpi-slurm": partial(in_slurm, "openmpi"),
    "mpich-slurm": partial(in_slurm, "hydra"),
    "agents-slurm": partial(in_slurm, "agents"),
}


def main() -> int:
    """Run what is missing, and print a table."""
    parser = argparse.ArgumentParser(description="Put every way to start ranks through the same cases.")
    parser.add_argument("--engine", choices=PLACES, action="append", help="only this one; all unless said")
    parser.add_argument("--case", action="append", help="only cases with this in their name")
    parser.add_argument("--minutes", type=float, default=5.0, help="after which no other case is begun")
    parser.add_argument("--results", type=Path, default=ROOT / ".benchmarks/conformance.jsonl")
    parser.add_argument("--fresh", action="store_true", help="forget what was kept")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    began, absent = time.monotonic(), []
    for name in options.engine or PLACES:
        kept = _kept(options.results)
        missing = [case for case in CASES if (name, case.name) not in kept]
        missing = [case for case in missing if not options.case or any(part in case.name for part in options.case)]
        if not missing or time.monotonic() - began > 60 * options.minutes:
            continue
        try:
            with PLACES[name]() as place:
                for case in [case for case in missing if _applies(case, place)]:
                    if time.monotonic() - began > 60 * options.minutes:
                        break
                    _try(name, case, place, options.results)
        except LookupError as error:
            absent.append(f"{name} ({error})")
    return _show(_kept(options.results), absent)


def _kept(results: Path) -> dict[tuple[str, str], str]:
    """What is wrong with each case that was made, by engine and case."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {(entry["engine"], entry["case"]): entry["wrong"] for entry in map(json.loads, lines)}


def _applies(case: Case, place: Place) -> bool:
    if place.cluster is not None and (case.here_only or (case.act == "engine" and not place.has_mpi)):
        return False
    return place.has_mpi if case.python else not (case.without_mpi and place.has_mpi)


def _try(name: str, case: Case, place: Place, results: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        wrong = run_case(case, place, Path(folder))
    with results.open("a") as file:
        file.write(json.dumps({"engine": name, "case": case.name, "wrong": wrong}) + "\n")
    print(f"{name:14} {case.name:54} {'right' if not wrong else f'WRONG: {wrong}'}", flush=True)


def run_case(case: Case, place: Place, folder: Path) -> str:
    """Make a case in an empty folder; returns what is wrong, empty if nothing is."""
    program = "work.py" if case.python else "work.sh"
    text = case.script if case.python else f"#!/bin/sh\n{case.script}\n"
    (folder / program).write_text(text)
    (folder / program).chmod(0o755)
    command = [
        place.python,
        "-m",
        "ttlaunch",
        "run",
        "--engine",
        place.engine,
        "-n",
        str(case.ranks),
        *place.options(case.ranks),
    ]
    if case.recipe:
        command += [case.recipe, *_small(has_mpi=place.has_mpi), *case.options]
    else:
        command += [*case.options, "--", *_program(case, place, program)]
    view = place.popen(command, folder, dict(case.environment))
    run: Path | None = None
    try:
        if case.act:
            run = _until(lambda: _is_up(folder, case.ranks), UP_S)
            if run is None:
                return f"its ranks do not come up: {(folder / 'stderr').read_text()[-300:]}"
            _act(case.act, run, view, place)
        status = view.wait(END_S)
        run = run or next(folder.glob("runs/[!.]*"), None)
        return _wrong(case, status, run, place, folder)
    except subprocess.TimeoutExpired:
        return "it does not end"
    finally:
        view.kill()
        view.wait()
        if run is not None:
            kill_run_processes(run.name)


def _program(case: Case, place: Place, program: str) -> list[str]:
    if case.python:
        return [place.python, program]
    return [f"./{program}"]


def _small(*, has_mpi: bool) -> list[str]:
    transport = [] if has_mpi else ["multihost_config.socket_type=grpc"]
    return [word for setting in (*SMALL, *transport) for word in ("--set", setting)]


@cache
def _digest_of_one_process(recipe: str) -> str:
    """The SHA-256 of the parameters after the recipe's steps in one process on this machine."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        words = ["run", recipe, "--ranks", "1", "--format", "json", *_small(has_mpi=False)]
        command = [sys.executable, "-m", "ttlaunch", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout)["parameters_sha256"])


def _is_up(folder: Path, ranks: int) -> Path | None:
    logs = [path.read_bytes() for path in folder.glob("runs/*/logs/rank-*.stdout")]
    runs = [path for path in folder.glob("runs/[!.]*") if path.is_dir()]
    records = list(folder.glob("runs/*/records/rank-*.progress.jsonl"))
    is_up = len(logs) == len(records) == ranks and all(b"up" in log for log in logs)
    return runs[0] if is_up and all(path.stat().st_size for path in records) else None


def _act(act: str, run: Path, view: "subprocess.Popen[bytes]", place: Place) -> None:
    started = json.loads((run / contract.progress_file(VICTIM)).read_text().splitlines()[0])
    if act.startswith("SIG"):
        view.send_signal(signal.Signals[act])
        return
    if act in {"rank", "shim"}:
        pid = int(started["pid" if act == "rank" else "shim_pid"])
        if place.cluster is not None:
            pid = seen_from_here(pid, place.cluster.pids(started["host"]))
    elif act == "view":
        pid = view.pid
    elif act == "supervisor":
        pid = int(json.loads((run / contract.LAUNCHER_FILE).read_text())["pid"])
    else:
        events = map(json.loads, (run / contract.EVENTS_FILE).read_text().splitlines())
        pid = next(event[contract.ENGINE_PROCESS] for event in events if event["event"] == "start")
    os.kill(pid, signal.SIGKILL)


def _wrong(case: Case, status: int, run: Path | None, place: Place, folder: Path) -> str:
    said = (folder / "stderr").read_text(errors="replace")[-300:]
    if run is None:
        return f"there is no run: {said}"
    is_killed = case.status == -1
    if status != case.status if not is_killed else status == 0:
        return f"status {status}: {said}"
    if not is_killed:
        failure = json.loads((run / contract.REPORT_FILE).read_text())["failure"]
        found = failure and (failure["code"], failure["rank"])
        if found != (case.failure and case.failure[:2]) or (failure and case.failure[2] not in failure["cause"]):
            return f"{found} {failure and failure['cause']}"
    if case.recipe:
        found = json.loads((run / contract.REPORT_FILE).read_text())["parameters_sha256"]
        if found != (expected := _digest_of_one_process(case.recipe)):
            return f"its parameters have the SHA-256 {found} and those of one process {expected}"
    for rank in range(case.ranks) if case.out is not None else ():
        path = run / contract.stdout_file(rank)
        out = path.read_bytes() if path.exists() else b""  # a host sends no empty file
        expected = case.out.replace(b"{rank}", b"%d" % rank).replace(b"{size}", b"%d" % case.ranks)
        if out != expected:
            return f"rank {rank} printed {out[-60:]!r}"
    left = _until(lambda: not _left(run, place), GONE_S)
    return "" if left else f"left: {_left(run, place)}"


def _left(run: Path, place: Place) -> list[str]:
    found = [f"process {pid}" for pid in run_processes(run.name)]
    supervisor = json.loads((run / contract.LAUNCHER_FILE).read_text())["pid"]
    found += [str(path) for path in Path("/dev/shm").glob(f"ttl-{supervisor}-*")]  # noqa: S108 - looked at, not used
    for host in place.cluster.hosts if place.cluster else ():
        found += [f"{host} {path.name}" for path in place.cluster.path(host, "/dev/shm").iterdir()]  # noqa: S108 - likewise
    return found


def _until(condition: Callable[[], Any], within_s: float) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value or None


def _show(kept: dict[tuple[str, str], str], absent: list[str]) -> int:
    engines = [name for name in PLACES if any(engine == name for engine, _ in kept)]
    print(f"\n{'case':54}" + "".join(f"{name:>14}" for name in engines))
    for case in CASES:
        marks = [
            "-" if (name, case.name) not in kept else "WRONG" if kept[name, case.name] else "right" for name in engines
        ]
        print(f"{case.name:54}" + "".join(f"{mark:>14}" for mark in marks))
    right = sum(not wrong for wrong in kept.values())
    print(f"{len(CASES)} cases; right: {right} of {len(kept)} made" + "".join(f"; not here: {name}" for name in absent))
    return 0 if right == len(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
