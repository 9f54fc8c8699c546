"""Counts what a rank sends: to whom, for which operation, in which phase of which step; and how long it waits.

The sender counts every message, in memory; steps that sent the same are one row. A rank writes a line to its traffic file every
few seconds, in long runs every few minutes, and at the end. So the traffic of a run that is killed is known too.

A message belongs to the operation that `operation()` names, else to the function of the recipe that sent it, without a
leading underscore and `send_` or `receive_`: `_send_weights` and `_receive_weights` are the two ends of `weights`.
"""

import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ttlaunch import contract
from ttlaunch.flight_recorder_writer import FlightRecorder, Place
from ttlaunch.runtime.telemetry.memory import Owner, TensorOwners
from ttlaunch.runtime.telemetry.trace import Trace

START, EXCHANGE, AFTER = "start", "exchange", "after"
"""Phases by themselves: before the first step, in a step, and after a step's report, where validations are."""

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""Phases that models and optimizers enter and leave."""

_PASSES = frozenset({FORWARD, BACKWARD, UPDATE})
_RUNTIME = str(Path(__file__).parents[1]) + os.sep
_VERBS = tuple(f"{_RUNTIME}{name}.py" for name in ("context", "telemetry/traffic_counter", "comm/counting"))
_LOOP = f"{_RUNTIME}training{os.sep}loop.py"
_NOTHING = contextlib.nullcontext()
_FLUSH_S, _FLUSH_SHARE = 2.0, 0.05  # the longer a run, the rarer lines are, so that days of it make no large file
_SHORT_SHARE = (
    0.002  # lines of a rank that counts no steps are short, and say what it has answered: about 1 MB in a day
)
_MOST_STEPS = 2000

Key = tuple[str, int | None, str, int]
"""Operation, bucket, phase, destination."""


class StepWatch(Protocol):
    """Looks closer at some steps of a rank, as `StepProfile` does."""

    @property
    def is_active(self) -> bool:
        """Whether messages are marked now."""

    @property
    def owners(self) -> TensorOwners:
        """The tensors that the rank keeps from one step to the next, by what they are: parameters, gradients, optimizer state."""

    def begin_step(self, step: int) -> None:
        """Begin before the step."""

    def end_step(self, step: int) -> Mapping[str, int]:
        """End the step, and return facts about this rank."""

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Name what a block does."""

    def close(self) -> None:
        """End for good."""


class TrafficCounter:
    """Counts what one rank sends, and times what it does and waits for.

    Attributes:
        step: The step that further messages belong to; 0 before the first.
        phase: What the rank does.
        label: Operation and bucket in force; None: that of the function that sends.
        trace: The timeline of the first steps; None if the run is not traced.
        profile: Torch's profiler on some steps; None if the run is not profiled.
        recorder: The rank's flight recorder; None: it has none, as in `ttlaunch simulate`.
        sent_bytes: All that this rank has sent.
        sent_to: The same, by rank.
        facts_now: Returns further facts whenever a line is written; for a rank that counts no steps.
        has_shares: Whether the rank has a share of its own size of something; see `note_shares`.
        waited_ns: All the time, in nanoseconds, in which it could only wait for messages.
        is_waiting: Whether it waits for a message now.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        trace: Trace | None = None,
        recorder: FlightRecorder | None = None,
        profile: StepWatch | None = None,
    ) -> None:
        """Count messages; append the counts to the file, if there is one, and phases and steps to the trace, if there is one."""
        self.step = 0
        self.sent_bytes = self.waited_ns = 0
        self.sent_to: dict[int, int] = defaultdict(int)
        self.facts_now: Callable[[], Mapping[str, int]] = dict
        self.is_waiting = self.has_shares = False
        self.phase = self._rest = START
        self.label: tuple[str, int | None] | None = None
        self.trace = trace
        self.recorder = recorder
        self.profile = profile
        self._path = path
        self._micro_batch: int | None = None
        self._facts: dict[str, int] = {}
        self._messages: dict[Key, int] = defaultdict(int)
        self._bytes: dict[Key, int] = defaultdict(int)
        self._waits: dict[tuple[str, str], int] = defaultdict(int)
        self._spent: dict[str, int] = defaultdict(int)
        self._begin_stretch()
        self._began = self._step_began = self._since = self._flushed = time.monotonic_ns()

    def sent(self, label: tuple[str, int | None], dest: int, size: int) -> None:
        """Count a message of `size` bytes."""
        key = (*label, self.phase, dest)
        self._messages[key] += 1
        self._bytes[key] += size
        self.sent_bytes += size
        self.sent_to[dest] += size

    def waited(self, operation: str, nanoseconds: int) -> None:
        """Count time in which the rank could do nothing but wait for a message to leave or to arrive."""
        self._waits[operation, self.phase] += nanoseconds
        self.waited_ns += nanoseconds

    def note(self, **facts: int) -> None:
        """Note a number of this rank for the formula of its traffic; values that several parts of a model note under one name add up."""
        for name, value in facts.items():
            self._facts[name] = self._facts.get(name, 0) + value

    def note_shares(self, place: int, /, **facts: Sequence[int]) -> None:
        """Note numbers of the share that this rank has of something, out of those of all ranks that share it.

        A simulation of many ranks runs the code of a few. It reads here what the others have, such as how many values each updates.

        Args:
            place: This rank's place among the ranks of its role, all of which share it.
            **facts: By name, the number of each of these ranks, in order.
        """
        self.has_shares = True
        self.note(**{name: numbers[place] for name, numbers in facts.items()})

    @property
    def facts(self) -> dict[str, int]:
        """All numbers of this rank for the formula of its traffic."""
        return {**self._facts, **self.facts_now()}

    def begin_step(self, step: int) -> None:
        """Count what follows for this step."""
        self._close_step()
        self.step = step
        if self.recorder is not None:
            self.recorder.begin_step(step)
        if self.profile is not None:
            self.profile.begin_step(step)
        self.phase = self._rest = EXCHANGE
        self._step_began = self._since = time.monotonic_ns()

    def end_step(self) -> None:
        """The step is done; what follows until the next one is validation, checkpoints and the like."""
        self._rest = AFTER
        self.enter(AFTER)
        self._spent["step"] += self._since - self._step_began
        if self.recorder is not None:
            self.recorder.end_step(self._since - self._step_began)
        if self.trace is not None and self.trace.is_open:
            self.trace.span(f"step {self.step}", "step", began=self._step_began, ended=self._since)
            self.trace.end_step()
        if self.profile is not None:
            self.note(**self.profile.end_step(self.step))

    def waiting(self) -> AbstractContextManager[None]:
        """Say in this block that the rank waits for a message."""
        return _Waiting(self)

    def marked(self, verb: str, operation: str) -> AbstractContextManager[Any]:
        """Name a block in the profiler's trace, while one is recorded."""
        profile = self.profile
        return _NOTHING if profile is None or not profile.is_active else profile.mark(f"{verb} {operation}")

    def enter(self, phase: str, *, micro_batch: int | None = None) -> None:
        """Enter what the rank does from here on, and with which micro-batch."""
        now = time.monotonic_ns()
        self._spent[self.phase] += now - self._since
        if self.recorder is not None:
            self.recorder.passed()
        if self.trace is not None and self.phase in _PASSES:
            self._trace_pass(self.trace, now)
        self.phase, self._since, self._micro_batch = phase, now, micro_batch

    def _trace_pass(self, trace: Trace, now: int) -> None:
        facts = {} if self._micro_batch is None else {"micro_batch": self._micro_batch}
        number = "" if self._micro_batch is None else f" {self._micro_batch}"
        trace.span(f"{self.phase}{number}", self.phase, began=self._since, ended=now, step=self.step, **facts)

    def leave(self) -> None:
        """Return to the phase between passes."""
        self.enter(self._rest)

    def write_if_due(self) -> None:
        """Write what is counted if the last line is long ago; a rank that counts no steps calls it now and then."""
        if self._is_late(_SHORT_SHARE):
            self._close_step(is_last=True)

    def close(self) -> None:
        """Write what is not yet written; call it when the rank has sent its last message, or has failed."""
        if self.trace is not None and self.trace.is_open:
            self.trace.close()
        if self.profile is not None:
            self.profile.close()
        self._close_step(is_last=True)

    def _close_step(self, *, is_last: bool = False) -> None:
        """Add the counts since the last step began to the rows of steps that are not yet written."""
        self.leave()
        for key, messages in self._messages.items():
            _extend(self._rows[key], self.step, messages=messages, size=self._bytes[key])
        for operation_and_phase, nanoseconds in self._waits.items():
            self._waited[operation_and_phase][self.step] = nanoseconds // 1000
        for phase, nanoseconds in self._spent.items():
            self._times[phase][self.step] = nanoseconds // 1000
        for counted in (self._messages, self._bytes, self._waits, self._spent):
            counted.clear()
        self._last = self.step
        is_first = self._first == 0 < self.step  # so that a line is there even if the run is soon killed
        if self._is_late() or is_first or is_last or self.step - self._first >= _MOST_STEPS:
            self._flush()

    def _is_late(self, share: float = _FLUSH_SHARE) -> bool:
        now = time.monotonic_ns()
        return now - self._flushed > max(_FLUSH_S * 1e9, (now - self._began) * share)

    def _begin_stretch(self) -> None:
        self._first = self.step
        self._last = self.step
        self._rows: dict[Key, list[list[int]]] = defaultdict(list)
        self._waited: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        self._times: dict[str, dict[int, int]] = defaultdict(dict)

    def _flush(self) -> None:
        """Append a line; a full disk costs the line, not the run."""
        if self._path is not None:
            line = json.dumps(self._stretch(), separators=(",", ":")) + "\n"
            with (
                contextlib.suppress(OSError),
                open(self._path, "a", encoding="utf-8", opener=contract.open_private) as file,
            ):
                file.write(line)
        self._begin_stretch()
        self._first = self.step + 1
        self._flushed = time.monotonic_ns()

    def _stretch(self) -> dict[str, Any]:
        return {
            "format": contract.TRAFFIC_FORMAT,
            "first": self._first,
            "last": self._last,
            "facts": self.facts,
            "sent": [[*key, rows] for key, rows in self._rows.items()],
            "waited": [[*key, times] for key, times in self._waited.items()],
            "spent": [[phase, times] for phase, times in self._times.items()],
        }


class _Waiting:
    """Says for a block that the rank waits; a class, as `_Label`."""

    __slots__ = ("_traffic",)

    def __init__(self, traffic: TrafficCounter) -> None:
        self._traffic = traffic

    def __enter__(self) -> None:
        self._traffic.is_waiting = True

    def __exit__(self, *_: object) -> None:
        self._traffic.is_waiting = False


class _Label:
    """Sets the label for a block; a class, because a generator would take three times as long."""

    __slots__ = ("_before", "_label", "_traffic")

    def __init__(self, traffic: TrafficCounter, label: tuple[str, int | None]) -> None:
        self._traffic = traffic
        self._label = label

    def __enter__(self) -> None:
        self._before, self._traffic.label = self._traffic.label, self._label

    def __exit__(self, *_: object) -> None:
        self._traffic.label = self._before


def operation(communicator: object, name: str, *, bucket: int | None = None) -> AbstractContextManager[None]:
    """Attribute the messages of a block to an operation; the innermost name counts.

    Args:
        communicator: A rank's context, or its communicator; one that counts nothing is left alone.
        name: Such as `gradients`; the same on both ends.
        bucket: The number of the part, if a vector is sent in several.
    """
    traffic: TrafficCounter | None = getattr(communicator, "traffic", None)
    return _NOTHING if traffic is None else _Label(traffic, (name, bucket))


def register_owner(holder: object, owner: Owner, tensors: Callable[[Owner], Iterable[tuple[str, Tensor]]]) -> None:
    """Register who holds tensors from step to step, for a run that reports how much memory they take.

    Args:
        holder: A rank's context, its communicator, or a model that it watches; one that counts nothing is left alone.
        owner: As in `TensorOwners.add`.
        tensors: As there.
    """
    traffic: TrafficCounter | None = getattr(holder, "traffic", None)
    if traffic is not None and traffic.profile is not None:
        traffic.profile.owners.add(owner, tensors)


def caller() -> tuple[tuple[str, int | None], Place]:
    """Return the operation of a message outside any `operation()` block, and the recipe's line that caused the message.

    The operation has the name of the runtime's function that the recipe called, or of the recipe's own function if it sent the message
    itself.
    """
    frame = sys._getframe(1)  # noqa: SLF001  the documented way to find a caller without building a traceback
    while frame.f_back is not None and (frame.f_code.co_filename in _VERBS or frame.f_code.co_name[0] == "<"):
        frame = frame.f_back  # a comprehension is part of the function around it
    name = frame.f_code.co_name
    while frame.f_back is not None and _is_runtime(frame.f_code.co_filename):
        if frame.f_code.co_filename != _LOOP:  # what the loop calls for a recipe is as if the recipe had called it
            name = frame.f_code.co_name
        frame = frame.f_back
    return (_operation_of(name), None), (frame.f_code.co_filename, frame.f_lineno)


@cache
def _is_runtime(filename: str) -> bool:
    return filename.startswith(_RUNTIME)


@cache
def _operation_of(function: str) -> str:
    name = function.lstrip("_")
    for verb in ("send_", "receive_"):
        name = name.removeprefix(verb)
    return name or function


def _extend(rows: list[list[int]], step: int, *, messages: int, size: int) -> None:
    """Add a step to rows of `[first, last, stride, messages, bytes]`, each an arithmetic progression of equal steps."""
    if rows and rows[-1][3:] == [messages, size]:
        first, last, stride = rows[-1][:3]
        if first == last or step - last == stride:
            rows[-1][1:3] = [step, step - last]
            return
    rows.append([step, step, 1, messages, size])
