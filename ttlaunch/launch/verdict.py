"""Which rank a run hangs on, and why: the one that others wait for and that waits for none, or the first mismatch of a cycle.

Pure: from what was seen of all ranks at one moment, at which none had moved for long.
"""

from collections.abc import Sequence

from ttlaunch.black_box import VERBS
from ttlaunch.diagnostics.count import counted
from ttlaunch.launch.boxes import short_place, sized
from ttlaunch.launch.causes import Cause
from ttlaunch.launch.failure import Failure
from ttlaunch.launch.stacks import recipe_frame
from ttlaunch.launch.waits import Seen, find_cycle, is_under_way, other_tags, peers_of, waiters

_MOST_ROWS = 24


def judge(ranks: Sequence[Seen], *, quiet_s: float, now: float) -> Failure:
    """The failure to report.

    Args:
        ranks: All of a run, in order.
        quiet_s: How long nothing has moved.
        now: Seconds since the epoch.
    """
    waiting = waiters(ranks)
    stopped = [one for one in ranks if one.is_stopped]
    free = [one for one in ranks if not one.is_done and not peers_of(one, ranks)]
    by_weight = sorted(stopped or free, key=lambda one: (-len(waiting[one.rank]), *_progress(one)))
    if stopped:
        code, one = "R013", by_weight[0]
        cause = f"was stopped by a signal, and nobody let it go on within {quiet_s:.0f} s"
    elif free:
        code, one = "R014", by_weight[0]
        cause = _standing_still(one, ranks, len(waiting[one.rank]), quiet_s)
    else:
        code, one, cause = _mismatch(ranks)
    return Failure(
        code=code,
        rank=one.rank,
        role=one.role,
        host=one.host,
        step=_step(one),
        cause=cause,
        time=now,
        place=one.place,
        evidence=render_waits(ranks),
        kind=Cause.HUNG,
    )


def _progress(one: Seen) -> tuple[float, ...]:
    """How far a rank has come; of equals, first the one that has been at it for longest."""
    steps, passes = (one.box.steps, one.box.passes) if one.box else (0, 0)
    return (steps, passes, -(one.idle_s or 0.0), one.rank)


def _step(one: Seen) -> int | None:
    """The step that it is in; None before the first."""
    if one.box is None:
        return None
    last = one.box.operations[-1].step if one.box.operations else 0
    return (one.waiting.step if one.waiting else max(last, one.box.steps + bool(one.box.steps))) or None


def _standing_still(one: Seen, ranks: Sequence[Seen], waiters_of_it: int, quiet_s: float) -> str:
    still = f"has not moved for {quiet_s:.0f} s"
    frame = recipe_frame(one.stack)
    where = f", in `{frame.function}` at {short_place(frame.place)}" if frame else ""
    if not one.stack:
        where = ", and did not say where it is"
    if len(ranks) == 1:
        return f"{still}{where}"
    if not waiters_of_it:
        return f"{still}, nor has any other rank, and it is the furthest behind{where}"
    others = counted(waiters_of_it, "rank")
    wait = f"{others} {'waits' if waiters_of_it == 1 else 'wait'} for it, and it waits for none"
    return f"{still}: {wait}{where}"


def _mismatch(ranks: Sequence[Seen]) -> tuple[str, Seen, str]:
    """Every rank waits, so some wait for each other: the first of them, by when it began to wait, and what is wrong there."""
    cycle = [ranks[rank] for rank in find_cycle(ranks)]
    by_age = sorted((one for one in cycle if one.waiting), key=lambda one: -(one.idle_s or 0.0))
    for one in by_age:
        peer = ranks[peers_of(one, ranks)[0]]
        wait, tags = one.waiting, other_tags(one, peer)
        assert wait is not None  # noqa: S101 - chosen by it
        if tags:
            named = ", ".join(str(tag) for tag in tags[:3])
            return "R016", one, f"waits for tag {wait.tag} of {peer.name}, which has sent it tag {named} instead"
        if peer.is_done and not is_under_way(one, peer):
            what = f"until {peer.name} receives" if wait.is_send else f"for a message of {peer.name}"
            return "R016", one, f"waits {what}, which is done"
    first = by_age[0] if by_age else cycle[0]
    return "R015", first, _circle(first, cycle)


def _circle(first: Seen, cycle: Sequence[Seen]) -> str:
    at = cycle.index(first)
    ordered = [*cycle[at:], *cycle[:at]]
    ring = " → ".join(str(one.rank) for one in (*ordered, first))
    waits = [one.waiting for one in ordered if one.waiting]
    if any(is_under_way(one, other) for one, other in zip(ordered, [*ordered[1:], first], strict=True)):
        why = "a message that both ends have begun does not arrive"
    elif all(not wait.is_send for wait in waits):
        why = "all of them receive and none sends"
    elif all(wait.is_send for wait in waits):
        why = "all of them send and none receives"
    else:
        why = "some send while others receive something else"
    names = list(dict.fromkeys(wait.name for wait in waits))
    if len(names) > 1:
        parts = [f"rank {one.rank} in `{one.waiting.name}`" for one in ordered if one.waiting]
        why += f"; they are not in the same operation: {', '.join(parts[:4])}"
    return f"waits in a circle, {ring}: {why}"


def render_waits(ranks: Sequence[Seen]) -> tuple[str, ...]:
    """Who waits for whom, a line for each rank, in columns."""
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
    if one.box is None:
        return one.name, "has no black box", "", place
    if wait is None:
        inner = f"in `{one.stack[0].function}`" if one.stack else "does not answer"
        return one.name, "waits for none", inner, place
    bucket = f", bucket {wait.bucket}" if wait.bucket >= 0 else ""
    step = f", step {wait.step}" if wait.step else ""
    what = f"{VERBS[wait.verb]} of {sized(wait.nbytes)}, {wait.name}, tag {wait.tag}{bucket}{step}"
    return one.name, f"waits for rank {peers_of(one, ranks)[0] if peers_of(one, ranks) else '?'}", what, place
