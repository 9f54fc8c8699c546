"""Put a rank's ending into words: one clause, the line of code where there is one, and the facts beside it."""

import signal
from dataclasses import replace

from ttlaunch.hosts.sync.sizes import render_size
from ttlaunch.records.ranks import RankError, RankExit
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.failures.stderr_tail import StderrTail
from ttlaunch.running.watch import RankState

_CODES = {
    Cause.OUT_OF_MEMORY: "R024",
    Cause.IMPORT_ERROR: "R025",
    Cause.LOST_PEER: "R026",
    Cause.NOT_STARTED: "R007",
    Cause.LEFT_EARLY: "R005",
    Cause.EXITED: "R003",
}
_COMES_AGAIN = {Cause.NOT_STARTED, Cause.IMPORT_ERROR}
_EARLY = "left with status 0 before its role was finished"
_NOT_MEMORY = "not by the kernel: it counted no kill for want of memory"
_PEER_NOTE = "no other rank said that it broke: what ended the connection is not known"


def name_exception(state: RankState, error: RankError, kind: Cause) -> Failure:
    """The failure of a rank that wrote down its exception."""
    first_line = error.message.partition("\n")[0]
    name, when = error.type, error.time
    if kind is Cause.CHECKPOINT:  # says everything itself; a line of code would not help
        kept = name == "CheckpointWriteError"
        # A checkpoint that cannot be read now cannot be read by a new start either; one may be kept the next time.
        code, cause = ("R030", "could not keep a checkpoint") if kept else ("R031", "could not begin")
        row = state.row
        said = f"{cause}: {first_line}"
        return Failure(code, row.rank, row.role, row.host, None, said, when, kind=kind, comes_again=not kept)
    other_world = name == "WorldSizeError"  # another MPI started the ranks, and would again
    code = "R001" if other_world else _CODES.get(kind, "R002")
    place = f"{error.file}:{error.line}" if error.file else None
    facts = (f"`{name}: {first_line}`", *_memory_facts(state.exit, kind), *_peer_facts(kind))
    clause = _clause(kind, name, first_line)
    failure = _failure(state, code, clause, when, kind, place=place, facts=facts, step=error.step)
    return replace(failure, comes_again=failure.comes_again or other_world)


def name_ending(state: RankState, ending: RankExit, words: StderrTail, kind: Cause) -> Failure:
    """The failure of a rank of which only the shim and the log tell."""
    time, code = ending.time, _CODES.get(kind, "R004")
    raised, crash = words.raised, words.crash
    number = ending.signal
    if number:
        place = f"{crash.file}:{crash.line}" if crash and crash.file and kind is Cause.CRASHED else None
        said = (f"{crash.words} in the {crash.thread}",) if crash and place else ()
        facts = (*said, *_memory_facts(ending, kind), *_peer_facts(kind))
        return _failure(state, code, _signal_clause(number, kind), time, kind, place=place, facts=facts)
    if kind is Cause.NOT_STARTED:
        return _failure(state, code, f"could not be started: {ending.start_error}", time, kind)
    if kind is Cause.LEFT_EARLY and ending.left_early:
        return _failure(state, code, _EARLY, time, kind)
    if raised is not None and kind is not Cause.EXITED and ending.status == 1:
        place = f"{raised.file}:{raised.line}" if raised.file else None
        facts = (f"`{raised.type}: {raised.message}`", *_memory_facts(ending, kind), *_peer_facts(kind))
        code = _CODES.get(kind, "R002")
        return _failure(state, code, _clause(kind, raised.type, raised.message), time, kind, place=place, facts=facts)
    status = ending.status
    if kind is Cause.LOST_PEER:
        facts = (f"it exited with status {status}", *_peer_facts(kind))
        return _failure(state, code, "lost its peer", time, kind, facts=facts)
    return _failure(state, code, f"exited with status {status}", time, kind)


def name_lost_shim(state: RankState, seen: float) -> Failure:
    """The failure of a rank that was taken along by its killed parent."""
    return _failure(state, "R006", "was lost: its shim was killed from outside", seen, Cause.SHIM_LOST)


def name_lost_daemon(state: RankState, seen: float, *, launcher: str) -> Failure:
    """The failure of a host whose ranks were taken along by the engine's daemon there; one of them is given."""
    host = state.row.host
    cause = f"{launcher}'s daemon on {host} was killed, and took the ranks there along"
    return Failure("R057", None, None, host, state.step or None, cause, seen, kind=Cause.DAEMON_LOST)


def _clause(kind: Cause, name: str, message: str) -> str:
    """What an exception of a class comes to."""
    match kind:
        case Cause.OUT_OF_MEMORY:
            return "ran out of memory"
        case Cause.IMPORT_ERROR:
            return f"could not import: {message}" if message else "could not import"
        case Cause.LOST_PEER:
            return f"lost its peer: {name}"
        case Cause.LEFT_EARLY:
            return _EARLY
        case Cause.EXITED:
            return f"called sys.exit({message})" if message.lstrip("-").isdecimal() else "called sys.exit"
        case _:
            return f"raised {name}"


def _signal_clause(number: int, kind: Cause) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    match kind:
        case Cause.OUT_OF_MEMORY:
            return "ran out of memory"
        case Cause.CRASHED:
            return f"crashed with {name}"
        case Cause.ENDED:
            return f"was ended by {name}"
        case Cause.LOST_PEER:
            return f"lost its peer: {name}"
        case _:
            return f"was killed by {name}"


def _memory_facts(ending: RankExit | None, kind: Cause) -> tuple[str, ...]:
    """How much the rank had, of how much, where memory was the cause; that it was not, where one would think so."""
    if ending is None:
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


def _failure(
    state: RankState,
    code: str,
    cause: str,
    time: float,
    kind: Cause,
    *,
    place: str | None = None,
    facts: tuple[str, ...] = (),
    step: int | None = None,
) -> Failure:
    """The failure with the step that the rank was in: the one it said, or the one after the last that it reported."""
    row, total = state.row, state.total_steps
    step = step or (state.step + 1 if state.step else None)
    when = None
    if step is not None and total is not None and step > total:
        step, when = None, "after its last step"
    elif step is None and total is not None:
        when = "before the end of its first step"
    return Failure(
        code,
        row.rank,
        row.role,
        row.host,
        step,
        cause,
        time,
        place,
        facts,
        kind=kind,
        when=when,
        comes_again=kind in _COMES_AGAIN,
    )
