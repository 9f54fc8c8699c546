"""The parent of one rank: started by the engine in the rank's slot, it prepares the rank, watches it and records its end.

    mpirun -n 4 … python -I -S shim.py plan.json

It reads its row of the plan, sets the whole environment before the rank's interpreter starts (so that nothing shows
on a command line and `LD_LIBRARY_PATH` works), copies the rank's output to files byte for byte and, if it was started
by hand, line by line with the rank's name in front to its own output, and writes down how the rank ended. A killed shim
takes its rank with it, and a killed engine its shims. mpirun signals whole process groups, so the shim forwards nothing.

Python 3.9 and the standard library only, about 15 ms.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, _PACKAGE_PARENT)
from ttlaunch import contract  # noqa: E402 - the path above makes it importable without site-packages
from ttlaunch.agent.memory import settings_for_limit  # noqa: E402
from ttlaunch.agent.parent_death import end_with_parent, prctl  # noqa: E402
from ttlaunch.agent.rank_output import RankOutput  # noqa: E402
from ttlaunch.agent.rank_records import RankRecords  # noqa: E402
from ttlaunch.agent.script_watch import ScriptWatch  # noqa: E402
from ttlaunch.agent.stop_marker import stop_marker_was_left  # noqa: E402

sys.path.remove(_PACKAGE_PARENT)

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ttlaunch.records.endings import RankExit

    Record = dict[str, Any]
    Fork = Callable[[Record, dict[str, str]], Any]  # returns a process with two streams; see `forked_rank.py`

_AT_START = os.path.join(_PACKAGE_PARENT, "ttlaunch", "at_start")
_FOR_SHIMS = {contract.ENV_MASTER_ADDR, contract.ENV_MASTER_PORT, contract.ENV_RESTARTS, contract.ENV_MOST_RESTARTS}
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_FIRST_LINE = 256  # as much as Linux reads
_OUTPUT_GRACE_S = 1.0
_RECORD_GRACE_S = (
    0.1  # the rank and all its descendants have ended, so only the rest in the pipes is still to be copied
)
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 5.0  # for a library of MPI, which compiled programs load when they start
_LEFT_EARLY = 1
SHIM_FAILED = 70
PARENT_ENDED = getattr(signal, "SIGRTMIN", signal.SIGHUP)
"""The signal that a shim gets when its parent has ended; no engine sends it."""


def main() -> int:
    """Run one rank; the exit status is the rank's, or 128 + signal."""
    begin()
    try:
        plan_path = os.path.abspath(sys.argv[1])
        with open(plan_path, encoding="utf-8") as file:
            plan = json.load(file)
        row = _own_row(plan)
    except (OSError, ValueError, KeyError, IndexError, LookupError) as error:
        reason = str(error) if type(error) is LookupError else f"{type(error).__name__}: {error}"
        print(f"ttlaunch shim: {reason}", file=sys.stderr)
        return SHIM_FAILED
    return run_rank(plan, row, plan_path)


def begin() -> None:
    """Make this process a shim: it ends with its parent, adopts what its rank orphans, and outlives signals to its group."""
    adopt_orphans()
    # With SIGKILL it could not end those orphans, which nobody finds who have cleared their environment.
    signal.signal(PARENT_ENDED, _end_all)
    end_with_parent(PARENT_ENDED)
    # Engines signal the whole process group, so the rank gets each signal itself; the shim must outlive it to record how
    # the rank ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def rank_environment(
    plan: Record, row: Record, inherited: Mapping[str, str], *, run_folder: str, plan_path: str
) -> dict[str, str]:
    """Build the rank's environment: the inherited one without managed names and secrets, then the plan's and the contract's."""
    managed, secret = set(plan["managed"]), contract.SECRET_PREFIX
    environment = {k: v for k, v in inherited.items() if k not in managed and not k.startswith(secret)}
    environment.update(_torch_world(plan, row, environment, inherited=inherited, run_folder=run_folder))
    environment.update(contract.fill_references({**plan["environment"], **row["environment"]}, inherited))
    environment.update(
        {
            contract.ENV_RUN_ID: inherited.get(contract.ENV_RUN_ID, contract.BY_HAND),
            contract.ENV_RUN_DIR: run_folder,
            contract.ENV_PLAN: plan_path,
            contract.ENV_RANK: str(row["rank"]),
            contract.ENV_LOCAL_RANK: str(row["local_rank"]),
            contract.ENV_WORLD_SIZE: str(plan["world_size"]),
            contract.ENV_ROLE: row["role"],
            contract.ENV_HOST: row["host"],
        }
    )
    networks = _first_set(plan["engine"]["names"]["network_variables"], inherited)
    environment.pop(contract.ENV_NETWORKS, None)  # inherited if this run was started from within another one
    if networks is not None:
        environment[contract.ENV_NETWORKS] = networks
        environment.update(_interface_for_messages(plan, environment, networks))
    if plan["recipe"] is None:  # the runtime of a recipe writes down its exceptions itself
        exceptions = os.path.join(run_folder, contract.exceptions_file(row["rank"]))
        environment.update(_with_exceptions_written(environment.pop("PYTHONPATH", None), exceptions))
        if not _keeps_mpi(plan) and plan["world_size"] > 1:
            environment[contract.ENV_NO_MPI] = "1"
    elif plan.get("warm"):
        environment.update(_with_at_start(environment.pop("PYTHONPATH", None)))
    if plan["recipe"] is not None:
        environment.pop(contract.ENV_MEMORY, None)  # inherited if this run was started from within another one
        beside = sum(other["host"] == row["host"] for other in plan["ranks"])
        for name, value in settings_for_limit(ranks=beside).items():
            environment.setdefault(name, value)
    environment.setdefault(
        "PYTHONFAULTHANDLER", "1"
    )  # a crash in compiled code then prints the Python line that led to it
    return environment


def _interface_for_messages(plan: Record, environment: Mapping[str, str], networks: str) -> dict[str, str]:
    """Return the variables that keep the engine's library on the chosen networks, where it knows only names of interfaces."""
    names = [name for name in plan["engine"]["names"].get("interface_variables", ()) if name not in environment]
    if not names:
        return {}
    from ttlaunch.agent.torch_world import interface_in  # noqa: PLC0415 - only runs over hosts pay for it

    interface = interface_in(networks)
    return dict.fromkeys(names, interface) if interface else {}


def _torch_world(
    plan: Record, row: Record, environment: dict[str, str], *, inherited: Mapping[str, str], run_folder: str
) -> dict[str, str]:
    """Return the variables of torchrun's for a rank of a Python program; empty for any other rank.

    The variables of the engine's library are removed from `environment` if the program does not use MPI, and those of the launcher
    that only shims need in any case.
    """
    if plan.get("python") is not None:
        from ttlaunch.agent import torch_world  # noqa: PLC0415 - only ranks of Python programs pay for it

        networks = _first_set(plan["engine"]["names"]["network_variables"], inherited)
        found = torch_world.torch_defaults(plan, row, environment, networks=networks)
        found.update(torch_world.torch_world(plan, row, inherited, run_folder=run_folder))
    else:
        found = {}
    prefixes = () if _keeps_mpi(plan) else tuple(plan["engine"]["names"].get("rank_prefixes", ()))
    for name in [name for name in environment if name.startswith(prefixes) or name in _FOR_SHIMS]:
        del environment[name]
    return found


def _keeps_mpi(plan: Record) -> bool:
    python, has_mpi = plan.get("python"), plan["engine"]["names"].get("has_mpi", True)
    return bool(has_mpi and (python is None or python["uses_mpi"]))


def _with_exceptions_written(path: str | None, file: str) -> dict[str, str]:
    """Return the variables that make a Python program write its exceptions to a file; `path` is its own PYTHONPATH."""
    return {**_with_at_start(path), contract.ENV_EXCEPTIONS: file}


def _with_at_start(path: str | None) -> dict[str, str]:
    """Return the variables with which Python begins with `at_start`; `path` is the rank's own PYTHONPATH."""
    own = {} if path is None else {contract.ENV_PYTHONPATH: path}
    return {**own, "PYTHONPATH": f"{_AT_START}{os.pathsep}{path}" if path else _AT_START}


def check_format(plan: Record) -> None:
    """Raise `LookupError` if another version of ttlaunch wrote the plan."""
    if plan["format"] != contract.PLAN_FORMAT:
        raise LookupError(f"plan format {plan['format']} is not {contract.PLAN_FORMAT}; another version wrote it")


def _own_row(plan: Record) -> Record:
    check_format(plan)
    names = plan["engine"].get("names")
    if names is None:
        raise LookupError("the plan does not say how its engine names ranks; another version wrote it")
    own = _first_set(names["rank_variables"], os.environ)
    if own is None:
        raise LookupError(f"no MPI launcher said which rank this is; start it with {names['launcher']}")
    rank, rows = int(own), plan["ranks"]
    if rank >= len(rows):
        raise LookupError(f"{names['launcher']} started rank {rank}, but the plan has {len(rows)} ranks")
    row: Record = rows[rank]
    return row


def _first_set(names: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the value of the first of these variables that is set; None if none is."""
    return next((environment[name] for name in names if name in environment), None)


def run_rank(plan: Record, row: Record, plan_path: str, *, fork: Fork | None = None, why_cold: str = "") -> int:
    """Run a rank to its end and record how it ended; returns the status to exit with.

    `fork` makes the rank from this process; `why_cold` says why not, if the user asked for it.
    """
    run_folder = os.path.dirname(plan_path)
    contract.make_private_folder(os.path.join(run_folder, contract.LOGS_DIR))
    contract.make_private_folder(os.path.join(run_folder, contract.RECORDS_DIR))
    rank = row["rank"]
    records = RankRecords(run_folder, plan, rank)
    try:
        environment = rank_environment(plan, row, os.environ, run_folder=run_folder, plan_path=plan_path)
        why_cold = why_cold or (why_not_forked() if fork else "")
        process = fork(plan, environment) if fork and not why_cold else _start(plan, environment)
    except (OSError, LookupError) as error:
        text = _why_not(error, plan) if isinstance(error, OSError) else str(error)
        print(f"rank {rank} cannot be started: {text}", file=sys.stderr)
        records.not_started(text)
        return SHIM_FAILED
    records.started(process.pid, why_cold=why_cold)
    _note_segments(plan, process.pid)
    script = ScriptWatch(run_folder, rank) if plan["recipe"] is None else None
    output = RankOutput(run_folder, row, pass_on=contract.ENV_SCRATCH not in os.environ, script=script)
    copies = [output.copy(process.stdout, 1), output.copy(process.stderr, 2)]
    _refuse_mpi(plan, process.pid, records)
    _keep_listeners_on_networks(plan, process.pid, environment.get(contract.ENV_NETWORKS))
    _, wait_status, usage = os.wait4(process.pid, 0)
    # The time of the end is taken before anything else is waited for: the order of endings decides who failed first.
    ending = records.ending(process.pid, wait_status, usage)
    left_behind = kill_descendants()
    # The record counts the output that could not be written, so the rest in the pipes is copied first. But a process that
    # cannot be killed may hold a pipe open, and must not delay the record.
    _join(copies, _RECORD_GRACE_S)
    if script:
        script.finish(within_s=_RECORD_GRACE_S)
    records.ended(ending, left_behind=left_behind, unkept=output.unkept())
    _join(copies, _OUTPUT_GRACE_S)
    if plan["recipe"] is None and stop_marker_was_left(run_folder, since=ending.started or 0.0):
        _stay_until_ended()
    return _status_of(ending)


def _status_of(ending: RankExit) -> int:
    if ending.signal:
        return 128 + ending.signal
    return _LEFT_EARLY if ending.left_early else ending.status or 0


def why_not_forked() -> str:
    """Return why no rank may be forked from this process now: a fork has only the thread that makes it. Empty if it has no other."""
    further = len(os.listdir("/proc/self/task")) - 1
    because = (
        f"this rank starts by itself, because the process that forks the ranks has further threads by now ({further})"
    )
    return because if further else ""


def _note_segments(plan: Record, pid: int) -> None:
    patterns, scratch = plan["engine"]["names"].get("own_segments"), os.environ.get(contract.ENV_SCRATCH)
    if patterns and scratch and _keeps_mpi(plan):
        from ttlaunch.agent.segments import note_segments  # noqa: PLC0415 - only engines that leave files pay for it

        note_segments(pid, patterns, scratch=scratch)


def _why_not(error: OSError, plan: Record) -> str:
    """Say why a program cannot be started: the system's message does not name what a file needs that is there."""
    program: str = error.filename or plan["rank_command"][0]
    path, plain = os.path.join(plan["working_folder"], program), f"{error.strerror or error}: {program}"
    if "/" not in program or not os.path.isfile(path):
        return plain
    if error.errno == errno.ENOEXEC:
        return f"{program} is no program for this machine, and no script whose first line names its interpreter, such as `#!/bin/sh`"
    if error.errno != errno.ENOENT:
        return plain
    try:
        with open(path, "rb") as file:
            first = file.read(_LONGEST_FIRST_LINE).split(b"\n")[0]
    except OSError:
        return plain
    if not first.startswith(b"#!"):
        return f"{program} is there, but not the loader or library that it names"
    named = (first[2:].split() or [b""])[0].decode(errors="backslashreplace")
    why = "; the line ends as on Windows" if first.endswith(b"\r") else ""
    return f"there is no `{named}`, which the first line of {program} names{why}"


def _keep_listeners_on_networks(plan: Record, pid: int, networks: str | None) -> None:
    """Until the rank ends, move the sockets on which its messaging library listens from all interfaces to the chosen networks.

    It stops the rank for a moment when it moves a socket, and no other thread of this process may wait for the rank meanwhile.
    """
    options = plan["engine"]["names"].get("rank_listeners")
    if networks and options:
        from ttlaunch.agent.listeners import move_until_it_ends  # noqa: PLC0415 - only runs over hosts pay for it

        move_until_it_ends(pid, networks, options)


def _refuse_mpi(plan: Record, pid: int, records: RankRecords) -> None:
    """Until the rank ends, look whether it loads a library of MPI, of which it would be the only rank; a thread does that.

    Ranks of Python programs refuse MPI themselves, at its import: some of their libraries load MPI without using it.
    """
    if plan["engine"]["names"].get("has_mpi", True) or plan.get("python") is not None or plan["world_size"] == 1:
        return

    def look() -> None:
        from ttlaunch.agent.listeners import descendants  # noqa: PLC0415 - only these ranks pay for it
        from ttlaunch.agent.process_facts import mpi_library_of  # noqa: PLC0415 - likewise

        pause_s = _FIRST_LOOK_S
        while True:
            library = mpi_library_of([pid, *(child for child, _ in descendants(pid))])
            if library is not None:
                records.uses_mpi(library)
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    threading.Thread(target=look, daemon=True).start()


def _join(threads: list[threading.Thread], timeout_s: float) -> None:
    for thread in threads:
        thread.join(timeout_s)


def _start(plan: Record, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        contract.fill_command(plan["rank_command"], os.environ),
        cwd=plan["working_folder"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=False,  # the descriptors of mpirun's process-management interface must reach the rank
        preexec_fn=_begin_rank,
    )


def _stay_until_ended() -> None:
    """Wait for mpirun to end this shim.

    If the shim exited by itself, mpirun might at once kill the other ranks, which have been asked to stop and still have
    their grace period.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        signal.pause()


def _begin_rank() -> None:
    """Prepare the rank's process: it ends with the shim, and takes INT and TERM again, which the shim ignores."""
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process, however often it forked; `kill_descendants` relies on that."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_all(*_: object) -> None:
    kill_descendants()
    os._exit(SHIM_FAILED)


def kill_descendants() -> int:
    """Kill and count the processes that a rank left behind, even if they forked twice or cleared their environment.

    This process must have called `adopt_orphans`, so that all of them appear among its children.
    """
    ended = 0
    while True:
        children = child_processes()
        if not children:
            return ended
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                _, wait_status = os.waitpid(pid, 0)
            except (ChildProcessError, ProcessLookupError):
                continue
            ended += os.WIFSIGNALED(wait_status)  # a child that had already exited by itself does not count


def child_processes() -> list[int]:
    """Return the process ids of this process's children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
