"""Decide which ranks and which engine get which signal, and when, if a run does not end by itself.

This module only decides; `supervise.py` sends the signals. After a rank has failed, the engine has a moment to end by
itself and is then ended. After an order (Ctrl-C, or a signal to the launcher, by which a batch system also announces its time limit), ranks have a grace period: the ranks of a
recipe agree on a step, save it and exit; any other program is sent SIGTERM. A second order shortens the grace period, and a
third ends it. The ranks that remain then write their stacks and are killed.
"""

import math
import shlex
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ttlaunch.diagnostics.count import render_duration
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.checkpoints.complete import newest_step
from ttlaunch.running.conclude import Ending
from ttlaunch.running.failures.attribution import patience_for_cause_s
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.stderr_tail import StderrTail
from ttlaunch.running.runs.launcher import TIME_LIMIT_SIGNAL
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState

SHORT_GRACE_S = 5.0
"""The longest grace period that ranks still have after a second order."""
_AFTER_FAILURE_S = 1.5  # mpirun usually ends within 0.5 s of the first rank that fails
# Ranks that have lost a connection may end sooner than the exception is seen in the rank that closed it. All shims are lost when
# the engine is killed, which shows in that time too.
_AFTER_FIRST_END_S = 0.5
AFTER_TERM_S = 1.5
_AFTER_LOSS_S = 0.2  # mpirun does not notice that a host is gone, and the ranks of a lost host have ended already
_STACKS_S = 0.3
_SAME_ORDER_S = 1.0  # within which two SIGTERM are one order
_AT_ONCE = 3  # the order with this number ends every rank at once
STOP, _STACKS = signal.SIGUSR1, signal.SIGUSR2


@dataclass(frozen=True)
class Grace:
    """The time that ranks have after an order to end, and the command from which the hint to resume is made.

    Attributes:
        seconds: The time that ranks have to save and exit.
        command: The arguments that started the run; empty for a run that cannot be resumed by a command.
    """

    seconds: float = 30.0
    command: tuple[str, ...] = ()


USUAL_GRACE = Grace()


@dataclass(frozen=True)
class ShowMessage:
    """Show a message to the user."""

    text: str


@dataclass(frozen=True)
class SignalRanks:
    """Send a signal directly to every rank's process, after writing the stop marker `marker` to every host."""

    number: int
    marker: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SignalEngine:
    """Send a signal to the engine's process on this machine."""

    number: int


@dataclass(frozen=True)
class NoteFailure:
    """Write into the run's history that the run has failed, which was noticed just now."""


Act = ShowMessage | SignalRanks | SignalEngine | NoteFailure


class RunEnd:
    """Decides step by step how to end a run, after an order or after a failure."""

    def __init__(
        self,
        ending: Ending,
        plan: LaunchPlan,
        *,
        grace_s: float,
        loses_ranks: bool = False,
        stderr_tail: Callable[[int], StderrTail] = lambda _: StderrTail(),
    ) -> None:
        """Begin with a run that is not to be ended yet.

        Args:
            ending: The record of the end, which this object updates.
            plan: The plan of the run: ranks of a recipe can stop after a common step, other programs cannot.
            grace_s: The time that ranks have to exit after an order.
            loses_ranks: Whether the engine lets the other ranks go on after a failure, so that waiting for its end is no use.
            stderr_tail: Returns the end of a rank's log.
        """
        self._loses_ranks = loses_ranks
        self._stderr_tail = stderr_tail
        self._after_failure_s = _AFTER_FIRST_END_S if loses_ranks else _AFTER_FAILURE_S
        self._ending = ending
        self._is_recipe = isinstance(plan.program, RecipeProgram)
        self._saves = keeps_checkpoints(plan)
        self._grace_s = grace_s
        self._orders: deque[int] = deque()
        self._count = 0
        self._deadline = math.inf
        self._stacks_at: float | None = None
        self._terminated_at = -math.inf

    def order(self, number: int) -> None:
        """Note a signal to the launcher; safe in a signal handler."""
        self._orders.append(number)

    def decide(self, now: float, ranks: Sequence[RankState]) -> Iterator[Act]:
        """Yield what the supervisor must do now; call it a few times a second.

        While a run that has failed is not ended yet, `ranks` must also have the exceptions that are in flight.
        """
        ending = self._ending
        while self._orders:
            yield from self._take_order(self._orders.popleft(), now, ranks)
        if self._has_failed(ranks) and not ending.is_failing:
            ending.is_failing = True
            ending.since = ending.since or now
            yield NoteFailure()
            differs = ending.failure is not None and ending.failure.kind is Cause.DIFFERS  # then no rank ends by itself
            self._deadline = min(
                self._deadline, now + (0.0 if ending.fatal_lost_hosts or differs else self._after_failure_s)
            )
        if ending.since is None:
            return
        if ending.terminated is not None:
            patience_s = _AFTER_LOSS_S if ending.fatal_lost_hosts else AFTER_TERM_S
            if not ending.killed and now - ending.terminated >= patience_s:
                ending.killed = True
                yield SignalEngine(signal.SIGKILL)
        elif now >= self._deadline and not self._waits_for_cause(now, ranks):
            yield from self._force(now, ranks)
        elif ending.signal_number:
            yield from self._wait_for_ranks(now, ranks)

    def _take_order(self, number: int, now: float, ranks: Sequence[RankState]) -> Iterator[Act]:
        if number == TIME_LIMIT_SIGNAL and self._count:
            return  # the grace period that has begun ends before the time limit does
        if number == signal.SIGTERM:
            # Slurm and others signal all processes of a job: the view, which passes the signal on, and the supervisor.
            if now - self._terminated_at < _SAME_ORDER_S:
                return
            self._terminated_at = now
        self._count += 1
        ending = self._ending
        if self._count == 1:
            ending.signal_number, ending.since = number, ending.since or now
            if ending.is_failing or ending.terminated is not None:
                return
            yield from self._begin_grace(number, now, ranks)
        elif ending.terminated is None and number != signal.SIGHUP:
            left = 0.0 if self._count >= _AT_ONCE else min(SHORT_GRACE_S, max(0.0, self._deadline - now))
            self._deadline = now + left
            again = f"{render_duration(left)} are left; {_again(number)} ends every rank at once"
            yield ShowMessage(again if left else "ending every rank at once")

    def _begin_grace(self, number: int, now: float, ranks: Sequence[RankState]) -> Iterator[Act]:
        self._deadline = now + self._grace_s
        starting = {Phase.WAITING, Phase.STARTING} if self._is_recipe else {Phase.WAITING}
        if not self._grace_s or any(state.phase in starting for state in ranks if not state.row.later):
            self._deadline = (
                now  # no grace period was wanted, or some ranks have not begun and there is nothing to save
            )
            yield ShowMessage(f"{_ordered_by(number)}: ending every rank at once")
            return
        text = f"ranks were sent SIGTERM and have {self._grace_s:g} s to end"
        if self._is_recipe:
            text = f"ranks finish their step{' and save it' if self._saves else ''}, within {self._grace_s:g} s"
        next_s = min(SHORT_GRACE_S, self._grace_s)
        yield ShowMessage(f"{_ordered_by(number)}: {text}; {_again(number)} leaves them {next_s:g} s")
        yield SignalRanks(STOP) if self._is_recipe else SignalRanks(signal.SIGTERM, {"after_step": None})

    def _wait_for_ranks(self, now: float, ranks: Sequence[RankState]) -> Iterator[Act]:
        """Choose the step after which all ranks of a recipe stop; end the engine of any other program after its ranks."""
        if not self._is_recipe:
            if all(state.exit or state.phase is Phase.ABSENT for state in ranks):
                self._ending.terminated = now
                yield SignalEngine(signal.SIGTERM)
            return
        # A worker whose shim was killed has no record of its end, and answers no more.
        there = [state for state in ranks if state.row.rank not in self._ending.tolerated]
        steps = [state.stops_after for state in there if state.phase is Phase.RUNNING]
        # Every rank has written the step to which it is already committed. All ranks can still finish the largest of these
        # steps; with a smaller one, a rank would wait for a partner that has stopped.
        known = [step for step in steps if step is not None]
        if self._ending.after_step is None and known and len(known) == len(steps):
            self._ending.after_step = max(known)
            yield SignalRanks(STOP, {"after_step": self._ending.after_step})

    def _force(self, now: float, ranks: Sequence[RankState]) -> Iterator[Act]:
        """End the remaining ranks and the engine; ranks that did not obey an order write their stacks first."""
        ending = self._ending
        remaining = tuple(state for state in ranks if state.exit is None and state.phase is not Phase.ABSENT)
        if self._stacks_at is None:
            self._stacks_at = now
            if (
                ending.signal_number
                and not ending.is_failing
                and self._count < _AT_ONCE
                and now > (ending.since or now)
            ):
                ending.outstayed = {state.row.rank: now - (ending.since or now) for state in remaining}
            if (
                self._is_recipe
                and ending.signal_number
                and any(state.phase is not Phase.WAITING for state in remaining)
            ):
                yield SignalRanks(_STACKS)
                return
            self._stacks_at = -math.inf
        if now - self._stacks_at < _STACKS_S:
            return
        ending.terminated = now
        if ending.signal_number and not ending.is_failing and (self._count >= _AT_ONCE or ending.outstayed):
            yield SignalRanks(signal.SIGKILL)
        yield SignalEngine(signal.SIGTERM)

    def _waits_for_cause(self, now: float, ranks: Sequence[RankState]) -> bool:
        """Whether ranks may go on after a failure, because the rank that caused it may be one that has not ended yet."""
        ending = self._ending
        is_known = (
            ending.signal_number
            or ending.failure
            or ending.fatal_lost_hosts
            or ending.fatal_shims
            or ending.lost_folders
        )
        if not self._loses_ranks or is_known:
            return False
        return now < (ending.since or now) + patience_for_cause_s(ranks, self._stderr_tail)

    def _has_failed(self, ranks: Sequence[RankState]) -> bool:
        """Whether the run has failed; after SIGTERM, no ending of a program that is not a recipe counts as a failure."""
        ending = self._ending
        if ending.fatal_lost_hosts or ending.failure is not None:
            return True
        if any(lost.ends_run for lost in ending.lost_folders.values()):
            return True
        if ending.signal_number and not self._is_recipe:
            return False
        failed = (state.row.rank for state in ranks if state.phase is Phase.FAILED)
        return bool(ending.fatal_shims) or any(rank not in ending.tolerated for rank in failed)


def keeps_checkpoints(plan: LaunchPlan) -> bool:
    """Whether the ranks of a plan save checkpoints."""
    config = plan.as_json()["config"] or {}
    return (config.get("checkpoint_config") or {}).get("interval") is not None


def stopped(ending: Ending, folder: RunFolder, grace: Grace) -> dict[str, Any] | None:
    """Describe an ordered end for the report: the last step, the saved step, and the command that resumes from it.

    Returns None if nobody ordered the end.
    """
    if not ending.signal_number:
        return None
    saved = newest_step(folder.path)
    return {
        "signal": signal.Signals(ending.signal_number).name,
        "after_step": ending.after_step,
        "saved_step": saved,
        "resume": None if saved is None or not grace.command else _resume_command(grace.command, folder.run_id),
        "outstayed": [{"rank": rank, "after_s": round(after_s, 1)} for rank, after_s in ending.outstayed.items()],
    }


def _resume_command(command: Sequence[str], run_id: str) -> str:
    kept, is_value = [], False  # is_value: whether the argument is the value of an earlier --resume
    for argument in command:
        if not is_value and argument != "--resume" and not argument.startswith("--resume="):
            kept.append(argument)
        is_value = not is_value and argument == "--resume"
    return shlex.join([*kept, "--resume", run_id])


def _ordered_by(number: int) -> str:
    names = {
        signal.SIGINT: "Ctrl-C",
        signal.SIGHUP: "the terminal was closed",
        TIME_LIMIT_SIGNAL: "the time limit is near",
    }
    return names.get(signal.Signals(number), signal.Signals(number).name)


def _again(number: int) -> str:
    return "Ctrl-C again" if number == signal.SIGINT else "another signal"
