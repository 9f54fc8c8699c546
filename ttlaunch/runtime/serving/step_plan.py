"""What one step computes: rows of several streams, each at its place in the cache; and how stages send it.

Every stage executes the same plans in the same order, so that their caches agree without further messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

_VERSION = 1
_HEADER = 4
"""Numbers before those of copies and spans: version, step, number of copies, number of spans."""

_MOST_NUMBER = 2**48
_OF_A_COPY, _OF_A_SPAN = 3, 4


@dataclass(frozen=True)
class Copy:
    """Keys and values of the first `count` tokens of a slot, to be copied to another slot before the rows are computed."""

    source: int
    target: int
    count: int


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one stream.

    Attributes:
        slot: The stream's slot.
        start: The position of the first token.
        count: The number of tokens; each is one row.
        wanted: Number of its last rows whose logits are wanted; 0 in the middle of a prompt.
    """

    slot: int
    start: int
    count: int
    wanted: int


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step.

    Attributes:
        step: Its number, from 0; each plan has the next one.
        spans: The tokens to compute, by slot in ascending order; no slot twice.
        copies: What to copy first, in order.
    """

    step: int
    spans: tuple[Span, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(span.count for span in self.spans)

    @property
    def wanted(self) -> int:
        """Number of rows whose logits are wanted."""
        return sum(span.wanted for span in self.spans)

    def wanted_rows(self) -> list[int]:
        """Return which rows' logits are wanted, in order."""
        ends = accumulate(span.count for span in self.spans)
        return [row for span, end in zip(self.spans, ends, strict=True) for row in range(end - span.wanted, end)]

    @staticmethod
    def most_numbers(slots: int) -> int:
        """Return the largest number of values in `to_tensor()` with so many slots, for a buffer to receive into."""
        return _HEADER + (_OF_A_COPY + _OF_A_SPAN) * slots

    def to_tensor(self) -> Tensor:
        """Return the plan as numbers, shape (4 + 3 copies + 4 spans,), int64, on the CPU."""
        numbers = [_VERSION, self.step, len(self.copies), len(self.spans)]
        for copy in self.copies:
            numbers += [copy.source, copy.target, copy.count]
        for span in self.spans:
            numbers += [span.slot, span.start, span.count, span.wanted]
        return torch.tensor(numbers, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, numbers_N: Tensor, *, slots: int, context: int) -> "StepPlan":
        """Read what `to_tensor` wrote; numbers behind its end are ignored, so that a buffer may be longer.

        Args:
            numbers_N: Shape (N,), int64, as another rank sent it.
            slots: Slots of this rank's cache.
            context: Tokens of a slot.

        Raises:
            ValueError: The numbers are no plan for such a cache.
        """
        if numbers_N.dtype != torch.int64 or numbers_N.dim() != 1 or len(numbers_N) < _HEADER:
            shape = tuple(numbers_N.shape)
            raise ValueError(f"a step plan is at least {_HEADER} numbers of int64, not {numbers_N.dtype} of {shape}")
        version, step, copies, spans = numbers_N[:_HEADER].tolist()
        if version != _VERSION:
            raise ValueError(f"step plan of version {version}, expected {_VERSION}")
        if not (0 <= step < _MOST_NUMBER and 0 <= copies <= slots and 0 <= spans <= slots):
            raise ValueError(f"step {step} with {copies} copies and {spans} spans, but there are {slots} slots")
        end = _HEADER + _OF_A_COPY * copies + _OF_A_SPAN * spans
        if len(numbers_N) < end:
            raise ValueError(f"step plan of {len(numbers_N)} numbers, expected {end}")
        numbers = numbers_N[_HEADER:end].tolist()
        border = _OF_A_COPY * copies
        plan = cls(
            step,
            tuple(Span(*group) for group in _groups(numbers[border:], _OF_A_SPAN)),
            tuple(Copy(*group) for group in _groups(numbers[:border], _OF_A_COPY)),
        )
        plan.check(slots=slots, context=context)
        return plan

    def check(self, *, slots: int, context: int) -> None:
        """Check that a cache of so many slots and tokens can execute the plan.

        Raises:
            ValueError: It cannot; the message names the first span or copy at fault.
        """
        for copy in self.copies:
            is_inside = 0 <= copy.source < slots and 0 <= copy.target < slots and 0 < copy.count <= context
            if not is_inside or copy.source == copy.target:
                raise ValueError(f"{copy} is impossible in {slots} slots of {context} tokens")
        last = -1
        for span in self.spans:
            if not last < span.slot < slots:
                raise ValueError(f"{span} behind one of slot {last}: slots ascend and are below {slots}")
            if not (span.start >= 0 and span.count > 0 and span.start + span.count <= context):
                raise ValueError(f"{span} does not fit into a slot of {context} tokens")
            if not 0 <= span.wanted <= span.count:
                raise ValueError(f"{span} wants more logits than it has rows")
            last = span.slot


class Parts(Protocol):
    """A model that executes plans: all of it in this process, or its first part here and the others on other ranks."""

    @property
    def depth(self) -> int:
        """The number of plans that may be on their way at the same time, of different streams; 1 if there is one part."""

    def begin(self, plan: StepPlan, tokens_R: Tensor) -> None:
        """Start a plan.

        Args:
            plan: What to compute.
            tokens_R: The token of each row, shape (plan.rows,), int64, on the CPU.
        """

    def finish(self) -> Tensor:
        """Wait for the plan that was begun first and has not been finished.

        Returns:
            Logits of the rows that want them, in order, shape (plan.wanted, V), float32, on the CPU.
        """


def _groups(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
