"""Follow the records of a run's ranks, and keep one `RankState` per rank up to date with them."""

import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from heapq import merge
from itertools import islice
from typing import Protocol, TypeVar, cast

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.audits import AuditClaim, AuditVote, Digests
from ttlaunch.records.endings import ErrorInFlight, RankError, RankExit
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.ranks import (
    AnyProgress,
    Done,
    JoinedGroup,
    LayerNorms,
    LostCheckpoint,
    Parameters,
    Printed,
    Ready,
    Result,
    Started,
    Starting,
    StepDone,
    Stopping,
    TrainsAlone,
    Usage,
    Validation,
    moved_back,
    read_progress,
)
from ttlaunch.records.regular_files import read_tail
from ttlaunch.records.steps import Steps
from ttlaunch.records.updates import NotFinite
from ttlaunch.running.audits import AuditWatch
from ttlaunch.running.bad_records import BadLine, BadRecords, good_progress, good_records
from ttlaunch.running.loss_spikes import LossSpikes
from ttlaunch.running.replicas import ReplicaWatch
from ttlaunch.running.runs.files import Tail, read_file
from ttlaunch.running.runs.run_folder import RunFolder, ranks_named

_HELD_RECORDS = 4096
_MOST_STAGES, _MOST_METRICS, _MOST_NOT_FINITE = 16, 64, 64
_OWN_PLACE = frozenset(
    {"loss", "grad_norm", contract.ARRIVED_FROM, *contract.COUNTED, *(contract.OWN + name for name in contract.COUNTED)}
)
_EXCEPTIONS_BYTES = 1 << 20  # more than the longest line that a rank writes about an exception
_LOOK_BYTES, _LEAST_BYTES = 1 << 20, 1 << 16
"""How many bytes of all ranks together a look reads, and at least of each; honest ranks write far less between two looks."""
_T = TypeVar("_T")


class Phase(StrEnum):
    """The phase of life that a rank is in."""

    ABSENT = "absent"  # not added to the run yet, see `RankRow.later`
    WAITING = "waiting"  # the engine has not started its shim
    STARTING = "starting"  # the interpreter imports its packages
    RUNNING = "running"  # the role's function was called
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"  # ended because the run was: by Ctrl-C, or after another rank had failed


@dataclass
class RankState:
    """The state of one rank, as its records describe it.

    Attributes:
        place: Of a worker of an elastic run, its rank in the present epoch, in processes that follow the journal; None if it is no member.
        stage: What the rank does in its start-up, one of `contract.START_STAGES`; empty before it reports and afterwards.
        stages: The first stages of its start that the rank has reported, with the times when they began.
        ready_time: When the rank's role was called, seconds since the epoch; None before, and for a program.
        step: The last optimizer step that the rank reported.
        counts: What the rank counts: tokens or samples.
        counted: The sum of the tokens or samples of all reported steps.
        own_counted: How many of them a member of an elastic run has differentiated itself; None for other ranks.
        layer_norms: The gradient norm of each layer that the rank updates, in the last step that reported these norms.
        grad_norm: The gradient's norm in the last step that reported one.
        connection: `silent` or `lost` if the connection to the rank's host is; else empty.
        first_step: The first reported step; larger than 1 if the rank continues from a checkpoint.
        diverged: If the last losses are NaN or infinite, the first step of this series and its loss; else None.
        not_finite: The micro-batches whose losses the rank reported as NaN or infinite, by step; the first steps only.
        spikes: The first steps whose loss was far above those before.
        first_step_time, last_step_time: When the rank reported its first and last step, seconds since the epoch.
        lost_checkpoints: By step, why the rank has written no part of a checkpoint.
        stops_after: The step to which the rank is committed; known once it has noticed the order to stop.
        metrics: The newest numbers by name that a script has sent with its steps or printed, besides those that have a place above.
        printed_step: The step that the last printed line with a step names; it counts for nothing but the views.
        usage: What the processes of a script's rank use of their host; None before the first look.
        last_line: The last line that the rank has printed, if the reader of the records also reads the output.
        trains_alone: Whether a script's rank has run a backward pass without having joined a group of torch.
        is_asked_to_stop: Whether the ranks were ordered to stop.
        error: What the rank wrote about its own exception.
        in_flight: The last exception that ended the rank, or was about to, as far as the rank wrote it; see `Watch.read_exceptions`.
        exit: What the shim wrote about the rank's end.
        clock_offset_s: By how many seconds the clock of the rank's host is ahead of this machine's.
    """

    row: RankRow
    phase: Phase = Phase.WAITING
    place: int | None = None
    stage: str = ""
    stages: list[tuple[str, float]] = field(default_factory=list)
    ready_time: float | None = None
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    connection: str = ""
    diverged: tuple[int, float] | None = None
    not_finite: dict[int, NotFinite] = field(default_factory=dict)
    spikes: LossSpikes = field(default_factory=LossSpikes)
    counts: str = contract.COUNTED[0]
    counted: int = 0
    own_counted: int | None = None
    first_step: int = 0
    first_step_counted: int = 0
    first_step_own: int = 0
    first_step_time: float | None = None
    last_step_time: float | None = None
    validations: list[Validation] = field(default_factory=list)
    layer_norms: dict[int, dict[str, float]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    results: dict[str, object] = field(default_factory=dict)
    lost_checkpoints: dict[int, str] = field(default_factory=dict)
    stops_after: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    printed_step: int = 0
    usage: Usage | None = None
    last_line: bytes = b""
    trains_alone: bool = False
    is_asked_to_stop: bool = False
    started: Started | None = None
    error: RankError | None = None
    in_flight: ErrorInFlight | None = None
    exit: RankExit | None = None
    clock_offset_s: float = 0.0

    def condition(self, *, reports_ready: bool) -> str:
        """Return a word for the rank's state; a rank that was ordered to stop is `stopping` until it has ended.

        Args:
            reports_ready: Whether the rank reports when its packages are imported, as ranks of recipes do. Other ranks count as
                running once they are started.
        """
        if self.connection and self.phase in {Phase.WAITING, Phase.STARTING, Phase.RUNNING}:
            return f"host {self.connection}"
        is_up = self.phase is Phase.RUNNING or (self.phase is Phase.STARTING and not reports_ready)
        if is_up and (self.is_asked_to_stop or self.stops_after is not None):
            return "stopping"
        return str(Phase.RUNNING if is_up else self.phase)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, not counting the first reported step; None for a rank that counts no tokens."""
        return self._per_second("tokens", self.counted, self.first_step_counted)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second, not counting the first reported step; None for a rank that counts no samples."""
        return self._per_second("samples", self.counted, self.first_step_counted)

    def own_per_s(self, counts: str) -> float | None:
        """Return tokens or samples per second: of a member of an elastic run, of what it differentiates itself, which may be nothing."""
        if self.own_counted is None:
            return self._per_second(counts, self.counted, self.first_step_counted)
        return self._per_second(counts, self.own_counted, self.first_step_own, may_be_none=True)

    def _per_second(self, counts: str, number: int, of_first_step: int, *, may_be_none: bool = False) -> float | None:
        if not (number or may_be_none) or self.counts != counts:
            return None
        if self.first_step_time is None or self.last_step_time is None or self.last_step_time <= self.first_step_time:
            return None
        return (number - of_first_step) / (self.last_step_time - self.first_step_time)

    @property
    def step_s(self) -> float | None:
        """The mean seconds of a step, not counting the first reported one; None before the second."""
        if self.first_step_time is None or self.last_step_time is None or self.step <= self.first_step:
            return None
        return (self.last_step_time - self.first_step_time) / (self.step - self.first_step)


class HasRanks(Protocol):
    """The part of a plan that `Watch` needs."""

    @property
    def ranks(self) -> tuple[RankRow, ...]:
        """The ranks, in order."""


class Watch:
    """Reads the records of all ranks of a run; each call of `records` or `poll` reads what is new.

    Attributes:
        bad: Records that could not be used; the supervisor reports them.
        replicas: What the digests of the ranks say about tensors that several ranks hold.
        audits: What ranks have found when they computed each other's micro-batches.
    """

    def __init__(self, plan: HasRanks, folder: RunFolder, *, begin: Mapping[int, int] | None = None) -> None:
        """Begin with the first records.

        Args:
            plan: The ranks of the run.
            folder: The run's folder.
            begin: By rank, the byte of its file of records where the first line to read begins; 0 for ranks that are not named.
        """
        self.ranks = [RankState(row, Phase.ABSENT if row.later else Phase.WAITING) for row in plan.ranks]
        self.bad = BadRecords()
        self.replicas = ReplicaWatch()
        self.audits = AuditWatch()
        self._folder = folder
        self._tails = [
            Tail(folder.file(contract.progress_file(state.row.rank)), begin=(begin or {}).get(state.row.rank, 0))
            for state in self.ranks
        ]
        self._clocks: dict[str, float] = {}

    def add(self, row: RankRow) -> None:
        """Follow a further rank, whose number is the next one: a worker that has joined an elastic run."""
        assert row.rank == len(self.ranks)  # noqa: S101 - ranks are found by their numbers
        self.ranks.append(RankState(row))
        self._tails.append(Tail(self._folder.file(contract.progress_file(row.rank))))

    def places(self) -> dict[int, int]:
        """Return by rank the byte of its file of records where the next line to read begins."""
        return {state.row.rank: tail.place for state, tail in zip(self.ranks, self._tails, strict=True)}

    def set_clock(self, host: str, offset_s: float) -> None:
        """Set by how much a host's clock is ahead of this machine's; its records are converted to this machine's clock from now on."""
        self._clocks[host] = offset_s
        for state in self.ranks:
            if state.row.host == host:
                state.clock_offset_s = offset_s

    def clock_offsets(self) -> dict[int, float]:
        """Return for each rank by how many seconds its host's clock is ahead of this machine's."""
        return {state.row.rank: self._clocks.get(state.row.host, 0.0) for state in self.ranks}

    def look(self) -> Iterator[tuple[RankState, AnyProgress]]:
        """Do what `records` does, but read a limited number of bytes of each rank; the next calls read the rest.

        So a rank that writes without end cannot keep a supervisor from answering Ctrl-C.
        """
        return self.records(most=look_bytes(len(self.ranks)))

    def records(self, *, most: int | None = None) -> Iterator[tuple[RankState, AnyProgress]]:
        """Read the new records of all ranks, update the states, and yield the records in the order of their times.

        At most some thousand records are in memory at a time. Exhaust the iterator: it reads how ranks ended at its end.

        Args:
            most: How many bytes of each rank to read at most; None: all that are there.
        """
        by_rank = [self._new_records(state, most) for state in self._with_records()]
        fresh = merge(*by_rank, key=lambda pair: pair[1].time)
        while some := list(islice(fresh, _HELD_RECORDS)):
            for state, record in some:
                fold(state, record)
                if isinstance(record, Digests):
                    self.replicas.take(state.row.rank, record)
                elif isinstance(record, AuditClaim | AuditVote):
                    self.audits.take(state.row.rank, record)
            yield from some
        self._read_all_endings()
        over = {Phase.DONE, Phase.ABSENT}
        self.replicas.settle({state.row.rank: state.step for state in self.ranks if state.phase not in over})

    def unordered(self) -> Iterator[tuple[RankState, Steps | AnyProgress]]:
        """Do what `records` does, one rank after the other and steps with the same numbers together, in a fifth of the time.

        What ranks report of each other, digests and audits, is not compared. Exhaust the iterator.
        """
        for state, tail in zip(self.ranks, self._tails, strict=True):
            rank, offset = state.row.rank, self._clocks.get(state.row.host, 0.0)
            for found in good_progress(tail, rank=rank, file=contract.progress_file(rank), complain=self.bad.add):
                if isinstance(found, Steps) and not offset:
                    fold_steps(state, found)
                    yield state, found
                    continue
                for record in found.records() if isinstance(found, Steps) else [found]:
                    ours = self._in_our_time(state, record)
                    fold(state, ours)
                    yield state, ours
        self._read_all_endings()

    def _read_all_endings(self) -> None:
        is_asked_to_stop = os.path.exists(self._folder.file(contract.ENDING_FILE))  # noqa: PTH110 - never raises
        for state in self.ranks:
            state.is_asked_to_stop = is_asked_to_stop
        names = self._folder.records()
        for state in self._with_records(names):
            self._read_endings(state, names)

    def _with_records(self, names: Collection[str] | None = None) -> list[RankState]:
        """Return the ranks that may have records; of the many workers that may come to an elastic run, most never do."""
        has_absent = any(state.phase is Phase.ABSENT for state in self.ranks)
        begun = ranks_named(names or self._folder.records()) if has_absent else ()
        return [one for one in self.ranks if one.phase is not Phase.ABSENT or one.row.rank in begun]

    def read_all(self) -> None:
        """Do what `records` does, for callers who need only the states."""
        deque(self.records(), maxlen=0)

    def poll(self) -> list[tuple[RankState, AnyProgress]]:
        """Do what `records` does, and return the records of a run that is known to be short."""
        return list(self.records())

    def read_exceptions(self) -> None:
        """Read which exception is in flight in each rank; call it when that has to be known, and once no rank can write any more."""
        for state in self.ranks:
            state.in_flight = self._read_in_flight(state)

    def _new_records(self, state: RankState, most: int | None) -> Iterator[tuple[RankState, AnyProgress]]:
        rank = state.row.rank
        name, tail = contract.progress_file(rank), self._tails[rank]
        for record in good_records(tail, read_progress, rank=rank, file=name, complain=self.bad.add, most=most):
            yield state, cast("AnyProgress", self._in_our_time(state, record))

    def _read_endings(self, state: RankState, names: Collection[str] | None) -> None:
        error, end = contract.error_file(state.row.rank), contract.exit_file(state.row.rank)
        if state.error is None and (names is None or error in names):
            state.error = self._read_ending(state, RankError, error)
        if state.exit is None and (names is None or end in names):
            state.exit = self._read_ending(state, RankExit, end)
        if state.error or (state.exit and state.exit.is_failure):
            state.phase = Phase.FAILED
        elif state.exit:
            state.phase = Phase.DONE

    def _read_ending(self, state: RankState, cls: type[_T], name: str) -> _T | None:
        data = read_file(self._folder.file(name))
        if data is None:
            return None
        record = read(cls, data)
        if isinstance(record, BadRecord):
            self.bad.add(BadLine(state.row.rank, name, None, record.reason))
            return None
        return self._in_our_time(state, record)

    def _read_in_flight(self, state: RankState) -> ErrorInFlight | None:
        """Read the last exception that a rank has written down while it was in flight; None if there is none."""
        name = contract.exceptions_file(state.row.rank)
        try:
            lines = read_tail(self._folder.file(name), most=_EXCEPTIONS_BYTES).splitlines()
        except OSError:
            return None
        record = read(ErrorInFlight, lines[-1]) if lines else None
        if isinstance(record, BadRecord):
            self.bad.add(BadLine(state.row.rank, name, None, record.reason))
            return None
        return record and self._in_our_time(state, record)

    def _in_our_time(self, state: RankState, record: _T) -> _T:
        return moved_back(record, offset) if (offset := self._clocks.get(state.row.host)) else record


def look_bytes(world_size: int) -> int:
    """Return how many bytes of a file of each rank a look reads at most."""
    return max(_LEAST_BYTES, _LOOK_BYTES // max(1, world_size))


def steps_done(ranks: Sequence[RankState]) -> int:
    """Return the last finished step of a training.

    Only ranks that update weights count, which are those that report a gradient norm; without such ranks, all count. A
    worker may have reported a step whose gradient is not applied yet.
    """
    # Where workers come and go, all of them update, and the one that reports may have ended.
    if any(state.row.later for state in ranks):
        return max(state.step for state in ranks)
    updating = [state.step for state in ranks if state.grad_norm is not None]
    return max(updating or [state.step for state in ranks], default=0)


def start_up_end(ranks: Sequence[RankState], *, reports_ready: bool) -> float | None:
    """Return when the last rank was up, seconds since the epoch; None while one is not.

    Args:
        ranks: The states of all ranks.
        reports_ready: Whether ranks report when their role is called, as in `RankState.condition`; others are up once started.
    """
    present = [state for state in ranks if not state.row.later]
    started = [state.started.time if state.started else None for state in present]
    times = [state.ready_time for state in present] if reports_ready else started
    return max((time for time in times if time is not None), default=None) if None not in times else None


def fold(state: RankState, record: AnyProgress) -> None:
    """Update the state of a rank by one of its progress records."""
    match record:
        case Started():
            state.started, state.phase = record, Phase.STARTING
        case Starting():
            state.stage = record.stage
            if len(state.stages) < _MOST_STAGES:
                state.stages.append((record.stage, record.time))
        case Ready():
            state.phase, state.total_steps = Phase.RUNNING, record.total_steps
            state.stage, state.ready_time = "", record.time
        case StepDone():
            _fold_step(state, record)
        case LostCheckpoint():
            state.lost_checkpoints.setdefault(record.step, record.reason)
        case Stopping():
            state.stops_after = record.step
        case Done():
            state.phase = Phase.DONE
        case _:
            _fold_measured(state, record)


def _fold_measured(state: RankState, record: AnyProgress) -> None:
    """Update the state by a measurement other than a step; notes and records of a recipe's own kinds change nothing."""
    match record:
        case Validation():
            state.validations.append(record)
        case NotFinite():
            state.not_finite |= {} if len(state.not_finite) >= _MOST_NOT_FINITE else {record.step: record}
        case LayerNorms():
            if record.step >= max(state.layer_norms, default=0):
                state.layer_norms = {record.step: record.norms}
        case Parameters():
            state.digests.update(record.digests)
        case Result():
            state.results.update(record.values)
        case Printed():
            state.printed_step = state.printed_step if record.step is None else record.step
            _fold_metrics(state, record.values)
        case Usage():
            state.usage = record
        case TrainsAlone() | JoinedGroup():
            state.trains_alone = isinstance(record, TrainsAlone)


def _fold_metrics(state: RankState, values: Mapping[str, float]) -> None:
    """Keep the newest values; names beyond the most are dropped, because a rank can make up new ones without end."""
    for name, value in values.items():
        if name in state.metrics or len(state.metrics) < _MOST_METRICS:
            state.metrics[name] = value


def _fold_step(state: RankState, record: StepDone) -> None:
    state.step = record.step
    _fold_metrics(state, {name: value for name, value in record.values.items() if name not in _OWN_PLACE})
    if record.loss is not None:
        state.loss = float(record.loss)
        state.diverged = None if math.isfinite(state.loss) else state.diverged or (state.step, state.loss)
        state.spikes.add(state.step, state.loss)
    if record.grad_norm is not None:
        state.grad_norm = float(record.grad_norm)
    counts, number = record.counted
    state.counted += number
    if (own := record.own_counted) is not None:
        counts, state.own_counted = own[0], (state.own_counted or 0) + own[1]
    if number or own is not None:
        state.counts = counts
    if state.first_step_time is None:
        state.first_step, state.first_step_time = state.step, record.time
        state.first_step_counted, state.first_step_own = state.counted, state.own_counted or 0
    state.last_step_time = record.time


def fold_steps(state: RankState, found: Steps) -> None:
    """Update the state of a rank by steps that follow each other, as `fold` does by each of their records."""
    if state.first_step_time is None:
        for record in found.records():
            _fold_step(state, record)
        return
    values = found.values
    state.step, state.last_step_time = found.steps[-1], found.times[-1]
    _fold_metrics(state, {name: numbers[-1] for name, numbers in values.items() if name not in _OWN_PLACE})
    for step, loss in zip(found.steps, map(float, values.get("loss", ())), strict=False):
        state.loss = loss
        state.diverged = None if math.isfinite(loss) else state.diverged or (step, loss)
        state.spikes.add(step, loss)
    if "grad_norm" in values:
        state.grad_norm = float(values["grad_norm"][-1])
    counts = next((name for name in contract.COUNTED if name in values), contract.COUNTED[0])
    number = _whole_sum(values.get(counts, ()))
    state.counted += number
    own = next((name for name in contract.COUNTED if contract.OWN + name in values), None)
    if own is not None:
        counts, state.own_counted = own, (state.own_counted or 0) + _whole_sum(values[contract.OWN + own])
    if number or own is not None:
        state.counts = counts


def _whole_sum(numbers: Iterable[float]) -> int:
    return sum(int(one) for one in numbers if math.isfinite(one))
