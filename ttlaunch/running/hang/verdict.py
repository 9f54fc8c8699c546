"""Decide which rank a run hangs on, and why.

It is a rank that others wait for and that waits for no other, or one whose operation does not match in a cycle of waiting
ranks. The functions are pure: they judge one snapshot, taken when no rank had made progress for a while.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ttlaunch.diagnostics.count import counted, render_duration, render_size
from ttlaunch.flight_recorder import VERBS
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.flight_recorders import describe_collective, short_place
from ttlaunch.running.hang.departure import Departure
from ttlaunch.running.hang.mismatch import find_mismatch
from ttlaunch.running.hang.odd_one import describe_place, find_odd_one
from ttlaunch.running.hang.stacks import frame_to_report
from ttlaunch.running.hang.waits import Seen, find_cycle, peers_of, seen_of, waiters

_MOST_ROWS = 24
_MOST_PEERS = 4


class Verdict(NamedTuple):
    """The rank that caused a hang, and a clause that says how."""

    code: str
    one: Seen
    cause: str


def judge(ranks: Sequence[Seen], *, quiet_s: float, now: float) -> Failure:
    """Make the failure to report for a hang.

    Args:
        ranks: All ranks of a run, in order.
        quiet_s: For how many seconds no rank has made progress.
        now: Seconds since the epoch.
    """
    code, one, cause = _verdict(ranks, quiet_s)
    failure = Failure(
        code=code,
        rank=one.rank,
        role=one.role,
        host=one.host,
        step=_step(one),
        cause=cause,
        time=now,
        place=one.place,
        evidence=_wait_table(ranks),
        kind=Cause.HUNG,
        when="while it was starting" if one.is_starting else None,
    )
    return with_thread_error(failure, one)


def departed(departure: Departure, ranks: Sequence[Seen], *, quiet_s: float, now: float) -> Failure:
    """Make the failure of ranks that wait for each other because one of them has called another collective operation."""
    one = seen_of(departure.rank, ranks)
    return Failure(
        code="R037",
        rank=one.rank,
        role=one.role,
        host=one.host,
        cause=departure.cause,
        time=now,
        place=departure.place,
        evidence=(f"no rank has made progress for {render_duration(quiet_s)}", *_wait_table(ranks)),
        kind=Cause.HUNG,
    )


def with_thread_error(failure: Failure, one: Seen) -> Failure:
    """Add to the failure of a rank that hangs the exception that ended one of its threads, if there was one."""
    if one.thread_error is None:
        return failure
    raised = one.thread_error.raised
    what = f"`{raised.type}: {raised.message}`" if raised.message else f"`{raised.type}`"
    return replace(
        failure,
        cause=f"{failure.cause}; its thread `{one.thread_error.thread}` had raised {what}",
        place=f"{raised.file}:{raised.line}" if raised.file else failure.place,
    )


def _verdict(ranks: Sequence[Seen], quiet_s: float) -> Verdict:
    waiting = waiters(ranks)

    def order(one: Seen) -> tuple[float, ...]:
        return (-len(waiting[one.rank]), *_progress(one))

    stopped = [one for one in ranks if one.is_stopped]
    if stopped:
        cause = f"was stopped by a signal, and nobody resumed it within {render_duration(quiet_s)}"
        return Verdict("R013", min(stopped, key=order), cause)
    idle = [one for one in ranks if not one.is_done and not peers_of(one, ranks)]
    not_waiting, odd = min(idle, key=order, default=None), None
    # Ranks that call MPI or torch directly wait for nobody that is known. If they are equally far, the odd place decides.
    if not_waiting is not None and not waiting[not_waiting.rank] and len({_steps(one) for one in idle}) == 1:
        odd = find_odd_one(idle)
        not_waiting = odd or not_waiting
    cycle = find_cycle(ranks)
    if not_waiting is not None and (waiting[not_waiting.rank] or not cycle):
        return Verdict(
            "R014",
            not_waiting,
            _describe_idle(
                not_waiting, ranks, waiters_of_it=len(waiting[not_waiting.rank]), is_odd=bool(odd), quiet_s=quiet_s
            ),
        )
    if cycle:
        return Verdict(*find_mismatch(ranks, cycle))
    last = next((one for one in ranks if not one.has_left), ranks[0])
    return Verdict(
        "R014", last, f"has returned from its role, and its process has not ended for {render_duration(quiet_s)}"
    )


def _progress(one: Seen) -> tuple[float, ...]:
    """Return a sort key: least progress first; with equal progress, the longest time in the present operation first."""
    return (*_steps(one), -(one.idle_s or 0.0), one.rank)


def _steps(one: Seen) -> tuple[int, ...]:
    """Return how far a rank has come."""
    steps, passes = (one.recording.steps, one.recording.passes) if one.recording else (0, 0)
    return (not one.is_starting, steps, passes)


def _step(one: Seen) -> int | None:
    """Return the step that a rank is in; None before the first."""
    if one.recording is None:
        return None
    last = one.recording.operations[-1].step if one.recording.operations else 0
    return (one.waiting.step if one.waiting else max(last, one.recording.steps + bool(one.recording.steps))) or None


def _describe_idle(one: Seen, ranks: Sequence[Seen], *, waiters_of_it: int, is_odd: bool, quiet_s: float) -> str:
    still = f"has not moved for {render_duration(quiet_s)}"
    frame = frame_to_report(one.stack)
    where = f", in `{frame.function}` at {short_place(frame.place)}" if frame else ""
    if not one.stack:
        where = f", and {describe_place(one)}" if one.process else ", and did not report where it is"
    if len(ranks) == 1:
        return f"{still}{where}"
    if not waiters_of_it:
        apart = "stands apart from them" if is_odd else "is the furthest behind"
        return f"{still}, nor has any other rank, and it {apart}{where}"
    others = counted(waiters_of_it, "rank")
    wait = f"{others} {'waits' if waiters_of_it == 1 else 'wait'} for it, and it waits for none"
    return f"{still}: {wait}{where}"


def _wait_table(ranks: Sequence[Seen]) -> tuple[str, ...]:
    """Render one line per rank, in columns: the ranks that it waits for, its operation, and its line of code."""
    rows = [_row(one, ranks) for one in ranks]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    more = [f"and {counted(len(rows) - _MOST_ROWS, 'more rank')}"] if len(rows) > _MOST_ROWS else []
    return tuple(line.rstrip() for line in [*lines[:_MOST_ROWS], *more])


def _row(one: Seen, ranks: Sequence[Seen]) -> tuple[str, str, str, str]:
    state, operation = describe_wait(one, ranks)
    if one.is_done and not one.is_stopped:
        return one.name, state, "", ""
    if not operation and not one.is_stopped:
        operation = _python_frame(one)
    return one.name, state, operation, short_place(one.place) if one.place else ""


def describe_wait(one: Seen, ranks: Sequence[Seen]) -> tuple[str, str]:
    """Say for whom a rank waits, such as `waits for rank 2`, and in which operation, which is empty if it is in none."""
    wait = one.waiting
    if one.is_stopped:
        return "is stopped", ""
    if one.is_done:
        return "is done", ""
    if one.recording is None:
        return "is starting" if one.is_starting else "has no flight recorder", ""
    if wait is None:
        return "waits for none", ""
    if wait.is_collective:
        return _whom(peers_of(one, ranks)), describe_collective(wait)
    bucket = f", bucket {wait.bucket}" if wait.bucket >= 0 else ""
    step = f", step {wait.step}" if wait.step else ""
    what = f"{VERBS[wait.verb]} of {render_size(wait.nbytes)}, {wait.name}, tag {wait.tag}{bucket}{step}"
    return _whom(peers_of(one, ranks)), what


def _python_frame(one: Seen) -> str:
    return f"in `{one.stack[0].function}`" if one.stack else "does not answer"


def _whom(peers: Sequence[int]) -> str:
    if not peers:
        return "waits for rank ?"
    more = ", …" if len(peers) > _MOST_PEERS else ""
    named = ", ".join(str(rank) for rank in peers[:_MOST_PEERS])
    return f"waits for rank{'s' if len(peers) > 1 else ''} {named}{more}"
