"""Detect that a run hangs: no counter of any rank has changed during the timeout, and no rank has announced a long phase.

Every rank is then asked for its stacks, and the verdict names one rank. Ranks of a recipe are watched through their flight
recorders from the start of their processes. Ranks of any other program are watched through their output, and only if the
user set a timeout. In both cases a hang is also reported if the engine does not start all ranks.
"""

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics.count import counted, render_duration
from ttlaunch.flight_recorder import DATA_PARALLEL_START, DONE, Recording
from ttlaunch.planning.launch_plan import CommandProgram, LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.failures.stderr_tail import read_thread_error
from ttlaunch.running.flight_recorders import FollowedRecorders
from ttlaunch.running.hang.departure import find_departure
from ttlaunch.running.hang.obstacles import find_obstacle
from ttlaunch.running.hang.odd_one import describe_crowd, describe_place, find_odd_one
from ttlaunch.running.hang.stacks import frame_to_report, parse_main_stack
from ttlaunch.running.hang.verdict import departed, judge, with_thread_error
from ttlaunch.running.hang.waits import Seen
from ttlaunch.running.rank_controller import ProcessSnapshot, RankController
from ttlaunch.running.runs.files import read_text_if_any, size_of
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState

FIRST_STEPS, FIRST_TIMEOUT_S = 10, 120.0
LEAST_TIMEOUT_S, SLOWEST_STEPS = 30.0, 10.0
ANNOUNCED_S = 1800.0  # the longest that a rank may take for an announced phase, such as an evaluation or a checkpoint
_LOOK_S = 0.25
_LONGEST_LOOK_S = 2.0  # the most quiet time that one look adds: if this machine slept, the ranks may have worked
_ANSWER_S = 10.0  # the longest time to wait for a host's answer; its link decides whether the host is lost
_STACKS_S = 2.0
_BETWEEN_LOOKS_S = 2.0
_LOADING_STAGES = {contract.START_STAGES[2], contract.STAGE_SETTING_UP}
_MOST_DUMPED = 16
_PY_SPY = '`pip install "ttlaunch[hangs]"` beside the interpreter of the ranks lets a report name the line of each rank'


@dataclass
class _Quiet:
    """The time for which the marks of progress have not changed."""

    marks: Any = None
    seconds: float = 0.0


@dataclass
class _Suspicion:
    """The progress of the examination of a run in which nothing has changed during the timeout.

    Attributes:
        since: When the examination began.
        snapshot: A snapshot of the processes taken after `since`; None until all hosts have answered.
        asked_at: When stacks were last asked for; None before.
        expected: The ranks whose stacks may come then.
        ways_tried: How many of the ways to get stacks have been tried.
        first_sizes: The sizes of the files of stacks at that time, by rank.
        last_sizes: The sizes of these files at the last look.
    """

    since: float
    snapshot: ProcessSnapshot | None = None
    asked_at: float | None = None
    expected: Collection[int] = ()
    ways_tried: int = 0
    first_sizes: Mapping[int, int] | None = None
    last_sizes: Mapping[int, int] | None = None


class HangWatch:
    """Watches one run for a hang; `check` is called a few times a second."""

    def __init__(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        controller: RankController,
        *,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count the quiet time.

        Args:
            plan: The run's plan.
            folder: The run's folder.
            controller: Gives access to the processes of the ranks.
            timeout_s: The quiet time after which a run hangs. None for the default: 120 s during the first ten steps, then
                ten times the slowest step, but at least 30 s.
            clock: Returns the time in seconds; never goes back.
        """
        self._is_recipe = isinstance(plan.program, RecipeProgram)
        # Ranks of a Python program have flight recorders once they have joined a group of torch.
        self._may_record = self._is_recipe or (isinstance(plan.program, CommandProgram) and plan.program.is_python)
        self._world_size = plan.world_size
        self._launcher = plan.engine.names.launcher
        self._folder = folder
        self._controller = controller
        self._recorders = FollowedRecorders(controller.recordings)
        self._timeout_s = timeout_s
        self._clock = clock
        self._quiet = _Quiet()
        self._looked = clock()
        self._suspicion: _Suspicion | None = None
        self._loaded: tuple[Mapping[int, int] | None, float] = None, 0.0

    def check(self, ranks: list[RankState]) -> Failure | None:
        """Look for progress; return the failure to report once the run hangs, else None."""
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return None
        rested, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        # Of the many workers that may come to an elastic run, most never do.
        ranks = [state for state in ranks if state.phase is not Phase.ABSENT]
        if self._has_moved(self._marks(ranks), rested):
            self._suspicion = None
            return None
        missing = [state for state in ranks if state.phase is Phase.WAITING]
        if missing:
            is_long = self._quiet.seconds >= max(FIRST_TIMEOUT_S, self._timeout_s or 0.0)
            return _not_started(missing, len(ranks), self._quiet.seconds, launcher=self._launcher) if is_long else None
        # What the recorders hold is asked only once the least quiet time has passed, and is then judged.
        if self._quiet.seconds < (LEAST_TIMEOUT_S if self._timeout_s is None else self._timeout_s):
            return None
        return self._suspect(ranks, self._recorders.recordings(), now)

    def _marks(self, ranks: Sequence[RankState]) -> object:
        """Return values that change only while the run makes progress, to be compared between two looks."""
        headers = self._recorders.look([state.row.rank for state in ranks] if self._may_record else [])
        common = [(state.row.rank, state.phase, state.exit is not None, state.step, state.stage) for state in ranks]
        printed: Sequence[int] = ()
        if not self._is_recipe:
            names = (contract.stdout_file, contract.stderr_file)
            printed = [size_of(self._folder.file(name(rank))) for name in names for rank in range(self._world_size)]
        faults: Mapping[int, int] = {}
        is_judged = self._is_recipe or self._timeout_s is not None
        if is_judged and self._controller.answers_at_once and (loading := self._loading(ranks)):
            snapshot = self._controller.snapshot(loading, since=0.0)
            faults = snapshot.page_faults if snapshot else {}
        return common, printed, headers, faults

    def _suspect(self, ranks: list[RankState], recordings: Mapping[int, Recording], now: float) -> Failure | None:
        """If nothing has changed during the timeout: take a snapshot, then ask for stacks, then judge.

        Each call does one of these steps and returns at once, because the supervisor also has to do its other work. If
        anything changes between two calls, `check` drops the suspicion.
        """
        if not self._may_judge(ranks, recordings) or self._quiet.seconds < self._timeout(recordings):
            return None
        case = self._suspicion = self._suspicion or _Suspicion(now)
        if case.snapshot is None:
            case.snapshot = self._controller.snapshot(ranks, since=case.since, closely=True)
            if case.snapshot is None and now - case.since > _ANSWER_S:
                case.snapshot = ProcessSnapshot(frozenset(), {})
            # Hosts send fresh flight recorders before the answer: the next call must read these before it judges.
            return None
        if case.asked_at is None and self._is_loading(case, ranks, now):
            return None
        # A rank that announced a long phase, such as a checkpoint, may take its time, and so may processes that are exiting,
        # which have no counters; unless a signal has stopped one of the run's processes.
        is_exiting = all(_is_exiting(state, is_recipe=self._is_recipe) for state in ranks)
        granted = self._is_granted(recordings) or (is_exiting and self._quiet.seconds < FIRST_TIMEOUT_S)
        if granted and not (case.snapshot.stopped or case.snapshot.helpers):
            if now - case.since > _ANSWER_S:
                self._suspicion = None
            return None
        if not self._has_stacks(ranks, case, now):
            return None
        seen = [self._seen_one(state, recordings.get(state.row.rank), case.snapshot) for state in ranks]
        if not case.snapshot.stopped and (failure := find_obstacle(case.snapshot, ranks, quiet_s=self._quiet.seconds)):
            return failure
        if self._is_recipe or case.snapshot.stopped:
            return judge(seen, quiet_s=self._quiet.seconds, now=time.time())
        return _in_groups(seen, self._quiet.seconds) or _silent(seen, self._quiet.seconds)

    def _is_loading(self, case: _Suspicion, ranks: Sequence[RankState], now: float) -> bool:
        """Whether ranks on other hosts may still be loading their libraries; this takes two snapshots to find out."""
        if self._controller.answers_at_once or case.snapshot is None:
            return False
        loading = {state.row.rank for state in self._loading(ranks)}
        faults = {rank: count for rank, count in case.snapshot.page_faults.items() if rank in loading}
        if not faults:
            return False
        # Importing packages leaves no counter, but it touches fresh memory. Compare the counts of page faults of two
        # snapshots that are at least `_BETWEEN_LOOKS_S` apart; dropping the suspicion makes the next call take another one.
        before, seen = self._loaded
        if before is None or now - seen > 2 * _BETWEEN_LOOKS_S:
            self._loaded, self._suspicion = (faults, now), None
            return True
        if now - seen < _BETWEEN_LOOKS_S:
            self._suspicion = None
            return True
        if faults != before:
            self._loaded, self._suspicion = (faults, now), None
            self._quiet = _Quiet(self._quiet.marks)
            return True
        return False

    def _loading(self, ranks: Sequence[RankState]) -> list[RankState]:
        """Return the ranks that still import their packages; only their page faults show progress.

        A rank of a script says when it begins to import torch, and when its first backward pass begins; the first optimizer imports as
        much again, and so does DistributedDataParallel before it waits for other ranks.
        """
        starting = [state for state in ranks if state.phase is Phase.STARTING]
        loading = [state for state in starting if self._is_recipe or state.stage in _LOADING_STAGES]
        waiting = {
            rank
            for rank, recording in self._recorders.recordings(state.row.rank for state in loading).items()
            if recording.waiting and recording.waiting.name != DATA_PARALLEL_START
        }
        return [state for state in loading if state.row.rank not in waiting]

    def _may_judge(self, ranks: Sequence[RankState], recordings: Mapping[int, Recording]) -> bool:
        """Whether a hang can be judged: a program needs a timeout from the user, and ranks of a recipe flight recorders."""
        if not self._is_recipe:
            return self._timeout_s is not None
        return bool(recordings) or all(state.phase is Phase.STARTING for state in ranks)

    def _has_moved(self, marks: object, rested: float) -> bool:
        if marks != self._quiet.marks:
            self._quiet = _Quiet(marks)
            return True
        self._quiet.seconds += rested
        return False

    def _timeout(self, recordings: Mapping[int, Recording]) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        if max((recording.timed for recording in recordings.values()), default=0) < FIRST_STEPS:
            return FIRST_TIMEOUT_S
        slowest = max(recording.slowest for recording in recordings.values()) / 1e9
        return max(LEAST_TIMEOUT_S, SLOWEST_STEPS * slowest)

    def _is_granted(self, recordings: Mapping[int, Recording]) -> bool:
        """Whether a rank that waits for no other rank has announced a long phase, and the time for this phase is not over."""
        busy = any(
            recording.phase and not recording.waiting for recording in recordings.values() if recording.phase != DONE
        )
        return busy and self._quiet.seconds < max(ANNOUNCED_S, self._timeout(recordings))

    def _has_stacks(self, ranks: list[RankState], case: _Suspicion, now: float) -> bool:
        """Collect stacks, one step per call; return True once no more will come.

        A signal asks each rank of a recipe to write its own stacks. If one cannot, because it is stopped or stuck in compiled code,
        the rank controller then reads its stacks from outside. For other programs this comes first: a signal interrupts calls
        of the system in libraries that may not expect it.
        """
        if case.first_sizes is None:
            case.first_sizes = case.last_sizes = self._stack_sizes()
        silent = self._silent_ranks(ranks, case)
        before, case.last_sizes = case.last_sizes, self._stack_sizes()
        still_comes = before != case.last_sizes
        expected = [state for state in silent if state.row.rank in case.expected]
        if case.asked_at is not None and (expected or still_comes) and now - case.asked_at < _STACKS_S:
            return False
        ways = (self._ask, self._read_from_outside)[:: 1 if self._is_recipe else -1]
        if not silent or case.ways_tried == len(ways):
            return True
        case.asked_at, case.expected = now, ways[case.ways_tried](silent, case)
        case.ways_tried += 1
        return False

    def _ask(self, ranks: Sequence[RankState], case: _Suspicion) -> Collection[int]:
        """Ask ranks for their stacks; returns those that may answer."""
        # A rank that has become another program would be killed by the signal, and then be taken for the cause.
        snapshot = case.snapshot or ProcessSnapshot(frozenset(), {})
        known = {state.row.rank: snapshot.processes.get(state.row.rank) for state in ranks}
        number: int
        if self._is_recipe:
            able, number = {rank for rank, one in known.items() if one is None or one.catches_crashes}, signal.SIGUSR2
        else:
            able, number = {rank for rank, one in known.items() if one and one.writes_stacks}, contract.STACKS_SIGNAL
        self._controller.signal_ranks([state for state in ranks if state.row.rank in able], number)
        return able - snapshot.stopped

    def _read_from_outside(self, ranks: Sequence[RankState], _case: _Suspicion) -> Collection[int]:
        """Have stacks of ranks read by py-spy; returns the ranks."""
        some = ranks[:_MOST_DUMPED]
        self._controller.dump_stacks(some)
        return [state.row.rank for state in some]

    def _silent_ranks(self, ranks: Sequence[RankState], case: _Suspicion) -> list[RankState]:
        """Return the ranks that have not ended and have written no stacks since they were asked."""
        sizes, before = self._stack_sizes(), case.first_sizes or {}
        return [
            state for state in ranks if state.exit is None and sizes[state.row.rank] <= before.get(state.row.rank, 0)
        ]

    def _stack_sizes(self) -> dict[int, int]:
        return {rank: size_of(self._folder.file(contract.stacks_file(rank))) for rank in range(self._world_size)}

    def _seen_one(self, state: RankState, recording: Recording | None, snapshot: ProcessSnapshot) -> Seen:
        row = state.row
        idle_s = None
        if recording and recording.operations:
            last = recording.operations[-1]
            idle_s = time.time() + state.clock_offset_s - recording.seconds(last.ended or last.begun)
        return Seen(
            rank=row.rank,
            role=row.role,
            host=row.host,
            recording=recording,
            is_stopped=row.rank in snapshot.stopped,
            stack=parse_main_stack(read_text_if_any(self._folder.file(contract.stacks_file(row.rank)))),
            idle_s=idle_s,
            is_starting=self._is_recipe and state.phase is Phase.STARTING,
            has_left=state.exit is not None,
            process=snapshot.processes.get(row.rank),
            thread_error=read_thread_error(self._folder.file(contract.stderr_file(row.rank))),
        )


def _is_exiting(state: RankState, *, is_recipe: bool) -> bool:
    """Whether a rank has run all of its code: what libraries still do then, such as freeing memory, no counter shows."""
    has_left = not is_recipe and state.in_flight is not None and state.in_flight.left is not None
    return state.phase is Phase.DONE or has_left


def _not_started(missing: Sequence[RankState], world_size: int, quiet_s: float, *, launcher: str) -> Failure:
    """Make the failure of an engine that has not started all ranks."""
    hosts = list(dict.fromkeys(state.row.host for state in missing))
    what = (
        f"{launcher} has not started {len(missing)} of {counted(world_size, 'rank')} within {render_duration(quiet_s)}"
    )
    evidence = tuple(
        f"on {host}: rank {', '.join(str(one.row.rank) for one in missing if one.row.host == host)}" for host in hosts
    )
    return Failure(code="R038", kind=Cause.HUNG, cause=what, time=time.time(), evidence=evidence[:_MOST_DUMPED])


def _in_groups(ranks: Sequence[Seen], quiet_s: float) -> Failure | None:
    """Make the failure of a program whose ranks wait in collective operations of torch; None if the recorders explain nothing."""
    if not any(one.waiting for one in ranks):
        return None
    departure = find_departure({one.rank: one.recording for one in ranks if one.recording})
    if departure is not None:
        return departed(departure, ranks, quiet_s=quiet_s, now=time.time())
    return None if all(one.waiting for one in ranks) else judge(ranks, quiet_s=quiet_s, now=time.time())


def _silent(ranks: Sequence[Seen], quiet_s: float) -> Failure:
    """Make the failure of a hanging program that is no recipe: of the rank that stands apart, if there is one."""
    silence = f"no rank has printed anything for {render_duration(quiet_s)}"
    one = find_odd_one(ranks)
    is_python = any(other.process and other.process.catches_crashes for other in ranks)
    failure = Failure(
        code="R017",
        kind=Cause.HUNG,
        cause=silence,
        time=time.time(),
        evidence=tuple(f"rank {other.rank} {describe_place(other)}" for other in ranks[:_MOST_DUMPED]),
        next_step=_PY_SPY if is_python and not any(other.stack for other in ranks) else None,
    )
    if one is None:
        return replace(failure, cause=", and ".join(filter(None, [silence, describe_crowd(ranks)])))
    others = {1: "", 2: ", apart from the other rank"}
    apart = others.get(len(ranks), f", apart from the other {len(ranks) - 1} ranks")
    frame = frame_to_report(one.stack)
    named = replace(
        failure,
        rank=one.rank,
        role=one.role,
        host=one.host,
        cause=f"{describe_place(one)}{apart}; {silence}",
        place=frame.place if frame else None,
    )
    return with_thread_error(named, one)
