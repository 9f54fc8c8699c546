"""Choose the rank that stands apart, if no flight recorder says which rank the others wait for.

Ranks of a program that is no recipe have no flight recorders, and a recipe may call MPI or torch directly. Then all that is
known is the line that each rank has reached and what the kernel says about its process. If most ranks are at one place, the
rank that is elsewhere holds them up, and so does one that lost a thread to an exception. Without such a majority, it is the rank that does not wait in MPI while all others do.
The functions are pure: they judge one snapshot.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ttlaunch.running.flight_recorders import short_place
from ttlaunch.running.hang.stacks import frame_to_report, own_frames
from ttlaunch.running.hang.waits import Seen


class _Standing(NamedTuple):
    """Where a rank is and what it does; equal for ranks that do the same.

    Attributes:
        kind: `ended`, `exiting`, `program` (another one than that of most ranks), `place` (a line), `process` or `unknown`.
        key: What tells ranks of one kind apart, such as the lines of the user's code.
    """

    kind: str
    key: tuple[str, ...] = ()


_GONE = {"ended", "exiting", "program"}
"""The standings of ranks that will never do what other ranks wait for."""


def find_odd_one(ranks: Sequence[Seen]) -> Seen | None:
    """Return the rank that stands apart; None if none does, or if it cannot be told which."""
    broken = [one for one in ranks if one.thread_error]
    if len(broken) == 1 or len(ranks) == 1:
        return (broken or ranks)[0]
    standing, number = _standings(ranks), len(ranks)
    if any(one.kind == "place" for one in standing.values()):
        # A rank that waits in MPI and whose stack could not be read in time may be at any place of the others.
        ranks = [one for one in ranks if standing[one.rank] != _Standing("process", ("polls", ""))]
    most, count = Counter(standing[one.rank] for one in ranks).most_common(1)[0]
    rest = [one for one in ranks if standing[one.rank] != most]
    if not rest:
        return None
    candidates = rest if 2 * count > len(ranks) and 2 * len(ranks) > number else ranks
    polling = {one.rank for one in ranks if one.process and one.process.does == "polls"}
    not_polling = [one for one in candidates if one.process and polling and one.rank not in polling]
    gone = [one for one in candidates if standing[one.rank].kind in _GONE]
    return next((found[0] for found in (candidates, not_polling, gone) if len(found) == 1), None)


def describe_crowd(ranks: Sequence[Seen]) -> str:
    """Describe in a clause how ranks stand of which none is to be named; empty if nothing is known of them."""
    standings = set(_standings(ranks).values())
    if standings == {_Standing("unknown")}:
        return ""
    return "all of them are at the same place" if len(standings) == 1 else "no single rank stands apart"


def _standings(ranks: Sequence[Seen]) -> dict[int, _Standing]:
    """Return the standing of each rank."""
    programs = Counter(one.process.program for one in ranks if one.process)
    # Of two ranks with different programs, the one that has a stack runs the program that was started.
    programs.update(one.process.program for one in ranks if one.process and one.stack)
    usual = programs.most_common(1)[0][0] if programs else ""
    return {one.rank: _standing(one, usual) for one in ranks}


def _standing(one: Seen, usual: str) -> _Standing:
    own = own_frames(one.stack) or one.stack
    if one.has_left:
        return _Standing("ended")
    if own:
        return _Standing("place", tuple(frame.place for frame in own))
    if one.process is None:
        return _Standing("unknown")
    if one.process.program != usual:
        return _Standing("program", (one.process.program,))
    if _is_exiting(one):
        return _Standing("exiting")
    return _Standing("process", (one.process.does, one.process.waits_in if one.process.does == "waits" else ""))


def _is_exiting(one: Seen) -> bool:
    """Whether a rank's interpreter has shut down, so that the process is in an exit handler of C such as `MPI_Finalize`.

    Shims enable Python's fault handler, and the interpreter disables it as one of its last acts.
    """
    process = one.process
    return process is not None and _program(one).startswith("python") and not process.catches_crashes


def describe_place(one: Seen) -> str:
    """Describe in a clause where a rank is: its line, or without a stack, what its process is and does."""
    frame = frame_to_report(one.stack)
    if frame is not None:
        inner = one.stack[0]
        where = f"is in `{frame.function}` at {short_place(frame.place)}"
        return where if inner == frame else f"{where}, in `{inner.function}` at {short_place(inner.place)}"
    if one.has_left:
        return "has ended"
    if one.process is None:
        return "is at a place that cannot be read"
    if _is_exiting(one):
        return "has left its program and waits while it exits, as in MPI_Finalize"
    asleep = f"sleeps in `{one.process.waits_in}` of the kernel" if one.process.waits_in else "sleeps"
    does = {"polls": "makes system calls all the time, as a wait in MPI does", "computes": "computes"}
    return f"runs `{_program(one)}` without a Python stack and {does.get(one.process.does, asleep)}"


def _program(one: Seen) -> str:
    return (one.process.program.rpartition("/")[2] or one.process.name) if one.process else ""
