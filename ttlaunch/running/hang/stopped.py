"""Inform the user of ranks and shims that a signal has stopped, before the run counts as hung: other ranks may still make progress.

This is done only if all ranks are on this machine. Other hosts are only asked for stopped ranks when a hang is suspected.
"""

import time
from collections.abc import Callable, Sequence

from ttlaunch.diagnostics.count import render_duration
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.running.logs.output import View
from ttlaunch.running.rank_controller import RankController
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import RankState

PATIENCE_S = 5.0
"""How long a rank must be stopped before the user is informed: a debugger or a profiler also stops it for a moment."""

_LOOK_S = 1.0


class StoppedWatch:
    """Informs the user once of each stopped rank, and when the rank continues."""

    def __init__(
        self, folder: RunFolder, view: View, controller: RankController, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._view, self._controller, self._clock = folder, view, controller, clock
        self._looked = clock()
        self._since: dict[int, float] = {}
        self._reported: set[int] = set()

    def notice(self, ranks: Sequence[RankState]) -> None:
        """Report what is new; call it a few times a second."""
        now = self._clock()
        if not self._controller.answers_at_once or now - self._looked < _LOOK_S:
            return
        self._looked = now
        snapshot = self._controller.snapshot(ranks, since=0.0)
        stopped = snapshot.stopped if snapshot else frozenset()
        shims = {one.rank for _, one in snapshot.helpers if one.is_shim} if snapshot else set()
        for state in ranks:
            rank, started = state.row.rank, state.started
            if rank in stopped:
                pid = started.pid if started else None
                self._notice_stopped(state, now, f"was stopped by a signal; `kill -CONT {pid}` continues it")
            elif rank in shims:
                pid = started.shim_pid if started else None
                text = f"cannot end or print: its shim was stopped by a signal; `kill -CONT {pid}` continues it"
                self._notice_stopped(state, now, text)
            else:
                self._notice_moving(state, now)

    def _notice_stopped(self, state: RankState, now: float, text: str) -> None:
        rank = state.row.rank
        since = self._since.setdefault(rank, now)
        if rank in self._reported or now - since < PATIENCE_S:
            return
        self._reported.add(rank)
        self._report("rank_stopped", state, seconds=now - since, text=text)

    def _notice_moving(self, state: RankState, now: float) -> None:
        since = self._since.pop(state.row.rank, now)
        if state.row.rank in self._reported:
            self._reported.remove(state.row.rank)
            if state.exit is None:
                self._report(
                    "rank_goes_on", state, seconds=now - since, text=f"goes on after {render_duration(now - since)}"
                )

    def _report(self, event: str, state: RankState, *, seconds: float, text: str) -> None:
        row = state.row
        append_event(self._folder, event, rank=row.rank, seconds=round(seconds, 1))
        self._view.output("stderr", clean(f"rank {row.rank} ({row.role}, {row.host}) {text}").encode())
