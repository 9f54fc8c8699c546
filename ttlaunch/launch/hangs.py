"""Notices that a run hangs: no counter of any rank has moved for long, and no rank does what it has announced to take long.

Then every rank is asked for its stacks, and the verdict names one. Ranks of a recipe are judged by their black boxes; any
other program only if a timeout was named, and by its output.
"""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.black_box import DONE, Box
from ttlaunch.launch.boxes import read_boxes
from ttlaunch.launch.causes import Cause
from ttlaunch.launch.crew import Crew
from ttlaunch.launch.failure import Failure
from ttlaunch.launch.run_folder import RunFolder
from ttlaunch.launch.stacks import parse_main_stack
from ttlaunch.launch.verdict import judge
from ttlaunch.launch.waits import Seen
from ttlaunch.launch.watch import Phase, RankState
from ttlaunch.plan.launch_plan import LaunchPlan, RecipeProgram

FIRST_STEPS, FIRST_TIMEOUT_S = 10, 120.0
LEAST_TIMEOUT_S, SLOWEST_STEPS = 30.0, 10.0
_ANNOUNCED_S = 1800.0  # what a rank may take for an evaluation, a checkpoint and the like
_LOOK_S = 0.25
_LONGEST_LOOK_S = 2.0  # a launcher that slept itself, or its whole machine, takes no rest of ranks for a hang
_STACKS_S = 2.0


@dataclass
class _Quiet:
    """How long nothing has moved, by what."""

    marks: Any = None
    since: float = 0.0
    seconds: float = 0.0


class HangWatch:
    """Watches one run for a hang; `check` is called a few times a second."""

    def __init__(self, plan: LaunchPlan, folder: RunFolder, crew: Crew, *, timeout_s: float | None) -> None:
        """Watch from now on.

        Args:
            plan: Of the run.
            folder: Of the run.
            crew: Who stands beside the ranks.
            timeout_s: How long nothing may move; None: 120 s, after ten steps as long as ten of the slowest, at least 30 s.
        """
        self._is_recipe = isinstance(plan.program, RecipeProgram)
        self._world_size = plan.world_size
        self._folder = folder
        self._crew = crew
        self._timeout_s = timeout_s
        self._quiet = _Quiet()
        self._looked = time.monotonic()
        self._asked: float | None = None
        self._sizes_asked: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def check(self, ranks: list[RankState]) -> Failure | None:
        """The verdict once the run hangs; else None."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S or (self._timeout_s is None and not self._is_recipe):
            return None
        rested, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        return self._check_recipe(ranks, now, rested) if self._is_recipe else self._check_output(ranks, rested)

    def _check_recipe(self, ranks: list[RankState], now: float, rested: float) -> Failure | None:
        if any(state.phase in {Phase.WAITING, Phase.STARTING} for state in ranks):
            return None
        boxes = read_boxes(self._crew.boxes, world_size=self._world_size)
        counters = {rank: box.counters for rank, box in boxes.items()}
        if not boxes or self._has_moved((counters, sum(state.exit is not None for state in ranks)), rested):
            self._asked = None
            return None
        if self._quiet.seconds < self._timeout(boxes) + self._crew.boxes_late_s:
            return None
        stopped = self._crew.stopped(ranks)
        if self._is_granted(boxes) and not stopped:
            return None
        if self._asked is None:
            self._asked = now
            self._sizes_asked = self._sizes = self._stack_sizes()
            self._crew.signal_ranks(ranks, signal.SIGUSR2)
            return None
        if now - self._asked < _STACKS_S and not self._have_answered(stopped):
            return None
        return judge(self._seen(ranks, boxes, stopped), quiet_s=self._quiet.seconds, now=time.time())

    def _has_moved(self, marks: object, rested: float) -> bool:
        if marks != self._quiet.marks:
            self._quiet = _Quiet(marks, time.time())
            return True
        self._quiet.seconds += rested
        return False

    def _timeout(self, boxes: Mapping[int, Box]) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        if max(box.timed for box in boxes.values()) < FIRST_STEPS:
            return FIRST_TIMEOUT_S
        slowest = max(box.slowest for box in boxes.values()) / 1e9
        return max(LEAST_TIMEOUT_S, SLOWEST_STEPS * slowest)

    def _is_granted(self, boxes: Mapping[int, Box]) -> bool:
        """Whether a rank that waits for none is at what it has announced."""
        busy = any(box.phase and not box.waiting for box in boxes.values() if box.phase != DONE)
        return busy and self._quiet.seconds < max(_ANNOUNCED_S, self._timeout(boxes))

    def _stack_sizes(self) -> dict[int, int]:
        return {rank: _size(self._folder.file(contract.stacks_file(rank))) for rank in range(self._world_size)}

    def _have_answered(self, stopped: frozenset[int]) -> bool:
        """Whether every rank that can has written its stacks, and none still writes."""
        before, sizes = self._sizes, self._stack_sizes()
        silent = [rank for rank, size in sizes.items() if size <= self._sizes_asked[rank] and rank not in stopped]
        self._sizes = sizes
        return not silent and before == sizes

    def _seen(self, ranks: list[RankState], boxes: Mapping[int, Box], stopped: frozenset[int]) -> list[Seen]:
        return [self._seen_one(state, boxes.get(state.row.rank), state.row.rank in stopped) for state in ranks]

    def _seen_one(self, state: RankState, box: Box | None, is_stopped: bool) -> Seen:  # noqa: FBT001 - one of the above
        row = state.row
        idle_s = None
        if box and box.operations:
            last = box.operations[-1]
            idle_s = time.time() + state.clock_offset_s - box.seconds(last.ended or last.begun)
        stack = parse_main_stack(_text(self._folder.file(contract.stacks_file(row.rank))))
        return Seen(row.rank, row.role, row.host, box, is_stopped, () if is_stopped else stack, idle_s)

    def _check_output(self, ranks: list[RankState], rested: float) -> Failure | None:
        """Of a program that is no recipe: whether any rank has printed anything."""
        if any(state.phase is Phase.WAITING for state in ranks):
            return None
        files = [
            name(rank) for rank in range(self._world_size) for name in (contract.stdout_file, contract.stderr_file)
        ]
        sizes = [_size(self._folder.file(name)) for name in files]
        if self._has_moved((sizes, sum(state.exit is not None for state in ranks)), rested):
            return None
        if self._quiet.seconds < (self._timeout_s or FIRST_TIMEOUT_S):
            return None
        stopped = self._crew.stopped(ranks)
        if stopped:
            seen = [self._seen_one(state, None, state.row.rank in stopped) for state in ranks]
            return judge(seen, quiet_s=self._quiet.seconds, now=time.time())
        cause = f"no rank has printed anything for {self._quiet.seconds:.0f} s"
        return Failure("R017", None, None, None, None, cause, time.time(), kind=Cause.HUNG)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
