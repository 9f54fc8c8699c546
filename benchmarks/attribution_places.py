"""Where `attribution.py` breaks ranks: on this machine, or on hosts in namespaces; memory ends there as it does elsewhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from attribution_cells import (
    AGENTS,
    BROKEN,
    BY_KERNEL,
    DEFAULT,
    HANG_TIMEOUT_S,
    HANGS,
    HERE,
    LAYOUT,
    OVER_SOCKETS,
    RANKS,
    RANKS_OF_SCRIPT,
    WARM,
    Cell,
    cut_peer,
)

from tests.cluster.hosts import Cluster

LONGEST_S = 90.0
_START = {DEFAULT: (), AGENTS: ("--engine", "agents"), WARM: ("--engine", "agents", "--warm")}
_PROGRAMS = {
    "program": ("ring.py", "-n", str(RANKS)),
    "recipe": ("broken", "-n", "3"),
    "script": ("ddp.py", "-n", str(RANKS_OF_SCRIPT)),
}
GROUP_BYTES = 1_500_000_000
_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "cgroup2", "rw"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "cgroup", "memory"),
)


class Place(NamedTuple):
    """Where programs are started.

    Attributes:
        name: As in a cell.
        group: A control group with little memory, for what is started here; None: we may make none, or hosts have theirs.
        popen: Starts a command in a folder.
        heal: Undoes what a fault has done to the network.
    """

    name: str
    group: Path | None
    popen: Callable[..., "subprocess.Popen[str]"]
    heal: Callable[[], None] = lambda: None


@contextmanager
def open_place(name: str) -> Iterator[Place]:
    """Get a place ready, and clear it away in the end."""
    with ExitStack() as stack:
        if name == HERE:
            yield Place(name, stack.enter_context(control_group("here")), subprocess.Popen)
            return
        names = sorted(set(LAYOUT[name]))
        groups = {host: stack.enter_context(control_group(host)) for host in names}  # removed after what ran in them
        cluster = stack.enter_context(Cluster(names=names, disk="real"))
        for host, group in groups.items():
            _limit_memory(cluster, host, group)

        def popen(command: list[str], *, cwd: Path, env: dict[str, str], **options: Any) -> "subprocess.Popen[str]":
            return cluster.popen("launcher", command, cwd=cwd, env=cluster.environment("launcher") | env, **options)

        def heal() -> None:
            for host in names:
                cluster.run(host, ["iptables", "-w", "-F"])

        yield Place(name, None, popen, heal)


def break_cell(cell: Cell, place: Place, folder: Path) -> dict[str, Any]:
    """Run the cell's program with its fault under ttlaunch, and take what it says."""
    words = ["run", "--format", "json", *_START[cell.start], *_PROGRAMS[cell.program]]
    if place.name != HERE:
        words += ["--on", "lab"]
        lab = folder / "configurations/lab"
        lab.mkdir(parents=True)
        hosts = LAYOUT[place.name]
        lines = [f"{host} slots={hosts.count(host)}\n" for host in dict.fromkeys(hosts)]
        (lab / "hosts.txt").write_text("".join(lines), encoding="utf-8")
    words += ["--hang-timeout", str(HANG_TIMEOUT_S[cell.program])] if cell.fault in HANGS else []
    words += ["--", "sockets"] if cell.fault in OVER_SOCKETS and cell.program == "program" else []
    began = time.monotonic()
    said = start([sys.executable, "-m", "ttlaunch", *words], cell, place, folder, within_s=LONGEST_S)
    seconds, ended = time.monotonic() - began, time.time()
    place.heal()
    try:
        failure = json.loads(said.stdout)["failure"] or {}
    except ValueError:
        failure = {"cause": (said.stderr or said.stdout)[-300:]}
    known = {name: failure.get(name) for name in ("host", "class")}
    if said.returncode != 124:
        shutil.rmtree(folder)
    after_s = round(ended - failure["time"], 2) if failure.get("time") else None
    return {
        "named": failure.get("rank"),
        **known,
        "said": failure.get("cause"),
        "seconds": round(seconds, 2),
        "after_s": after_s,
    }


def start(
    command: list[str], cell: Cell, place: Place, folder: Path, *, within_s: float
) -> "subprocess.CompletedProcess[str]":
    """The end of a command in a folder with the programs and the order to break; status 124 where it does not end."""
    shutil.copytree(BROKEN, folder / "broken", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("faults.py", "ring.py", "ddp.py"):
        shutil.copy(BROKEN / name, folder)
    order = {"fault": cell.fault, "role": cell.role, "rank": cell.rank, "step": cell.step, "hosts": LAYOUT[place.name]}
    order["peer"] = cut_peer(cell) if cell.fault == "network cut one way" else None
    (folder / "fault.json").write_text(json.dumps(order))
    procs = place.group / "cgroup.procs" if place.group and cell.fault == BY_KERNEL else None
    process = place.popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        preexec_fn=(lambda: procs.write_text("0")) if procs else None,
    )
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            out, err = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        return subprocess.CompletedProcess(command, 124, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextmanager
def control_group(name: str) -> Iterator[Path | None]:
    """A control group with less memory than the machine, of either version; None where we may not make one."""
    for top, limit, _, _ in _GROUPS:
        group = Path(top, f"ttlaunch-attribution-{os.getpid()}-{name}")
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
            _remove(group)
        return
    yield None


def _remove(group: Path) -> None:
    """Also when what ran in it, and has ended, has not left it yet."""
    deadline = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _limit_memory(cluster: Cluster, host: str, group: Path | None) -> None:
    """Put a host with all that it will start into a control group, and show it the groups as a machine does."""
    if group is None:
        raise SystemExit("hosts need control groups of their own, which we may not make here")
    for pid in cluster.pids(host):
        (group / "cgroup.procs").write_text(str(pid))
    top, _, kind, options = next(one for one in _GROUPS if one[0] == str(group.parent))
    lines = f"mkdir -p {top} && mount -t {kind} -o {options} {kind} {top}"
    if top != "/sys/fs/cgroup":
        lines = f"mount -t tmpfs tmpfs /sys/fs/cgroup && {lines}"
    shown = cluster.run(host, ["sh", "-c", lines])
    if shown.returncode:
        raise SystemExit(f"{host} cannot be shown its control group: {shown.stderr.strip()}")
