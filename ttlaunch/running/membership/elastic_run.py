"""The supervisor's side of an elastic run: notice which workers are gone, and start others in their place."""

import signal
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from typing import Any

from ttlaunch import contract
from ttlaunch.contract import worker_name
from ttlaunch.diagnostics.count import counted, render_duration
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.membership.coordinator_state import Phase as MembersPhase
from ttlaunch.membership.messages import Member
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.records.members import MemberReport
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.failures.name_cause import name_hung_worker, signal_name
from ttlaunch.running.logs.output import View
from ttlaunch.running.membership.journal import Journal
from ttlaunch.running.membership.membership import FASTER, Membership
from ttlaunch.running.membership.outside import OutsideWorkers
from ttlaunch.running.membership.why_over import Ended, why_nobody_goes_on
from ttlaunch.running.rank_controller import RankController
from ttlaunch.running.runs.facts import MEMBERS_FILE
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import Phase, RankState
from ttlaunch.system_reason import system_reason

FUTILE = 3
"""After so many replacements in a row at one place that end before they have taken part, no other one is started there."""
_SAVE_AGAIN_S = 0.5
_MEASURED_S = (
    2.0  # a first step that takes longer is measured less exactly: looking for its end costs a sixth of a processor
)
_QUIET_S, _REMINDER_S = 15.0, 60.0  # after which, and how often then, it is said who is awaited
_NO_CHECKPOINT = (
    "the run has saved no checkpoint; with `--set checkpoint_config.interval=N` one is saved after every N steps"
)
_OVER = {MembersPhase.FINISHED, MembersPhase.STRANDED}


class ElasticRun:
    """Keeps an elastic run going while workers end: tells the coordinator, and starts a worker in place of each lost one.

    Attributes:
        membership: Who takes part.
        tolerated: The workers whose end is no failure of the run, since others go on.
        lost_before_engine: After `judge_end`, the workers that were lost while the engine still ran and without which nobody had gone on.
        too_late: The workers that were still starting when all steps were made, and were ended with the run.
        failure: Why the run cannot go on although no worker has failed; None as long as it can.
        outside: The workers that join by themselves.
        waits_for_others: Whether workers may come that this run does not start itself.
        has_saved: Whether workers were ordered to save their state from memory, see `end_waiting`.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        view: View,
        *,
        controller: RankController,
        newest_checkpoint: Callable[[], int | None],
    ) -> None:
        """Watch a run that has not begun; its plan has `elastic`, and `newest_checkpoint` returns the step of the newest checkpoint."""
        assert plan.elastic is not None  # noqa: S101 - the caller has looked
        self._limits, self._newest_checkpoint = plan.elastic, newest_checkpoint
        self._journal = Journal(folder)
        self._name, self._folder, self._view, self._controller = plan.program.name, folder, view, controller
        self.membership = Membership(plan.elastic, self._journal, tell=self._tell)
        self.tolerated: frozenset[int] = frozenset()
        self.lost_before_engine: frozenset[int] = frozenset()
        self.too_late: frozenset[int] = frozenset()
        self.failure: Failure | None = None
        self.waits_for_others = self.has_saved = False
        self._save_again = 0.0
        self._let_go: set[int] = set()
        self._planned = plan.world_size
        self._ranks: Sequence[RankState] = ()
        self.outside = OutsideWorkers(
            self.membership,
            self._journal,
            planned=plan.world_size,
            ranks=lambda: self._ranks,
            folder=folder,
            role=plan.ranks[0].role,
        )
        self._is_ending = False
        self._gone: set[int] = set()
        self._hung: dict[int, Failure] = {}  # those of them that it has killed because they made no progress
        self._seen_by_engine: frozenset[int] = frozenset()  # those of them that it has outlived
        self._away: set[str] = set()  # lost hosts that the run goes on without
        self._futile: dict[int, int] = {}  # by place
        self._shown = 1  # changes; the first is the start
        self._next_reminder: float | None = None  # when to say again who is awaited
        self._is_journal_reported = False

    @property
    def is_changing(self) -> bool:
        """Whether members have stopped and wait for orders, so that every moment counts, or have just gone on, which is measured."""
        changes = self.membership.changes
        if self.membership.phase is MembersPhase.COLLECTING:
            return True
        return bool(changes) and changes[-1].pause_s is None and time.time() - changes[-1].time < _MEASURED_S

    @property
    def is_over(self) -> bool:
        """Whether every member has made all steps."""
        return self.membership.phase is MembersPhase.FINISHED

    def waits_for_workers(self, ranks: Sequence[RankState]) -> bool:
        """Whether no step is made because too few workers are there, and none is starting here: the run then only waits."""
        state = self.membership.state
        if not state.missing or self.membership.phase in {*_OVER, MembersPhase.RUNNING}:
            return False
        return not any(one.exit is None and one.row.rank not in {*self._gone, *state.seen} for one in _present(ranks))

    def end_waiting(self, ranks: Sequence[RankState]) -> None:
        """Have workers that wait for others save what they have and end, because the run is to stop and nobody comes any more.

        Call it a few times a second while the run is being stopped; the order is repeated until it is obeyed.
        """
        now = time.monotonic()
        if not self.membership.changes or now < self._save_again or not self.waits_for_workers(ranks):
            return
        self._save_again = now + _SAVE_AGAIN_S
        if not self.has_saved:
            self._say("too few workers are left to finish the step; they save the one before it")
        self.has_saved = True
        for state in _present(ranks):
            if state.exit is None and state.row.rank not in self._gone:
                self._controller.tell(state.row.rank, contract.ORDER_TO_SAVE)

    def let_outside_go(self) -> bool:
        """Have workers from other machines leave at the next boundary of a step: an order to stop reaches only ranks of this run.

        They are members of an epoch, in which the others would wait for them after the last step. Call it a few times a second
        before ranks are ordered to stop.

        Returns:
            Whether none of them takes part any more, or nobody else does.
        """
        state, now = self.membership.state, time.monotonic()
        outside = {number for number in state.workers if number >= self._planned}
        if outside.issuperset(state.members):
            return True
        for number in outside - self._let_go:
            self._let_go.add(number)
            self.membership.let_go(number, now)
        return outside.isdisjoint(self.membership.state.members)

    def outlives(self, hang: Failure, ranks: Sequence[RankState], *, why_lost: Callable[[RankState], str]) -> bool:
        """End the worker that is to blame for a hang, if others have the weights and go on; returns whether they do.

        A worker in a step is ended sooner (`membership/pulse.py`); this is for what may take long, such as its first step.
        """
        number = hang.rank
        if number is None or not self.membership.changes or self.membership.phase in _OVER:
            return False
        others = [one for other, one in self.membership.state.workers.items() if other != number]
        if number not in self._gone and any(one.applied is not None for one in others):
            self._end_hung(ranks[number], hang.cause, time.monotonic(), why=f"{hang.cause}, and was killed")
            self._replace(ranks, [number], why_lost)
        return number in self._gone

    def take(self, reports: Iterable[tuple[RankState, MemberReport]]) -> None:
        """Take what workers have reported since the last look."""
        self.membership.take(((state.row.rank, report) for state, report in reports), time.monotonic())

    def excuse(self, seconds: float) -> None:
        """Blame no worker for the last so many seconds, in which the supervisor did not run: call it before it takes or notices anything.

        Where the whole machine stood still, workers could not report either, and the supervisor may go on before they do.
        """
        self.membership.excuse(seconds, time.monotonic())

    def notice(
        self,
        ranks: Sequence[RankState],
        *,
        why_lost: Callable[[RankState], str],
        is_ending: bool,
        away: Collection[str] = (),
    ) -> None:
        """Look who is gone; call it a few times a second, after records were taken.

        Args:
            ranks: All ranks.
            why_lost: Returns how a rank was lost that has left no record of its end, as a clause; empty if it was not.
            is_ending: Whether the run is being ended, so that nobody is replaced any more.
            away: The hosts that are lost now, and may come back.
        """
        now, self._ranks = time.monotonic(), ranks
        if is_ending and not self._is_ending:
            self.membership.let_end(now)
        self._is_ending = is_ending
        gone = [(state, why) for state in ranks if (why := self._why_gone(state) or self._if_present(state, why_lost))]
        for state, why in gone:
            self._gone.add(state.row.rank)
            self._lose(state, why, now)
        lost = [state.row.rank for state, _ in gone if not _comes_again(state)]  # they are replaced
        for number, seconds in self.membership.late(now).items():
            if number >= self._planned:
                self.membership.lose(number, f"made no progress for {render_duration(seconds)}", now)
            elif number not in self._gone:
                self._end_hung(ranks[number], f"made no progress for {render_duration(seconds)}", now)
                lost.append(number)
        self.membership.tick(now)
        has_begun = bool(self.membership.changes)  # until then, a worker that ends may well do so every time
        if has_begun and not is_ending:
            self._replace(ranks, lost, why_lost)
        may_return = not is_ending and (self._away or (has_begun and away))
        can_come = (self.waits_for_others or may_return) and not self.membership.is_frozen
        is_too_few = not can_come and self._has_too_few(ranks, is_ending=is_ending)
        if self.membership.phase is MembersPhase.STRANDED or is_too_few:
            self._note_failure(ranks, why_lost)
            return
        if self.is_over:
            self._end_starting(ranks)
        self.tolerated = frozenset(number for number in self._gone if not _comes_again(ranks[number]))
        if not has_begun and not is_ending:
            self._replace(ranks, lost, why_lost)
        self._say_what_changed(now)

    def note_engine(self) -> None:
        """Note that what started the workers still runs, so that all that are lost by now were lost before it."""
        self._seen_by_engine = frozenset(self._gone)

    def judge_end(self) -> None:
        """Tolerate only those without which others have gone on: what started the workers has ended, and the run with it."""
        changes = self.membership.changes
        if changes and not self.is_over and not self._is_ending and self.failure is None:
            needed = self.tolerated & frozenset(changes[-1].members)
            self.tolerated -= needed
            self.lost_before_engine = needed & self._seen_by_engine

    def notice_hosts(self, lost: MutableMapping[str, Any], ranks: Sequence[RankState], *, is_ending: bool) -> None:
        """Let the run go on without hosts that are lost, and with those that are back; call it after `notice`.

        Args:
            lost: The lost hosts, by name; a host that is back is removed from it.
            ranks: All ranks.
            is_ending: Whether the run is being ended, so that nobody is replaced any more.
        """
        if self.failure is not None or is_ending:
            return
        for host in lost.keys() - self._away:
            if any(state.row.host == host and state.row.rank not in self.tolerated for state in _present(ranks)):
                continue  # its loss ends the run
            self._controller.forget(host)
            self._controller.rejoin(host)
            self._away.add(host)
        for host in self._controller.rejoined():
            self._away.discard(host)
            lost.pop(host, None)
            self._say(f"host {host} is back")
            self._replace(ranks, self._without_worker(host, ranks), lambda _: "")

    def _without_worker(self, host: str, ranks: Sequence[RankState]) -> list[int]:
        """Return the last worker of each place on a host where none is left."""
        newest = {state.row.rank % self._limits.first: state for state in _present(ranks) if state.row.host == host}
        return [state.row.rank for state in newest.values() if state.row.rank in self._gone]

    def _tell(self, member: Member, message: bytes) -> None:
        if member.number < self._planned:
            self._controller.tell(member.number, message)
        else:
            self.outside.pass_on(member, message)

    def _if_present(self, state: RankState, why_lost: Callable[[RankState], str]) -> str:
        is_here = state.row.rank not in self._gone and state.phase is not Phase.ABSENT and state.exit is None
        return why_lost(state) if is_here else ""

    def _why_gone(self, state: RankState) -> str:
        """Return how a worker has ended that should still be there, as a clause; empty if it has not, or if it may."""
        number = state.row.rank
        if number in self._gone or state.phase is Phase.ABSENT:
            return ""
        if state.exit is not None and not state.exit.is_failure and (self.is_over or number in self.membership.left):
            return ""  # it was dismissed, or the run is over
        if state.exit is not None or state.error is not None:
            return _how_it_ended(state)
        return ""

    def _lose(self, state: RankState, why: str, now: float) -> None:
        number, place = state.row.rank, state.row.rank % self._limits.first
        if self._is_ending and state.exit is not None and not state.exit.is_failure and state.error is None:
            self.membership.note_end(number, now)
            return
        if not self.is_over and not self._is_ending:
            self._say(f"{worker_name(number)} ({state.row.host}) {why}")
        has_taken_part = any(
            number in change.members and change.pause_s is not None for change in self.membership.changes
        )
        self._futile[place] = 0 if has_taken_part else self._futile.get(place, 0) + 1
        append_event(self._folder, "worker_lost", worker=worker_name(number), reason=why)
        self.membership.lose(number, why, now)

    def _end_hung(self, state: RankState, what: str, now: float, *, why: str = "") -> None:
        """Kill a worker that has stopped making progress, as the clause `what` says; a stopped process dies too."""
        number = state.row.rank
        self._gone.add(number)
        self._hung[number] = name_hung_worker(state, what, time=time.time())
        self._lose(state, why or f"{what} and was killed", now)
        self._controller.signal_ranks([state], signal.SIGKILL)

    def _end_starting(self, ranks: Sequence[RankState]) -> None:
        """End workers that are still starting when all steps are made."""
        seen = self.membership.state.seen
        for state in ranks:
            is_starting = state.started is not None and state.exit is None and state.row.rank not in self._gone
            if is_starting and state.row.rank not in seen:
                self._gone.add(state.row.rank)
                self.too_late |= {state.row.rank}
                self._controller.signal_ranks([state], signal.SIGKILL)

    def _replace(self, ranks: Sequence[RankState], lost: Collection[int], why_lost: Callable[[RankState], str]) -> None:
        """Start a worker in place of each that was lost, on the same host with the same devices."""
        if self.membership.phase in _OVER or self.membership.is_frozen:
            return
        for number in lost:
            place = number % self._limits.first
            free = [state for state in ranks[place :: self._limits.first] if state.phase is Phase.ABSENT]
            if not free or why_lost(free[0]):
                continue
            if self._futile.get(place, 0) >= FUTILE:
                self._say(f"no worker starts in place of {worker_name(number)}: the last {FUTILE} there ended at once")
                continue
            self._controller.add(free[:1])
            started = worker_name(free[0].row.rank)
            append_event(self._folder, "worker_started", worker=started, in_place_of=worker_name(number))
            self._say(f"{started} starts in place of {worker_name(number)}")

    def _has_too_few(self, ranks: Sequence[RankState], *, is_ending: bool) -> bool:
        """Whether the workers that are left are too few, and none is starting."""
        if self.membership.phase in _OVER:
            return False
        present = [state for state in _present(ranks) if state.row.rank not in self._gone]
        if is_ending:
            return not present
        is_short = sum(state.exit is None for state in present) < self._limits.minimum
        return is_short and self.membership.phase is not MembersPhase.RUNNING

    def _outlived(self, ranks: Sequence[RankState]) -> frozenset[int]:
        """Return the workers without which others have made a step, and those that were dismissed: they did not end the run."""
        made = [change.members for change in self.membership.changes if change.pause_s is not None]
        before = {number for members in made[:-1] for number in members}
        dismissed = {
            state.row.rank
            for state in ranks
            if state.exit is not None and not state.exit.is_failure and state.row.rank in self.membership.left
        }
        return frozenset(before.difference(*made[-1:]) | (dismissed - self._gone))

    def _note_failure(self, ranks: Sequence[RankState], why_lost: Callable[[RankState], str]) -> None:
        """Note why the run cannot go on; the failure to name is one that the others did not outlive."""
        self.tolerated = self._outlived(ranks)
        self.failure = self.failure or self._too_few(ranks, why_lost)
        if self.failure is None or self.failure.rank is None:
            # This supervisor itself has killed those that made no progress: where they are not what ended the run, their ends by
            # SIGKILL must not be taken for what did.
            self.tolerated |= self._hung.keys()

    def _too_few(self, ranks: Sequence[RankState], why_lost: Callable[[RankState], str]) -> Failure | None:
        """Return the failure of a run whose workers are too few; None if one of them has a failure of its own to name."""
        membership = self.membership
        left = [state for state in _present(ranks) if state.row.rank not in self.tolerated]
        is_of_a_worker = any(
            (state.phase is Phase.FAILED and state.row.rank not in self._hung)
            or (state.exit is None and why_lost(state))
            for state in left
        )
        noticed = tuple(membership.lost.items())  # one step: other threads may add to it
        lost = {number: had_weights for number, had_weights in noticed if number not in self.tolerated}
        return why_nobody_goes_on(
            membership.state,
            Ended(why=membership.left, lost=lost, hung=self._hung),
            is_of_a_worker=is_of_a_worker,
            needed=self._limits.minimum,
            at=time.time(),
            next_step=self._how_to_go_on(),
        )

    def _how_to_go_on(self) -> str:
        step = self._newest_checkpoint()
        if step is None:
            return _NO_CHECKPOINT
        command = f"`ttlaunch run {clean(self._name)} --resume {self._folder.run_id}`"
        return f"{command} continues from the checkpoint after step {step}, with the same options"

    def _say_what_changed(self, now: float) -> None:
        changes = self.membership.changes
        for number, change in enumerate(changes[self._shown :], start=self._shown):
            if change.pause_s is None and change is changes[-1]:
                break
            self._shown += 1
            if change.pause_s is None or change.reasons == (FASTER,):
                continue  # it was over before it had made a step, or only divided the work anew
            if change.members == changes[number - 1].members:
                self._say("; ".join(change.reasons))
            count = change.computed_anew
            anew = f", {count} micro-batch{'' if count == 1 else 'es'} computed anew" if count else ""
            who = counted(len(change.members), "worker")
            self._say(
                f"epoch {change.epoch}: {who} after step {change.step}{anew}; the change took {change.pause_s:.1f} s"
            )
        self._say_who_is_awaited(now)
        if self._journal.error is not None and not self._is_journal_reported:
            self._is_journal_reported = True
            reason = system_reason(self._journal.error)
            self._say(f"{MEMBERS_FILE} cannot be written: {reason}; nobody joins this run any more")

    def _say_who_is_awaited(self, now: float) -> None:
        missing = self.membership.state.missing
        if not missing or self.membership.phase in {*_OVER, MembersPhase.RUNNING}:
            self._next_reminder = None
            return
        if self._next_reminder is None:
            is_starting = self.membership.phase is MembersPhase.WAITING
            self._next_reminder = now + (_REMINDER_S if is_starting else _QUIET_S)
        if now < self._next_reminder:
            return
        here = ", ".join(map(worker_name, sorted(self.membership.state.staying))) or "nobody"
        changes, left = self.membership.changes, self.membership.left
        gone = [number for number in (changes[-1].members if changes else ()) if number in left]
        missed = "".join(f"; {worker_name(number)} {left[number]}" for number in gone)
        self._say(f"waiting for {counted(missing, 'worker')} more of {self._limits.minimum}; ready: {here}{missed}")
        ready = sorted(map(worker_name, self.membership.state.staying))
        append_event(self._folder, "workers_awaited", missing=missing, of=self._limits.minimum, ready=ready)
        self._next_reminder = now + _REMINDER_S

    def _say(self, text: str) -> None:
        self._view.output("stderr", clean(text).encode())


def _present(ranks: Sequence[RankState]) -> list[RankState]:
    """Return the workers that were started, in order."""
    return [state for state in ranks if state.phase is not Phase.ABSENT]


def _comes_again(state: RankState) -> bool:
    """Whether a worker ended by what every other one would end by, too.

    It could not write its part of a checkpoint, or it stopped before an update with NaN or infinite values, whose gradient all have, or
    because an audit has failed.
    """
    return state.error is not None and state.error.type in {"CheckpointWriteError", "NotFiniteError", "AuditError"}


def _how_it_ended(state: RankState) -> str:
    """Return how a worker has ended, as a clause."""
    ending = state.exit
    if state.error is not None:
        return f"raised {state.error.type}: {state.error.message}"[:200]
    if ending is None or ending.start_error:
        return "could not be started"
    if ending.signal:
        return f"was killed by {signal_name(ending.signal)}"
    return "ended before the last step" if ending.status == 0 else f"exited with status {ending.status}"
