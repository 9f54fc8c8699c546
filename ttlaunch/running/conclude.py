"""Find the result of a run that is over: its first failure, if there is one, and its exit status."""

import errno
import math
import re
import signal
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import field, replace

from ttlaunch import contract
from ttlaunch.diagnostics.suggest import listed
from ttlaunch.engines.base import Engine
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.endings import RankExit, read_output_note
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import moved_back
from ttlaunch.running.failures.attribution import EXIT_TAKES_S, Witnesses, first_failure
from ttlaunch.running.failures.audited import audited_failure
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.difference import replica_failure
from ttlaunch.running.failures.divergence import divergence, with_first_micro_batch
from ttlaunch.running.failures.failure import Failure, Follower, rank_failure
from ttlaunch.running.failures.name_cause import name_lost_folder
from ttlaunch.running.failures.stderr_tail import read_stderr_tail, stderr_tails
from ttlaunch.running.flight_recorders import read_recorders
from ttlaunch.running.hang.departure import find_departure
from ttlaunch.running.logs.output import FROM_A_RANK
from ttlaunch.running.lost_folders import LostFolder
from ttlaunch.running.lost_hosts import RANK_WENT_WITH_HOST, Losses, LostHost
from ttlaunch.running.replicas import ReplicaWatch, find_difference
from ttlaunch.running.report import Report, make_report
from ttlaunch.running.runs.files import Tail, read_text_if_any
from ttlaunch.running.runs.launcher import TIME_LIMIT_SIGNAL
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.single_trainings import single_trainings
from ttlaunch.running.watch import Phase, RankState, Watch
from ttlaunch.system_reason import system_reason

_NO_ROOM = "make room on that disk, or keep run folders on another with `--runs-dir DIR`"
_TAIL_LINES, _NOTE_BYTES = 12, 1 << 20


@dataclass
class Ending:
    """Why a run is being ended, and how far that has come.

    Attributes:
        signal_number: The signal by which a user ordered the end; None if nobody did.
        is_failing: Whether the run has failed, before an order to end or after it.
        after_step: The step after which all ranks of a recipe stop, once they have agreed on it.
        outstayed: Ranks that were still running when their grace period ended, with the seconds since the order to stop.
        since: When the end began, on the monotonic clock; None while the run is not being ended.
        terminated: When the engine was asked to end, on the monotonic clock; None before.
        ending_since: The same in seconds since the epoch.
        killed: Whether the engine was sent SIGKILL.
        killing_since: When the supervisor began to kill the remaining processes, seconds since the epoch.
        failure: A failure that the supervisor itself found: a hang, or an unusable run folder.
        stood_still_s: The longest time for which the supervisor, or the whole machine, did not run.
        tolerated, tolerated_hosts: Ranks whose end, and hosts whose loss, is no failure since other workers go on.
        lost_before_engine: Workers of an elastic run that were lost while its engine still ran, and without which nobody had gone on.
        too_late: Workers of an elastic run that were still starting when all steps were made, and that the supervisor ended.
        unusable: What to report if nothing but the run folder, which could no longer be written or read, had ended the run.
    """

    signal_number: int | None = None
    is_failing: bool = False
    after_step: int | None = None
    outstayed: dict[int, float] = field(default_factory=dict)
    since: float | None = None
    terminated: float | None = None
    killed: bool = False
    ending_since: float | None = None
    killing_since: float | None = None
    failure: Failure | None = None
    lost_shims: dict[int, float] = field(default_factory=dict)
    lost_hosts: dict[str, LostHost] = field(default_factory=dict)
    lost_folders: dict[str, LostFolder] = field(default_factory=dict)
    stood_still_s: float = 0.0
    tolerated: frozenset[int] = frozenset()
    tolerated_hosts: frozenset[str] = frozenset()
    lost_before_engine: frozenset[int] = frozenset()
    too_late: frozenset[int] = frozenset()
    unusable: Failure | None = None

    def note_losses(self, losses: Losses) -> None:
        """Add lost hosts and folders, and lost shims unless the run is being ended: ending a run kills shims."""
        if self.since is None:
            self.lost_shims.update(losses.shims)
        self.lost_hosts.update(losses.hosts)
        self.lost_folders.update(losses.folders)

    def note_unusable_folder(self, error: OSError, *, ends_run: bool = True) -> None:
        """Note that the run folder cannot be used; that is a reason to end a run, but not of an end that has begun."""
        self.unusable = self.unusable or folder_failure(error)
        if ends_run:
            self.failure = self.failure or self.unusable

    def tolerate(self, gone: frozenset[int], ranks: Iterable[RankState]) -> None:
        """Take the ends of these ranks, and the loss of hosts that have no others, for no failure, since others go on."""
        left = {state.row.host for state in ranks if state.phase is not Phase.ABSENT and state.row.rank not in gone}
        self.tolerated, self.tolerated_hosts = gone, frozenset(self.lost_hosts.keys() - left)

    @property
    def away(self) -> MutableMapping[str, LostHost]:
        """The hosts that are lost now; remove one that is back."""
        return self.lost_hosts

    @property
    def has_hung(self) -> bool:
        """Whether `failure` is a hang; a rank whose host was lost meanwhile had only fallen silent with it."""
        noticed = self.failure
        return noticed is not None and noticed.kind is Cause.HUNG and noticed.host not in self.fatal_lost_hosts

    def why_lost(self, state: RankState) -> str:
        """Return how a rank was lost that has left no record of its end, as a clause; empty if it was not."""
        if state.row.rank in self.lost_shims:
            return "was lost: its shim was killed"
        return RANK_WENT_WITH_HOST if state.row.host in self.lost_hosts else ""

    @property
    def fatal_shims(self) -> Mapping[int, float]:
        """The lost shims whose loss is a failure of the run."""
        return {rank: seen for rank, seen in self.lost_shims.items() if rank not in self.tolerated}

    @property
    def fatal_lost_hosts(self) -> Mapping[str, LostHost]:
        """The lost hosts whose loss is a failure of the run."""
        return {host: lost for host, lost in self.lost_hosts.items() if host not in self.tolerated_hosts}


def conclude(
    plan: LaunchPlan,
    folder: RunFolder,
    *,
    watch: Watch,
    ending: Ending,
    engine: Engine,
    returncode: int,
    duration_s: float,
    leftovers: int,
) -> Report:
    """Make the report of a run whose processes have all ended."""
    # A program that was sent SIGTERM may end in any way, so no ending of its ranks counts as a failure.
    obeyed = ending.signal_number and not ending.is_failing and not isinstance(plan.program, RecipeProgram)
    failure = None if obeyed else find_failure(folder, watch, ending, plan=plan, engine=engine, returncode=returncode)
    if failure is None and ending.signal_number is None:
        failure = divergence(watch.ranks, plan.as_json()["config"])
    failure = with_first_micro_batch(failure, watch.ranks, run_id=folder.run_id)
    failure = _beside_unusable_folder(failure, ending)
    status, exit_status = "done", contract.STATUS_DONE
    if ending.signal_number == signal.SIGINT:
        status, exit_status = "interrupted", contract.STATUS_INTERRUPTED
    elif ending.signal_number == TIME_LIMIT_SIGNAL:
        status, exit_status = "time limit", contract.STATUS_TIME_LIMIT
    elif ending.signal_number:
        status, exit_status = "terminated", contract.STATUS_TERMINATED
    elif failure is not None:
        status = "hung" if failure.kind is Cause.HUNG else "failed"
        exit_status = failure.kind.exit_status
    ended = watch.ranks if status != "done" else [state for state in watch.ranks if state.row.rank in ending.too_late]
    _mark_stopped(ended, failure)
    report = make_report(
        plan,
        folder,
        watch.ranks,
        status=status,
        exit_status=exit_status,
        duration_s=duration_s,
        failure=failure,
        leftovers=leftovers,
        complain=watch.bad.add,
    )
    return replace(report, lost_hosts={host: lost.last_heard for host, lost in ending.lost_hosts.items()})


def find_failure(
    folder: RunFolder, watch: Watch, ending: Ending, *, plan: LaunchPlan, engine: Engine, returncode: int
) -> Failure | None:
    """Find the failure to name: of a rank, the run folder, the engine, or of ranks whose parameters differ.

    If the run hung, the verdict on the hang is the failure: the supervisor itself ended the ranks.
    """
    if ending.has_hung:
        return ending.failure
    # Whatever happened after replicas began to differ may be a consequence.
    if wrong := compared_replicas(plan, watch.replicas) or audited_failure(plan, watch.audits):
        return wrong
    ordered = ending.signal_number is not None
    _note_aborts(folder, watch.ranks, plan, before=min(ending.lost_shims.values(), default=math.inf))
    lost_shims = {} if _engine_went_first(watch, ending, returncode) else ending.fatal_shims
    # Workers of an elastic run that others have gone on without are part of its history, not of its failure.
    ranks = [state for state in watch.ranks if state.row.rank not in ending.tolerated]
    # Daemons of a killed engine end the ranks on their hosts, whose shims record that.
    stopped = ordered or ending.failure is not None or (returncode < 0 and ending.terminated is None)
    watch.read_exceptions()
    witnesses = _witnesses(folder, ending, watch.ranks, engine=engine)
    failure = _before_unusable_folder(ranks, ending, witnesses) or _before_engine(ranks, ending, witnesses)
    failure = failure or first_failure(
        ranks,
        lost_shims=lost_shims,
        lost_hosts=ending.fatal_lost_hosts,
        lost_folders=ending.lost_folders,
        stopped=stopped,
        witnesses=witnesses,
    )
    failure = _before_end(failure, ending.failure)
    if failure is not None or ordered:
        return failure and _after_departure(failure, folder, watch.ranks)
    unfinished = [state for state in ranks if state.exit is None and state.phase is not Phase.ABSENT]
    is_bad = returncode < 0 or (
        returncode > 0 and not ending.tolerated
    )  # the engine has the status of a rank that failed
    if ending.lost_folders and (is_bad or unfinished):
        return name_lost_folder(*next(iter(ending.lost_folders.items())), watch.ranks)
    if is_bad or unfinished:
        outlived = [state for state in watch.ranks if state.row.rank in ending.tolerated]
        return _engine_failure(folder, engine, returncode, unfinished=unfinished, outlived=outlived)
    return different_parameters(plan, watch.ranks) or single_trainings(plan, watch.ranks)


def _before_end(failure: Failure | None, noticed: Failure | None) -> Failure | None:
    """Return what to report of a failure and the one for which the run was ended.

    A rank that had left explains the lost connections of others, which end by themselves while the run is ended. They may have
    noticed that its connections were closed a moment before its end was noted.
    """
    if failure is None or noticed is None or noticed.kind is not Cause.LEFT_EARLY:
        return failure or noticed
    is_later = (failure.time or math.inf) + EXIT_TAKES_S >= (noticed.time or 0.0)
    return noticed if is_later and failure.rank != noticed.rank else failure


def _before_engine(ranks: list[RankState], ending: Ending, witnesses: Witnesses) -> Failure | None:
    """Return the failure of a worker that was seen to be lost before its engine ended, which then ended the others with signals."""
    if ending.terminated is not None or ending.failure is not None:
        return None
    lost = [state for state in ranks if state.row.rank in ending.lost_before_engine]
    return first_failure(lost, lost_shims={}, stopped=False, witnesses=witnesses) if lost else None


def _before_unusable_folder(ranks: list[RankState], ending: Ending, witnesses: Witnesses) -> Failure | None:
    """Return the failure of a rank that ended before the run was ended because its folder could not be used.

    A full disk may first be met when somebody has to write that a rank has ended.
    """
    noticed = ending.unusable
    if noticed is None or ending.failure is not noticed or ending.signal_number is not None:
        return None
    ended = [state for state in ranks if state.exit is not None and state.exit.time < (noticed.time or 0.0)]
    return first_failure(ended, lost_shims={}, stopped=False, witnesses=witnesses)


def _after_departure(failure: Failure, folder: RunFolder, ranks: Sequence[RankState]) -> Failure:
    """Return the failure of the rank that called another collective operation than the others, if this one follows from that.

    Torch ends a rank whose peer sends another amount of data than it expects, and then the peer loses its connection. Only such
    ends follow from a wrong order; a rank that raised an exception of its own may have left the order because of it.
    """
    if failure.kind not in {Cause.CRASHED, Cause.LOST_PEER}:
        return failure
    recordings = read_recorders(folder.path, ranks=range(len(ranks)))
    broken = recordings.get(-1 if failure.rank is None else failure.rank)
    departure = find_departure(recordings) if broken and broken.waiting and broken.waiting.is_collective else None
    if departure is None:
        return failure
    row = ranks[departure.rank].row
    named = rank_failure(
        row, code="R037", kind=Cause.DEPARTED, cause=departure.cause, time=failure.time or 0.0, place=departure.place
    )
    first = Follower(
        kind=failure.kind,
        rank=failure.rank or 0,
        role=failure.role or "",
        cause=failure.cause,
        time=failure.time,
    )
    followers = tuple(one for one in (first, *failure.followers) if one.rank != row.rank)
    own = failure.rank == row.rank
    notes = (*([f"it {failure.cause}"] if own else []), *failure.evidence)
    return replace(named, followers=followers, evidence=notes, last_lines=failure.last_lines if own else ())


def _note_aborts(folder: RunFolder, ranks: Iterable[RankState], plan: LaunchPlan, *, before: float) -> None:
    """Note the end of each rank that had the engine end all ranks (MPI_Abort) before its shim could record that."""
    message = plan.engine.names.abort_message
    for state in ranks if message else ():
        rank = state.row.rank
        found = (
            re.search(message, read_stderr_tail(folder.file(contract.stderr_file(rank))).text)
            if state.exit is None
            else None
        )
        if found:
            status = int(found[1]) & 0xFF  # exit statuses have 8 bits
            state.exit = RankExit(
                rank=rank, time=_time_of_abort(folder, state, before), status=status, left_early=status == 0
            )


def _time_of_abort(folder: RunFolder, state: RankState, before: float) -> float:
    """Return when a rank wrote the line of its abort: before any shim was lost, because the engine kills shims only after it.

    The shim may have been killed before it noted the time. On this machine the log's own time is as good; the log of another host
    is a copy, which is newer than the loss of the shims may be.
    """
    notes = map(read_output_note, Tail(folder.file(contract.times_file(state.row.rank))).read(most=_NOTE_BYTES))
    times = [
        moved_back(note, state.clock_offset_s).time
        for note in notes
        if not isinstance(note, BadRecord) and note.stream == "stderr" and not note.is_over
    ]
    written = folder.file(contract.stderr_file(state.row.rank)).stat().st_mtime
    return max(times) if times else min(written, math.nextafter(before, 0.0))


def _witnesses(folder: RunFolder, ending: Ending, ranks: list[RankState], *, engine: Engine) -> Witnesses:
    statuses = {state.row.rank: state.exit.status if state.exit else None for state in ranks}
    return Witnesses(
        stderr_tail=stderr_tails(folder),
        engine=engine.read_output(_engine_stderr(folder), statuses),
        launcher=engine.signature.program,
        ending_since=ending.ending_since,
        killing_since=ending.killing_since,
        stood_still_s=ending.stood_still_s,
    )


def _engine_stderr(folder: RunFolder) -> str:
    return read_text_if_any(folder.file(f"{contract.LOGS_DIR}/{contract.ENGINE_PROCESS}.stderr"))


def _engine_went_first(watch: Watch, ending: Ending, returncode: int) -> bool:
    """Whether the engine ended before any rank, so that the failure is the engine's and not that of the shims it killed.

    If only a shim is killed, the engine ends the other ranks, and their shims record how these ended.
    """
    if ending.terminated is not None or ending.failure is not None:
        return False
    return returncode < 0 or (len(ending.lost_shims) > 1 and all(state.exit is None for state in watch.ranks))


def folder_failure(error: OSError) -> Failure:
    """Return the failure of a run that was ended because its folder could no longer be written or read."""
    reason = system_reason(error)
    evidence = (f"{error.filename}: {reason}",) if error.filename else ()
    cause = f"the run folder can no longer be used: {reason}"
    hint = _NO_ROOM if error.errno in {errno.ENOSPC, errno.EDQUOT} else None
    return Failure(code="R010", cause=cause, time=time.time(), evidence=evidence, next_step=hint, comes_again=True)


def _beside_unusable_folder(failure: Failure | None, ending: Ending) -> Failure | None:
    """Add to a failure that the run folder could not be used; that is the failure if nothing else has ended the run."""
    noticed = ending.unusable
    if noticed is None or failure is noticed:
        return failure
    if failure is None:
        return None if ending.signal_number is not None else noticed
    return replace(failure, evidence=(*failure.evidence, f"{noticed.cause}, so it may lack what ended the run"))


def _mark_stopped(ranks: list[RankState], failure: Failure | None) -> None:
    """Mark the ranks that neither failed nor finished as stopped."""
    for state in ranks:
        ended_by_itself = state.error is not None or (failure is not None and failure.rank == state.row.rank)
        if state.phase not in {Phase.DONE, Phase.ABSENT} and not ended_by_itself:
            state.phase = Phase.STOPPED


def compared_replicas(plan: LaunchPlan, replicas: ReplicaWatch) -> Failure | None:
    """Return the failure of ranks whose tensors differed when they were last compared; None if they agreed."""
    difference = replicas.difference
    if difference is None or replicas.step is None:
        return None
    return replica_failure(difference, plan, step=replicas.step, agreed=replicas.agreed)


def different_parameters(plan: LaunchPlan, ranks: Sequence[RankState]) -> Failure | None:
    """Return the failure of ranks that finished with different bits in a parameter that several have; None if they agree."""
    difference = find_difference({state.row.rank: state.digests for state in ranks})
    return None if difference is None else replica_failure(difference, plan)


def _engine_failure(
    folder: RunFolder,
    engine: Engine,
    returncode: int,
    *,
    unfinished: Sequence[RankState],
    outlived: Sequence[RankState],
) -> Failure:
    """Return the failure of an engine that ended although no rank had failed; its last lines on stderr are the evidence.

    Args:
        folder: The run's folder.
        engine: What started the ranks.
        returncode: How it ended.
        unfinished: The ranks that had not ended.
        outlived: The workers of an elastic run that were lost before, and without which the others went on.
    """
    how = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exited with status {returncode}"
    left = unfinished[:1] if returncode == 0 else []
    first = "".join(f" before rank {s.row.rank} ({s.row.role}, {s.row.host}) had ended" for s in left)
    lines = _engine_stderr(folder).splitlines()
    said = tuple(line.strip() for line in lines if line.strip(" -\t") and not line.startswith(FROM_A_RANK.decode()))
    names = listed([contract.worker_name(state.row.rank) for state in outlived], last="and", quote="")
    but = f" but {names}, without which the others went on" if outlived else ""
    cause = f"{engine.signature.program} {how}{first}; no rank had failed{but}"
    return Failure(code="R008", cause=cause, time=time.time(), evidence=said[-_TAIL_LINES:], of_engine=True)
