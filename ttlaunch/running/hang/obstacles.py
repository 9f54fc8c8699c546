"""Name what holds up a run although no rank does: a stopped process beside the ranks, or a network that carries nothing.

The functions are pure: they judge one snapshot.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from ttlaunch.diagnostics.count import counted, render_duration
from ttlaunch.records.agents import StoppedHelper
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure, rank_failure
from ttlaunch.running.rank_controller import ProcessSnapshot
from ttlaunch.running.watch import RankState

_MOST_NAMED = 8


def find_obstacle(snapshot: ProcessSnapshot, ranks: Sequence[RankState], *, quiet_s: float) -> Failure | None:
    """Return the failure of a run that hangs on something beside its ranks; None if nothing beside them stands still."""
    if snapshot.helpers:
        # A shim or a child names a rank, which says more than a process of the engine.
        host, helper = min(snapshot.helpers, key=lambda pair: (pair[1].rank is None, not pair[1].is_shim))
        return _stopped(host, helper, ranks, quiet_s=quiet_s)
    return _cut(snapshot.cuts, ranks) if snapshot.cuts else None


def _stopped(host: str, helper: StoppedHelper, ranks: Sequence[RankState], *, quiet_s: float) -> Failure:
    since = f"was stopped by a signal, and nobody resumed it within {render_duration(quiet_s)}"
    hint = f"`kill -CONT {helper.pid}` {f'on {host} ' if host else ''}continues a stopped process"
    # None also for a worker that may come to an elastic run, and that has not come as far as the launcher knows.
    row = next((state.row for state in ranks if state.row.rank == helper.rank), None)
    if row is not None:
        what = f"its shim (process {helper.pid})" if helper.is_shim else f"its child {_named(helper)}"
        cause = f"cannot go on: {what} {since}"
        return rank_failure(row, code="R013", kind=Cause.HUNG, cause=cause, time=time.time(), next_step=hint)
    hosts = {state.row.host for state in ranks}
    where = host or (next(iter(hosts)) if len(hosts) == 1 else "")
    cause = (
        f"{_named(helper)} {f'on {host}' if host else 'on this machine'}, a process of the launcher of ranks, {since}"
    )
    affected = [state.row.rank for state in ranks if state.row.host == host]
    evidence = (f"it started {_ranks(affected)}",) if affected else ()
    return Failure(
        code="R064",
        kind=Cause.HUNG,
        host=where or None,
        cause=cause,
        time=time.time(),
        evidence=evidence,
        next_step=hint,
    )


def _cut(cuts: Mapping[tuple[str, str], int], ranks: Sequence[RankState]) -> Failure:
    """Make the failure of a network that carries nothing: of the host in most pairs, else of the one that does not answer."""
    (sender, silent), attempts = max(cuts.items(), key=lambda pair: pair[1])
    involved = Counter(host for pair in cuts for host in pair)
    host = max((silent, sender), key=lambda one: involved[one])
    evidence = [f"{b} has not acknowledged what {a} has sent it {counted(n + 1, 'time')}" for (a, b), n in cuts.items()]
    for one in (sender, silent):
        here = [state.row.rank for state in ranks if state.row.host == one]
        evidence += [f"on {one}: {_ranks(here)}"] if here else []
    return Failure(
        code="R065",
        kind=Cause.HUNG,
        host=host,
        cause=f"the network between {sender} and {silent} carries nothing, at least not in one direction: "
        f"{silent} has not acknowledged what {sender} has sent it {counted(attempts + 1, 'time')}",
        time=time.time(),
        evidence=tuple(evidence[:_MOST_NAMED]),
        next_step="`ttlaunch doctor --on NAME` tries the network between the hosts",
    )


def _named(helper: StoppedHelper) -> str:
    name = f"`{helper.name}`" if helper.name else f"the shim of rank {helper.rank}"
    return f"{name} (process {helper.pid})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:_MOST_NAMED]))}{', …' if len(ranks) > _MOST_NAMED else ''}"
