"""Describe a rank's failure for the report: a clause, the line of code if it is known, facts, and what to do next."""

import signal
from collections.abc import Sequence
from typing import Any

from ttlaunch.diagnostics.count import counted, render_size
from ttlaunch.engines.choose import suitable_engines
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.records.endings import RankError, RankExit
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure, rank_failure
from ttlaunch.running.failures.stderr_tail import StderrTail
from ttlaunch.running.lost_folders import LOOK_S, LostFolder, describe_loss
from ttlaunch.running.watch import RankState

_CODES = {
    Cause.OUT_OF_MEMORY: "R024",
    Cause.IMPORT_ERROR: "R025",
    Cause.NO_MPI: "R068",
    Cause.LOST_PEER: "R026",
    Cause.PORT_TAKEN: "R067",
    Cause.NOT_STARTED: "R007",
    Cause.LEFT_EARLY: "R005",
    Cause.EXITED: "R003",
}
_COMES_AGAIN = {Cause.NOT_STARTED, Cause.IMPORT_ERROR, Cause.NO_MPI}
_EARLY = "left with status 0 before its role was finished"
_EXCEPTIONS = {
    Cause.OUT_OF_MEMORY: "ran out of memory",
    Cause.NO_MPI: "uses MPI, and runs without it",
    Cause.LOST_PEER: "lost its peer: {}",
    Cause.LEFT_EARLY: _EARLY,
    Cause.PORT_TAKEN: "found the port of torch's store, MASTER_PORT, taken by another process",
}
"""The clause about an exception of each class, with `{}` for the name of the exception's type."""
_SIGNALS = {
    Cause.OUT_OF_MEMORY: "ran out of memory",
    Cause.CRASHED: "crashed with {}",
    Cause.ENDED: "was ended by {}",
    Cause.LOST_PEER: "lost its peer: {}",
}
"""The clause about an ending by a signal of each class, with `{}` for the signal's name."""
_MOST_LINES, _LONGEST_LINE = 12, 500
"""How much of an exception's message and notes a verdict shows."""
_NOT_MEMORY = "not by the kernel: it counted no kill for want of memory"
_OF_DEVICE, _NOT_DETERMINISTIC = "CUDA out of memory", "does not have a deterministic implementation"
_PEER_NOTE = "no other rank reported a failure: what ended the connection is not known"
_HIDDEN = quick_pattern(r"'([\w.]+)' is not a package\Z")
"""How Python says that it found a file where it looked for a package."""
_MOST_NAMED = 8
_ROLE_OF_PROGRAMS = "rank"  # the role of all ranks of a program that is no recipe
_RESUME = "`ttlaunch run RECIPE --resume latest` continues from the newest checkpoint"
_STEPS = {
    Cause.OUT_OF_MEMORY: "lower `training_config.micro_batch_size` or `transformer_config.max_sequence_length`, or run "
    "fewer ranks on the host",
    Cause.IMPORT_ERROR: "install it for the interpreter of the ranks; on hosts `ttlaunch prepare --on NAME` does",
    Cause.NO_MPI: f"`--engine {suitable_engines(uses_mpi=True)[0].key}` gives the ranks MPI",
    Cause.PORT_TAKEN: "set MASTER_PORT nowhere: ttlaunch draws a port for each start and holds it",
    Cause.LEFT_EARLY: "look for what calls `sys.exit` or `os._exit` in the role or in a library that it uses",
    Cause.KILLED: f"find out who sent it: a person, a batch system at its limit, a watchdog; {_RESUME}",
    Cause.SHIM_LOST: f"find out who kills processes on that host; {_RESUME}",
    Cause.DAEMON_LOST: f"find out who kills processes on that host; {_RESUME}",
    Cause.FOLDER_LOST: "find out who removes it: a clean-up of temporary files, a batch system, a person",
    Cause.LOST_PEER: "`ttlaunch doctor --on NAME` tries the network between the hosts",
}
_STEPS_OF_PROGRAMS = {
    Cause.LEFT_EARLY: "look for what calls `sys.exit`, `os._exit` or `MPI_Abort` in the program or in a library that it uses",
    Cause.OUT_OF_MEMORY: "use less memory per rank, or run fewer ranks on the host",
    Cause.KILLED: "find out who sent it: a person, a batch system at its limit, a watchdog",
    Cause.SHIM_LOST: "find out who kills processes on that host",
}

_STEPS_OF_SIGNALS: dict[int, str] = {
    signal.SIGXCPU: "the kernel sends it at a limit of processor time: look at `ulimit -t`",
    signal.SIGXFSZ: "the kernel sends it at a limit of the size of files: look at `ulimit -f`",
    **dict.fromkeys(
        (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
        "a timer sends it that the program or a library has set, such as `signal.alarm`",
    ),
}
"""What to do next after signals that hardly anybody sends from outside."""


def next_step(failure: Failure) -> str | None:
    """Suggest what to do next after a failure of this class; None if the user has to read the log."""
    if failure.kind is Cause.LOST_PEER and failure.host == "localhost":
        return None
    steps = _STEPS | _STEPS_OF_PROGRAMS if failure.role == _ROLE_OF_PROGRAMS else _STEPS
    return steps.get(failure.kind)


def name_exception(state: RankState, error: RankError, kind: Cause) -> Failure:
    """Make the failure of a rank that recorded its exception."""
    first_line, *more = message_lines(error)
    name = f"{error.module}.{error.type}" if error.module.startswith("mpi4py.") else error.type
    if kind is Cause.CHECKPOINT:  # its message is complete; a line of code would not help
        is_write = name == "CheckpointWriteError"
        # A checkpoint that cannot be read now cannot be read after a restart either; writing one may work the next time.
        code, cause = ("R030", "could not keep a checkpoint") if is_write else ("R031", "could not begin")
        cause = f"{cause}: {first_line}"
        return rank_failure(state.row, code=code, kind=kind, cause=cause, time=error.began, comes_again=not is_write)
    if kind is Cause.AUDITED:  # only where the records of the audit are lost; else the launcher decides who is wrong
        cause = f"stopped, because an audit failed: {first_line}"
        return rank_failure(
            state.row, code="R089", kind=kind, cause=cause, time=error.began, step=error.step, comes_again=True
        )
    if kind is Cause.DIVERGED:
        cause = f"stopped, because {first_line}: training has diverged"
        return rank_failure(
            state.row, code="R011", kind=kind, cause=cause, time=error.began, step=error.step, comes_again=True
        )
    other_world = name == "WorldSizeError"  # the ranks use another MPI than mpirun's; a restart would not change that
    return _failure(
        state,
        kind=kind,
        code="R001" if other_world else _CODES.get(kind, "R002"),
        cause=_exception_clause(kind, name, first_line),
        time=error.began,
        place=f"{error.file}:{error.line}" if error.file else None,
        evidence=(
            f"`{name}: {first_line}`" if first_line else f"`{name}`",
            *more,
            *_clean_up_facts(state),
            *_memory_facts(state.exit, kind, first_line),
            *_peer_facts(kind),
        ),
        next_step=_advice(kind, first_line),
        step=error.step,
        comes_again=other_world or kind in _COMES_AGAIN,
    )


def message_lines(error: RankError) -> list[str]:
    """Return the lines of an exception's message and of its notes that a verdict shows; at least one, which may be empty."""
    lines = [line for text in (error.message, *error.notes) for line in text.splitlines() if line.strip()]
    shown = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(f"… and {counted(len(lines) - _MOST_LINES, 'more line')} in the rank's log")
    return shown or [""]


def name_early_exit(state: RankState, time: float) -> Failure:
    """Make the failure of a program's rank that left at a time when other ranks still needed it."""
    asked = state.in_flight.status if state.in_flight else None
    kind, what = (Cause.EXITED, f"called `sys.exit` with status {asked}") if asked else (Cause.LEFT_EARLY, "left")
    how = "with status 0 before the other ranks"
    if state.exit is None:
        how = "before the other ranks; its process is still there"
    elif state.exit.signal:  # it was ended before it could end, and so has no status
        how = f"before the other ranks; its process had not ended when {signal_name(state.exit.signal)} ended it"
    return _failure(state, kind=kind, code=_CODES[kind], cause=f"{what} {how}", time=time)


def name_ending(state: RankState, ending: RankExit, tail: StderrTail, *, kind: Cause) -> Failure:
    """Make the failure of a rank from its shim's record and its log, because it recorded no exception."""
    code, place, facts = _CODES.get(kind, "R004"), None, tuple[str, ...]()
    advice = _STEPS_OF_SIGNALS.get(ending.signal) if ending.signal else None
    raised, crash = tail.raised, tail.crash
    if ending.signal:
        cause = _SIGNALS.get(kind, "was killed by {}").format(signal_name(ending.signal))
        if crash and crash.file and kind is Cause.CRASHED:
            place, facts = f"{crash.file}:{crash.line}", (f"{crash.reason} in the {crash.thread}",)
    elif kind is Cause.NOT_STARTED:
        cause = f"could not be started: {ending.start_error}"
    elif kind is Cause.LEFT_EARLY and ending.left_early:
        cause = _EARLY
    elif raised is not None and kind is not Cause.EXITED and ending.status == 1:
        code, cause = _CODES.get(kind, "R002"), _exception_clause(kind, raised.type, raised.message)
        place, facts = f"{raised.file}:{raised.line}" if raised.file else None, (f"`{raised.type}: {raised.message}`",)
        advice = _advice(kind, raised.message)
    elif kind is Cause.LOST_PEER:
        cause, facts = "lost its peer", (f"it exited with status {ending.status}",)
    else:
        cause = f"exited with status {ending.status}"
    facts += (*_memory_facts(ending, kind, raised.message if raised else ""), *_peer_facts(kind))
    return _failure(
        state,
        kind=kind,
        code=code,
        cause=cause,
        time=ending.time,
        place=place,
        evidence=facts,
        next_step=advice,
    )


def name_lost_shim(state: RankState, seen: float) -> Failure:
    """Make the failure of a rank that ended because its parent, the shim, was killed."""
    return _failure(
        state, kind=Cause.SHIM_LOST, code="R006", cause="was lost: its shim was killed from outside", time=seen
    )


def name_hung_worker(state: RankState, what: str, *, time: float) -> Failure:
    """Make the failure of a worker of an elastic run that the launcher kills because it makes no progress, as the clause `what` says."""
    return _failure(state, kind=Cause.HUNG, code="R075", cause=what, time=time)


def name_lost_daemon(state: RankState, seen: float, *, launcher: str) -> Failure:
    """Make the failure of a host whose ranks ended because the engine's daemon there was killed; `state` is one of the ranks."""
    host = state.row.host
    cause = f"{launcher}'s daemon on {host} was killed, and took the ranks there along"
    return Failure(code="R057", kind=Cause.DAEMON_LOST, host=host, step=state.step or None, cause=cause, time=seen)


def name_lost_folder(host: str, lost: LostFolder, ranks: Sequence[RankState]) -> Failure:
    """Make the failure of a run one of whose folders was removed; `host` is "" for this machine."""
    needed_by = [str(state.row.rank) for state in ranks if host in {"", state.row.host}]
    more = ", …" if len(needed_by) > _MOST_NAMED else ""
    hosts = {state.row.host for state in ranks}
    return Failure(
        code="R066",
        kind=Cause.FOLDER_LOST,
        host=host or (hosts.pop() if len(hosts) == 1 else None),
        cause=f"{describe_loss(host, lost)}, while the run needed it",
        time=lost.time - LOOK_S,
        evidence=(f"it was needed by rank {', '.join(needed_by[:_MOST_NAMED])}{more}",) if needed_by else (),
    )


def _clean_up_facts(state: RankState) -> tuple[str, ...]:
    """Say so if the rank was ended before the exception had left its `finally` clauses."""
    if state.error is not None or state.exit is None or not state.exit.signal:
        return ()
    return (f"it was still cleaning up when {signal_name(state.exit.signal)} ended it",)


def _exception_clause(kind: Cause, name: str, message: str) -> str:
    if kind is Cause.IMPORT_ERROR:
        return f"could not import: {message}" if message else "could not import"
    if kind is Cause.EXITED:
        return f"called sys.exit({message})" if message.lstrip("-").isdecimal() else "called sys.exit"
    return _EXCEPTIONS.get(kind, "raised {}").format(name)


def _advice(kind: Cause, message: str) -> str | None:
    """Suggest to rename a file that hides a package, such as a `torch.py` beside the program, or to allow a kernel; None: nothing."""
    if _NOT_DETERMINISTIC in message:
        return "`--set device_config.deterministic=false` allows it; the bits then differ from run to run"
    hidden = _HIDDEN.search(message) if kind is Cause.IMPORT_ERROR else None
    return f"rename your `{hidden[1].replace('.', '/')}.py`: it hides the package of this name" if hidden else None


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _memory_facts(ending: RankExit | None, kind: Cause, message: str) -> tuple[str, ...]:
    """Describe the rank's memory if memory was the cause; after a SIGKILL for another reason, note that it was not.

    Of a device's memory, the exception's own message tells what there was.
    """
    if ending is None or (kind is Cause.OUT_OF_MEMORY and _OF_DEVICE in message):
        return ()
    if kind is Cause.KILLED and ending.signal == signal.SIGKILL and ending.oom_kills == 0:
        return (_NOT_MEMORY,)
    if kind is not Cause.OUT_OF_MEMORY:
        return ()
    peak, limit, facts = ending.peak_memory_bytes, ending.memory_limit_bytes, []
    if ending.oom_kills:
        facts.append("the kernel killed it, or a child of it, for want of memory")
    if peak:
        facts.append(f"it held {render_size(peak)} at most" + (f" of {render_size(limit)}" if limit else ""))
    return tuple(facts)


def _peer_facts(kind: Cause) -> tuple[str, ...]:
    return (_PEER_NOTE,) if kind is Cause.LOST_PEER else ()


def _failure(state: RankState, *, kind: Cause, step: int | None = None, **values: Any) -> Failure:
    """Make the failure of a rank; if `step` is not known, the rank was in the step after the last one that it reported."""
    total, when = state.total_steps, None
    step = step or (state.step + 1 if state.step else None)
    if step is not None and total is not None and step > total:
        step, when = None, "after its last step"
    elif step is None and total is not None:
        when = "before the end of its first step"
    return rank_failure(
        state.row, **{"kind": kind, "step": step, "when": when, "comes_again": kind in _COMES_AGAIN, **values}
    )
