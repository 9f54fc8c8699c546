"""Find which rank failed first, and how: classify every ending, then order by class and time.

Sorting by time alone blames the wrong rank, because the ends of ranks that lose their peer can be recorded before the end
of the rank that was killed. So a rank's own exception, a crash or a signal from outside takes precedence over an ending
that follows from another rank.
"""

import math
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from ttlaunch.engines.base import EngineReport
from ttlaunch.errors import Trouble
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.endings import ErrorInFlight, RankError, RankExit
from ttlaunch.running.failures.causes import Cause, LostPeer, classify_ending, classify_exception, lost_peer
from ttlaunch.running.failures.failure import Failure, Follower
from ttlaunch.running.failures.name_cause import (
    name_early_exit,
    name_ending,
    name_exception,
    name_lost_daemon,
    name_lost_folder,
    name_lost_shim,
    next_step,
)
from ttlaunch.running.failures.stderr_tail import StderrTail
from ttlaunch.running.lost_folders import LostFolder, describe_loss
from ttlaunch.running.lost_hosts import NEXT_STEP, RANK_WENT_WITH_HOST, LostHost, loss_message, loss_notes
from ttlaunch.running.watch import Phase, RankState

_HAS_OWN_CAUSE, _GIVES_NO_CAUSE, _LEFT, _IN_FLIGHT, _REFUSED, _PERHAPS_OWN, _FOLLOWS = range(7)
"""The order in which endings are reported: with a cause of their own, with only an exit status, with status 0 before the others
failed, with an exception that the rank might still have caught, with a refused connection that may be to anybody, with a lost one,
caused by another rank. A connection that is refused was not there before, so nobody's end explains it as well as a lost one."""
_WITHOUT_CAUSE_S = 4.0  # for as long as all that failed have only lost a connection
# While the rank that closed it is known to be still ending: ending its libraries takes seconds on a busy machine.
_LEAVING_S = 15.0
_LEFT_JUST_NOW_S = 2.0
EXIT_TAKES_S = 1.0
"""For how long the connections of a rank may have been closed before its end is noted."""
_BY_SIGNAL = {Cause.KILLED, Cause.ENDED, Cause.SHIM_LOST, Cause.DAEMON_LOST}
"""The classes of endings that the end of a Slurm job explains."""
_AFTER_JOB = "start it again to ask Slurm for other hosts; a recipe continues with `--resume latest`"
_NEEDS_FOLDERS = {Cause.IMPORT_ERROR, Cause.SHIM_LOST, Cause.DAEMON_LOST, Cause.NOT_STARTED}
"""The classes of endings that a removed folder explains."""
_OUT_OF_MEMORY_TOGETHER_S = 2.0  # the kernel takes that long to free a killed rank of many gigabytes


@dataclass(frozen=True)
class Witnesses:
    """Evidence besides the records of the ranks.

    Attributes:
        stderr_tail: Returns the end of a rank's log.
        engine: What the engine's own output reports.
        launcher: The name of the engine's process in messages, such as `mpirun`.
        ending_since: When the supervisor asked the engine to end the remaining ranks, seconds since the epoch; None if it did not.
        killing_since: When the supervisor began to kill the remaining ranks, seconds since the epoch; None if it did not.
        stood_still_s: The longest time for which the supervisor did not run, because it or its whole machine was suspended.
    """

    stderr_tail: Callable[[int], StderrTail] = lambda _: StderrTail()
    engine: EngineReport = field(default_factory=EngineReport)
    launcher: str = ""
    ending_since: float | None = None
    killing_since: float | None = None
    stood_still_s: float = 0.0


class _Candidate(NamedTuple):
    order: int
    failure: Failure


def first_failure(
    ranks: list[RankState],
    *,
    lost_shims: Mapping[int, float],
    lost_hosts: Mapping[str, LostHost] | None = None,
    lost_folders: Mapping[str, LostFolder] | None = None,
    stopped: bool,
    witnesses: Witnesses | None = None,
) -> Failure | None:
    """Find the failure that caused the others; None if no rank failed.

    Args:
        ranks: All ranks, after their endings were read.
        lost_shims: Ranks whose shim is gone without a record, with the time at which this was noticed.
        lost_hosts: Lost hosts by name. The time of such a failure is that of the last frame from the host.
        lost_folders: Folders of the run that were removed, by host. A folder without which a run may complete is named only for
            a failure that its loss explains.
        stopped: Whether the launcher was ordered to end the run, or ends it itself; endings by its signals are then no failures.
        witnesses: Logs and other evidence; None if there is none.
    """
    seen = witnesses or Witnesses()
    hosts = {state.row.host for state in ranks}
    candidates = [_lost_host(lost, ranks, seen) for lost in (lost_hosts or {}).values()]
    for state in ranks:
        rank = state.row.rank
        lost = lost_shims.get(rank)
        # A shim that was killed before it recorded its process can only be known from the engine's output.
        if lost is None and rank in seen.engine.killed_shims and not state.started:
            lost = seen.killing_since or math.inf
        candidates += _of_rank(state, lost, seen, stopped=stopped, hosts=hosts)
    folders = {} if stopped else lost_folders or {}
    candidates += [
        _Candidate(_HAS_OWN_CAUSE, name_lost_folder(host, lost, ranks))
        for host, lost in folders.items()
        if lost.ends_run
    ]
    leaving = [state for state in ranks if _was_leaving(state)]
    candidates += _left(candidates, ranks, seen, leaving=leaving) if not stopped else []
    if not candidates:
        return None
    candidates = _without_ends_of_job(_without_shims_killed_later(candidates), lost_hosts or {})
    first = min(candidates, key=lambda one: (one.order, one.failure.time or 0.0)).failure
    first = _largest_out_of_memory(first, candidates, ranks)
    first = _with_only_peer(first, candidates, ranks)
    first = _follows_from_folder(first, folders, ranks)
    followers = _followers(first, candidates, ranks, lost_hosts=lost_hosts or {})
    last_lines = seen.stderr_tail(first.rank).lines if first.rank is not None else ()
    hint = first.next_step or next_step(first)
    return replace(first, followers=followers, last_lines=last_lines, next_step=hint)


def patience_for_cause_s(ranks: Sequence[RankState], stderr_tail: Callable[[int], StderrTail]) -> float:
    """Return for how long after the first failure to wait for the rank that caused it; 0 if that is known, or all ranks have ended.

    Ranks that lose a connection may end seconds before the rank that closed it, whose interpreter takes longer to come to its end.
    """
    ranks = [state for state in ranks if state.phase is not Phase.ABSENT]
    if all(state.exit for state in ranks):
        return 0.0
    hosts, seen = {state.row.host for state in ranks}, Witnesses(stderr_tail=stderr_tail)
    found = [one for state in ranks for one in _of_rank(state, None, seen, stopped=False, hosts=hosts)]
    pending = [state for state in ranks if state.exit is None and state.error is None]
    found += [one for state in pending for one in _of_lost(state, None, seen, hosts=hosts)]
    if any(one.order < _REFUSED for one in found + _left(found, ranks, seen)):
        return 0.0
    silent = [state for state in pending if state.in_flight is None or state.in_flight.error is None]
    is_leaving = any(state.in_flight and state.in_flight.left for state in silent)
    is_found = len(silent) == 1 and all(
        one.order == _FOLLOWS for one in found
    )  # nobody else can have closed the connections
    return _LEAVING_S if is_leaving or is_found else _WITHOUT_CAUSE_S


def _of_rank(
    state: RankState, lost: float | None, seen: Witnesses, *, stopped: bool, hosts: Collection[str]
) -> list[_Candidate]:
    """Return the failure of one rank as the only candidate, or nothing if it has not failed."""
    rank, ending = state.row.rank, state.exit
    if state.error is not None:
        return [_of_exception(state, state.error, hosts, is_certain=True)]
    if ending is not None and ending.is_failure:
        by_us = stopped or (seen.killing_since is not None and ending.time > seen.killing_since)
        tail, gave_up = seen.stderr_tail(rank), rank in seen.engine.gave_up
        kind = classify_ending(ending, tail, by_us=by_us, lost_peer=gave_up)
        if stopped and kind is Cause.ENDED:
            return []
        written = _ended_by(state.in_flight, ending, kind, gave_up=gave_up)
        if written is not None:
            is_certain = state.in_flight is None or state.in_flight.is_certain
            return [_of_exception(state, written, hosts, is_certain=is_certain)]
        has_no_cause = kind is Cause.EXITED and tail.raised is None
        order = _FOLLOWS if kind.follows else _GIVES_NO_CAUSE if has_no_cause else _HAS_OWN_CAUSE
        return [_Candidate(order, name_ending(state, ending, tail, kind=kind))]
    return [] if ending is not None or stopped else _of_lost(state, lost, seen, hosts=hosts)


def _of_lost(state: RankState, lost: float | None, seen: Witnesses, *, hosts: Collection[str]) -> list[_Candidate]:
    """Return the failures of a rank of whose end there is no record: it was lost with its shim, or had failed before that."""
    candidates, in_flight = [], state.in_flight
    if in_flight is not None and in_flight.error is not None:
        candidates.append(_of_exception(state, in_flight.error, hosts, is_certain=in_flight.is_certain))
    if lost is not None:
        by_daemon = seen.engine.lost_daemon and state.row.rank not in seen.engine.killed_shims
        named = name_lost_daemon(state, lost, launcher=seen.launcher) if by_daemon else name_lost_shim(state, lost)
        candidates.append(_Candidate(_HAS_OWN_CAUSE, named))
    return candidates


def _of_exception(state: RankState, error: RankError, hosts: Collection[str], *, is_certain: bool) -> _Candidate:
    lost, kills = lost_peer(error, hosts=hosts), (state.exit.oom_kills if state.exit else None) or 0
    kind = classify_exception(error.type, error.message, lost=lost is LostPeer.YES, oom_kills=kills)
    order = _HAS_OWN_CAUSE if is_certain else _IN_FLIGHT
    if kind.follows or (kind is Cause.RAISED and lost is LostPeer.PERHAPS):
        was_refused = any(cause.type == "ConnectionRefusedError" for cause in error.causes or ())
        order = _FOLLOWS if kind.follows else _REFUSED if was_refused else _PERHAPS_OWN
    return _Candidate(order, name_exception(state, error, kind))


def _ended_by(in_flight: ErrorInFlight | None, ending: RankExit, kind: Cause, *, gave_up: bool) -> RankError | None:
    """Return the exception that a rank wrote down last, if the rank ended by it.

    A rank that was still cleaning up has failed by it if it was then ended with the run, or if MPI gave up in it meanwhile.
    """
    if in_flight is None:
        return None
    was_ended = kind is Cause.ENDED or gave_up
    is_uncaught = in_flight.uncaught and not ending.signal and bool(ending.status)
    return in_flight.error if was_ended or is_uncaught else None


def _left(
    candidates: list[_Candidate], ranks: Sequence[RankState], seen: Witnesses, *, leaving: Sequence[RankState] = ()
) -> list[_Candidate]:
    """Find a rank that left with status 0 while the others still needed it.

    The engine may say so. Otherwise it is the last rank that left before the first one failed, if no failure has a cause of
    its own: then something has to explain why these ranks lost their peer. A rank whose lost connection may be to anybody
    needs this explanation only if the other one has just left. `leaving` are ranks that have run all of their code and had not ended.
    """
    gone = [state for state in ranks if state.exit is not None and not state.exit.is_failure]
    named = [state for state in gone if state.row.rank in seen.engine.left_early]
    if named:
        return [_Candidate(_HAS_OWN_CAUSE, name_early_exit(state, _left_at(state))) for state in named]
    if not candidates or any(one.order < _LEFT for one in candidates):
        return []
    first = min(one.failure.time or math.inf for one in candidates)
    needs_one = all(one.order == _FOLLOWS for one in candidates)
    times = {_left_at(state): state for state in [*gone, *leaving]}
    last = max((time for time in times if time <= first), default=None)
    # The others may have noticed its closed connections before it had come to its end, and a busy machine notes this end late. Only
    # of a rank that has written when it left is the time exact. A rank that we have told to end is no cause.
    ours = math.inf if seen.ending_since is None else seen.ending_since
    late = {
        time
        for time, state in times.items()
        if time <= (ours if needs_one or not _has_left(state) else min(ours, first + EXIT_TAKES_S))
    }
    last = last or min(late, default=None)
    if last is None or (first - last > _LEFT_JUST_NOW_S and not needs_one):
        return []
    return [_Candidate(_LEFT, name_early_exit(times[last], last))]


def _was_leaving(state: RankState) -> bool:
    """Whether all code of a rank's program has run without an exception, and the rank was ended with the run or is still there."""
    has_no_error = state.in_flight is not None and state.in_flight.error is None
    ending = state.exit
    return has_no_error and _has_left(state) and (ending is None or ending.signal in {signal.SIGTERM, signal.SIGKILL})


def _has_left(state: RankState) -> bool:
    """Whether a rank has written that all of its code had run, as any Python program does that ends in the usual way."""
    return state.in_flight is not None and state.in_flight.left is not None


def _left_at(state: RankState) -> float:
    """Return when a rank that ended by itself began to exit, as far as it is known."""
    began = state.in_flight.left if state.in_flight else None
    return began or (state.exit.time if state.exit else math.inf)


def _without_shims_killed_later(candidates: list[_Candidate]) -> list[_Candidate]:
    """Leave out shims that were lost after a rank had failed: the engine kills shims that do not exit in time."""
    broke = [one.failure.time or 0.0 for one in candidates if one.order != _FOLLOWS and not _is_lost_shim(one)]
    return [
        one for one in candidates if not _is_lost_shim(one) or (one.failure.time or 0.0) <= min(broke, default=math.inf)
    ]


def _without_ends_of_job(candidates: list[_Candidate], lost_hosts: Mapping[str, LostHost]) -> list[_Candidate]:
    """Leave out killed ranks if Slurm has ended the job: it signals all processes of a job, and their ends may be noticed first."""
    if not any(lost.error.trouble is Trouble.ENDED for lost in lost_hosts.values()):
        return candidates
    return [one for one in candidates if one.failure.kind not in _BY_SIGNAL]


def _is_lost_shim(candidate: _Candidate) -> bool:
    return candidate.failure.kind in {Cause.SHIM_LOST, Cause.DAEMON_LOST}


def _largest_out_of_memory(first: Failure, candidates: list[_Candidate], ranks: list[RankState]) -> Failure:
    """If ranks ran out of memory together, choose the one that used most: the kernel may kill a smaller one first."""
    if first.kind is not Cause.OUT_OF_MEMORY or first.time is None:
        return first
    used_bytes = {state.row.rank: float((state.exit.peak_memory_bytes if state.exit else None) or 0) for state in ranks}
    together = [
        one.failure
        for one in candidates
        if (one.failure.kind, one.failure.host) == (first.kind, first.host)
        and (one.failure.time or math.inf) - first.time < _OUT_OF_MEMORY_TOGETHER_S
    ]
    return max(together, key=lambda failure: -1.0 if failure.rank is None else used_bytes.get(failure.rank, 0.0))


def _with_only_peer(first: Failure, candidates: list[_Candidate], ranks: list[RankState]) -> Failure:
    """If all ranks but one have lost a connection, add which one: it may have closed its connections and gone on."""
    lost = {one.failure.rank: one for one in candidates if _lost_connection(one)}
    rest = [state for state in ranks if state.row.rank not in lost]
    if first.rank not in lost or len(rest) != 1:
        return first
    row, what = rest[0].row, "peer" if first.kind is Cause.LOST_PEER else "connection"
    note = (
        f"rank {row.rank} ({row.role}, {row.host}) is the only one that lost no {what}, so the others may have lost it"
    )
    return replace(first, evidence=(*first.evidence, note))


def _lost_connection(candidate: _Candidate) -> bool:
    return candidate.failure.kind is Cause.LOST_PEER or candidate.order in {_REFUSED, _PERHAPS_OWN}


def _lost_host(lost: LostHost, ranks: list[RankState], seen: Witnesses) -> _Candidate:
    """Return the failure of a lost host, in place of failures of its ranks, whose endings are unknown."""
    host = lost.error.host
    its_ranks = [state for state in ranks if state.row.host == host]
    step = max((state.step for state in its_ranks), default=0)
    job_is_over = lost.error.trouble is Trouble.ENDED
    failure = Failure(
        code="R012",
        kind=Cause.HOST_LOST,
        host=host,
        step=step or None,
        cause=loss_message(lost),
        time=lost.last_heard,
        evidence=loss_notes(lost, its_ranks, stood_still_s=seen.stood_still_s),
        next_step=_AFTER_JOB if job_is_over else NEXT_STEP,
        comes_again=job_is_over,  # the hosts are no longer ours
    )
    return _Candidate(_HAS_OWN_CAUSE, failure)


def _follows_from_folder(first: Failure, folders: Mapping[str, LostFolder], ranks: list[RankState]) -> Failure:
    """Return the loss of a folder in place of a failure that follows from it; any other failure gets a note about the loss."""
    for host, lost in folders.items():
        text = " ".join((first.cause, *first.evidence))
        if lost.ends_run or host not in {"", first.host}:
            continue
        if first.kind in _NEEDS_FOLDERS or lost.path in text:
            return name_lost_folder(host, lost, ranks)
        first = replace(first, evidence=(*first.evidence, f"meanwhile {describe_loss(host, lost)}"))
    return first


def _followers(
    first: Failure, candidates: list[_Candidate], ranks: list[RankState], *, lost_hosts: Mapping[str, LostHost]
) -> tuple[Follower, ...]:
    """Return the other ranks that did not finish, in the order in which they ended."""
    known = {one.failure.rank: one.failure for one in candidates if one.failure.rank is not None}
    found = []
    for state in ranks:
        rank, role = state.row.rank, state.row.role
        failure = known.get(rank)
        if rank == first.rank or (state.exit is not None and not state.exit.is_failure):
            continue
        if state.row.later and state.started is None:
            continue  # nobody had to start in place of another worker
        if failure is not None:
            found.append(Follower(kind=failure.kind, rank=rank, role=role, cause=failure.cause, time=failure.time))
        elif state.row.host in lost_hosts:
            found.append(Follower(kind=Cause.FENCED, rank=rank, role=role, cause=RANK_WENT_WITH_HOST))
        else:
            found.append(Follower(kind=Cause.ENDED, rank=rank, role=role, cause="was ended with the run"))
    return tuple(sorted(found, key=lambda one: (one.time is None, one.time or 0.0, one.rank)))
