"""What is known of each rank while it runs: its records are read as they grow and folded into a `RankState`."""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.runs.json_files import read_object_if_any
from ttlaunch.running.runs.run_folder import RunFolder


class Phase(StrEnum):
    """How far a rank has come."""

    WAITING = "waiting"  # mpirun has not started its shim
    STARTING = "starting"  # the interpreter imports its packages
    RUNNING = "running"  # the role's function was called
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"  # ended because the run was: by Ctrl-C, or after another rank had failed


@dataclass
class RankState:
    """One rank as seen from outside.

    Attributes:
        step: The last optimizer step it reported.
        tokens: Tokens of all steps it reported.
        layer_norms: By step, the norm of the gradient of each layer that it updates.
        grad_norm: Of the last step that it reported one of.
        connection: What is wrong with the line to its host, as `silent` or `lost`; empty if nothing is.
        first_step: The first one it reported; not 1 where it goes on from a checkpoint.
        diverged: The first of the steps up to the last one whose losses are no numbers, and its loss; None if the last
            one's is a number.
        first_step_time, last_step_time: When it reported its first and last step, seconds since the epoch.
        lost_checkpoints: Why the rank has no part of a checkpoint, by step.
        stops_after: The step that it cannot stop before; known once it has heard that the run is to end.
        is_told_to_stop: Whether the ranks were told to end.
        error: What the rank wrote about its own exception.
        exit: What the shim wrote about the rank's end.
        clock_offset_s: How much later it is where the rank runs than here.
    """

    row: RankRow
    phase: Phase = Phase.WAITING
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    connection: str = ""
    diverged: tuple[int, float] | None = None
    tokens: int = 0
    first_step: int = 0
    first_step_tokens: int = 0
    first_step_time: float | None = None
    last_step_time: float | None = None
    validations: list[dict[str, Any]] = field(default_factory=list)
    layer_norms: dict[int, dict[str, Any]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    lost_checkpoints: dict[int, str] = field(default_factory=dict)
    stops_after: int | None = None
    is_told_to_stop: bool = False
    started: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    exit: dict[str, Any] | None = None
    clock_offset_s: float = 0.0

    def condition(self, *, says_ready: bool) -> str:
        """The phase in a word for people: a rank that was told to stop is stopping, until it has.

        Args:
            says_ready: Whether it says when its packages are imported, as ranks of recipes do; else it runs at once.
        """
        if self.connection and self.phase in {Phase.WAITING, Phase.STARTING, Phase.RUNNING}:
            return f"host {self.connection}"
        is_up = self.phase is Phase.RUNNING or (self.phase is Phase.STARTING and not says_ready)
        if is_up and (self.is_told_to_stop or self.stops_after is not None):
            return "stopping"
        return str(Phase.RUNNING if is_up else self.phase)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first reported step, over the time since then; None for a rank that counts none."""
        if not self.tokens:
            return None
        if self.first_step_time is None or self.last_step_time is None or self.last_step_time <= self.first_step_time:
            return None
        return (self.tokens - self.first_step_tokens) / (self.last_step_time - self.first_step_time)

    @property
    def step_s(self) -> float | None:
        """Of the steps after the first one that it reported, on average."""
        if self.first_step_time is None or self.last_step_time is None or self.step <= self.first_step:
            return None
        return (self.last_step_time - self.first_step_time) / (self.step - self.first_step)


class HasRanks(Protocol):
    """A plan, as far as it is needed to watch its ranks."""

    @property
    def ranks(self) -> tuple[RankRow, ...]:
        """Row by row."""


class Watch:
    """Reads the records of all ranks of a run; each call of `poll` takes what is new."""

    def __init__(self, plan: HasRanks, folder: RunFolder) -> None:
        self.ranks = [RankState(row) for row in plan.ranks]
        self._folder = folder
        self._offsets = [0] * len(self.ranks)
        self._clocks: dict[str, float] = {}

    def set_clock(self, host: str, offset_s: float) -> None:
        """Say how much later it is on a host than here, so that times of different hosts can be compared."""
        self._clocks[host] = offset_s
        for state in self.ranks:
            if state.row.host == host:
                state.clock_offset_s = offset_s

    def clock_offsets(self) -> dict[int, float]:
        """By rank, how much later it is where it runs than here, in seconds."""
        return {state.row.rank: self._clocks.get(state.row.host, 0.0) for state in self.ranks}

    def poll(self) -> list[tuple[RankState, dict[str, Any]]]:
        """The new records in the order in which they were written, already folded into the states."""
        fresh: list[tuple[RankState, dict[str, Any]]] = []
        for state in self.ranks:
            fresh += [(state, self._in_our_time(state, record)) for record in self._new_lines(state.row.rank)]
        fresh.sort(key=lambda pair: _time(pair[1]))
        for state, record in fresh:
            fold(state, record)
        is_told_to_stop = os.path.exists(self._folder.file(contract.ENDING_FILE))  # noqa: PTH110 - never raises
        for state in self.ranks:
            state.is_told_to_stop = is_told_to_stop
            self._read_endings(state)
        return fresh

    def _new_lines(self, rank: int) -> list[dict[str, Any]]:
        path = self._folder.file(contract.progress_file(rank))
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offsets[rank] += len(complete)
        records = [contract.read_record(line) for line in complete.splitlines()]
        return [record for record in records if record is not None]

    def _read_endings(self, state: RankState) -> None:
        rank = state.row.rank
        state.error = state.error or self._read_ending(state, contract.error_file(rank))
        state.exit = state.exit or self._read_ending(state, contract.exit_file(rank))
        if state.error or (state.exit and failed_exit(state.exit)):
            state.phase = Phase.FAILED
        elif state.exit:
            state.phase = Phase.DONE

    def _read_ending(self, state: RankState, name: str) -> dict[str, Any] | None:
        record = _read_json(self._folder.file(name))
        return None if record is None else self._in_our_time(state, record)

    def _in_our_time(self, state: RankState, record: dict[str, Any]) -> dict[str, Any]:
        offset = self._clocks.get(state.row.host)
        if not offset or not _is_number(record.get("time")):
            return record
        return {**record, "time": record["time"] - offset}


def steps_done(ranks: Sequence[RankState]) -> int:
    """How far a training has come: the steps of ranks that update weights, and so know the gradient's norm; else of all.

    Without a barrier a worker's step is one whose data it has, and which nobody may have applied yet.
    """
    updating = [state.step for state in ranks if state.grad_norm is not None]
    return max(updating or [state.step for state in ranks], default=0)


def failed_exit(record: dict[str, Any]) -> bool:
    """Whether a shim's record tells of anything but a rank that did its work and left with status 0."""
    return bool(record.get("status") != 0 or record.get("left_early") or record.get("start_error"))


def fold(state: RankState, record: dict[str, Any]) -> None:
    """Take one progress record into account."""
    match record.get("kind"):
        case contract.KIND_STARTED:
            state.started, state.phase = record, Phase.STARTING
        case contract.KIND_READY:
            state.phase, state.total_steps = Phase.RUNNING, record.get("total_steps")
        case contract.KIND_STEP:
            _fold_step(state, record)
        case contract.KIND_VALIDATION | contract.KIND_LAYER_NORMS:
            _fold_measured(state, record)
        case contract.KIND_PARAMETERS:
            state.digests.update(_mapping(record.get("digests")))
        case contract.KIND_RESULT:
            state.results.update(_mapping(record.get("values")))
        case contract.KIND_LOST_CHECKPOINT if _is_finite(record.get("step")):
            state.lost_checkpoints.setdefault(int(record["step"]), str(record.get("reason")))
        case contract.KIND_STOPPING if _is_finite(record.get("step")):
            state.stops_after = int(record["step"])
        case contract.KIND_DONE:
            state.phase = Phase.DONE
        case _:
            return


def _fold_measured(state: RankState, record: dict[str, Any]) -> None:
    """A validation, or norms of layers."""
    if (
        record["kind"] == contract.KIND_VALIDATION
        and _is_number(record.get("loss"))
        and _is_finite(record.get("step", 0))
    ):
        state.validations.append(record)
    step, norms = record.get("step"), record.get("norms")
    if record["kind"] == contract.KIND_LAYER_NORMS and _is_finite(step):
        state.layer_norms[int(step)] = _mapping(norms)


def _fold_step(state: RankState, record: dict[str, Any]) -> None:
    """Take what has the right type; a recipe may write records of its own making."""
    step, loss, tokens, time = (record.get(name) for name in ("step", "loss", "tokens", "time"))
    if not _is_finite(time) or not _is_finite(step):
        return
    state.step = int(step)
    if _is_number(loss):
        state.loss = float(loss)
        state.diverged = None if math.isfinite(state.loss) else state.diverged or (state.step, state.loss)
    norm = record.get("grad_norm")
    state.grad_norm = float(norm) if isinstance(norm, float) or _is_finite(norm) else state.grad_norm
    state.tokens += int(tokens) if _is_finite(tokens) else 0
    if state.first_step_time is None:
        state.first_step, state.first_step_time, state.first_step_tokens = state.step, time, state.tokens
    state.last_step_time = time


def _time(record: dict[str, Any]) -> float:
    time = record.get("time")
    return float(time) if _is_finite(time) else 0.0


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> TypeGuard[int | float]:
    return _is_number(value) and -sys.float_info.max <= value <= sys.float_info.max  # also of whole numbers without end


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_object_if_any(path) or None
