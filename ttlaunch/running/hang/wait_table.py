"""Who waits for whom, as a table: a line for each rank of a run that hangs."""

from collections.abc import Sequence

from ttlaunch.diagnostics.count import counted
from ttlaunch.flight_recorder import VERBS
from ttlaunch.running.flight_recorders import called, short_place, sized
from ttlaunch.running.hang.waits import Seen, peers_of

_MOST_ROWS = 24
_MOST_PEERS = 4


def render_waits(ranks: Sequence[Seen]) -> tuple[str, ...]:
    """The lines, in columns."""
    rows = [_row(one, ranks) for one in ranks]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    more = [f"and {counted(len(rows) - _MOST_ROWS, 'more rank')}"] if len(rows) > _MOST_ROWS else []
    return tuple(line.rstrip() for line in [*lines[:_MOST_ROWS], *more])


def _row(one: Seen, ranks: Sequence[Seen]) -> tuple[str, str, str, str]:
    wait, place = one.waiting, short_place(one.place) if one.place else ""
    if one.is_stopped:
        return one.name, "is stopped", "", place
    if one.is_done:
        return one.name, "is done", "", ""
    if one.recording is None:
        return one.name, "is starting" if one.is_starting else "has no flight recorder", _inner(one), place
    if wait is None:
        return one.name, "waits for none", _inner(one), place
    if wait.is_collective:
        return one.name, _whom(peers_of(one, ranks)), called(wait), place
    bucket = f", bucket {wait.bucket}" if wait.bucket >= 0 else ""
    step = f", step {wait.step}" if wait.step else ""
    what = f"{VERBS[wait.verb]} of {sized(wait.nbytes)}, {wait.name}, tag {wait.tag}{bucket}{step}"
    return one.name, _whom(peers_of(one, ranks)), what, place


def _inner(one: Seen) -> str:
    return f"in `{one.stack[0].function}`" if one.stack else "does not answer"


def _whom(peers: Sequence[int]) -> str:
    if not peers:
        return "waits for rank ?"
    more = ", …" if len(peers) > _MOST_PEERS else ""
    named = ", ".join(str(rank) for rank in peers[:_MOST_PEERS])
    return f"waits for rank{'s' if len(peers) > 1 else ''} {named}{more}"
