"""A served model in stages: the head has the embedding and the first blocks, the last stage has the head matrix.

    head -- rows --> stage -- rows --> ... --> last stage -- logits --> head

If head and embedding share a matrix, the head has it, once for both uses, and the last stage sends rows instead of logits.

Every stage computes the same plans in the same order, each from its own cache, so the bits are those of one process.
Several plans may be under way, one in each stage. A message of zero rows, a beat, passes through all stages like any plan and shows
that each of them still answers.

Shapes: R = rows of a plan, D = width of the residual stream, V = vocabulary, L = rows whose logits are wanted.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.serving.step_plan import StepPlan
from ttlaunch.runtime.world import Rank

_PLAN, _BEAT, _END = 0, 1, 2
_HEADER, _ROWS, _LOGITS = 1, 2, 3
"""Tags of messages: what to do, its rows, and the answer of the last stage."""

RunPart = Callable[[StepPlan, Tensor], Tensor]
"""Computes a plan with the part of the model that this rank has: from tokens (R,) or rows (R, D) to rows (R, D) or logits (L, V)."""


@dataclass(frozen=True)
class StageSizes:
    """What all stages know beforehand of what they send.

    Attributes:
        slots: Slots of the cache.
        context: Tokens of a slot.
        width: D.
        vocabulary: V.
        is_tied: Whether the head has the head matrix, which is that of the embedding.
    """

    slots: int
    context: int
    width: int
    vocabulary: int
    is_tied: bool = False

    @property
    def answer_width(self) -> int:
        """The values of a row that the last stage sends: D if the head scores it, otherwise V."""
        return self.width if self.is_tied else self.vocabulary

    @property
    def header_numbers(self) -> int:
        """The numbers of a header: its kind, and room for the largest plan."""
        return 1 + StepPlan.most_numbers(self.slots)


@dataclass
class _Begun:
    """A plan under way: what is being sent for it, and where its logits, or rows, arrive; None if the rank has them already."""

    answer: Tensor
    arriving: Pending | None
    sending: list[tuple[Pending, Tensor]] = field(default_factory=list)


class StagedModel:
    """A model whose first stage is this rank, the head: it computes plans as `Parts` of the serving engine.

    Attributes:
        depth: The number of stages, which is how many plans can be under way.
    """

    def __init__(
        self,
        ctx: RankContext,
        stages: Sequence[Rank],
        sizes: StageSizes,
        *,
        run_part: RunPart,
        score: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the place of the first stage.

        Args:
            ctx: This rank.
            stages: All stages in order; the first is this rank.
            sizes: The same on all stages.
            run_part: Computes this rank's part.
            score: Computes logits (L, V) from rows (L, D); required if the model is tied and has several stages.
        """
        self.depth = len(stages)
        self._score = score if sizes.is_tied and self.depth > 1 else None
        self._ctx, self._stages, self._sizes, self._run_part = ctx, stages, sizes, run_part
        self._begun: deque[_Begun] = deque()

    def begin(self, plan: StepPlan, tokens_R: Tensor) -> None:
        """Compute the first stage of a plan, and send its rows on; see `Parts`.

        Cost: two messages to the next stage: a header of 8 bytes a number, and 4RD bytes.
        Order: plans arrive at each stage in the order of these calls.
        """
        out = self._run_part(plan, tokens_R)
        if self.depth == 1:
            self._begun.append(_Begun(out, None))
            return
        answer = torch.empty(plan.wanted, self._sizes.answer_width)
        arriving = None
        if plan.wanted:
            arriving = self._ctx.irecv(answer, source=self._stages[-1], tag=_LOGITS)
        begun = _Begun(answer, arriving)
        begun.sending += _send(self._ctx, self._stages[1], header=_header(_PLAN, self._sizes, plan), rows_RD=out)
        self._begun.append(begun)

    def finish(self) -> Tensor:
        """Wait for the logits of the oldest plan under way, shape (L, V); see `Parts`.

        Cost: one message of 4LV bytes from the last stage, or of 4LD if the model is tied, if logits are wanted.
        Order: plans are finished in the order in which they were begun.
        """
        begun = self._begun.popleft()
        if begun.arriving is not None:
            begun.arriving.wait()
        _wait(begun.sending)
        return begun.answer if self._score is None else self._score(begun.answer)

    def beat(self) -> None:
        """Pass a message through all stages and back; returns when it has come back.

        Cost: one header from each stage to the next, and one number from the last stage.
        Order: behind all plans that have been begun.
        """
        if self.depth == 1:
            return
        self._ctx.send(_header(_BEAT, self._sizes), dest=self._stages[1], tag=_HEADER, operation="headers")
        self._ctx.recv(torch.zeros(1, dtype=torch.int64), source=self._stages[-1], tag=_LOGITS, operation="logits")

    def end(self) -> None:
        """Let all stages return; call it once, when no plan is under way.

        Cost: one header from each stage to the next.
        Order: behind all plans.
        """
        if self.depth > 1:
            self._ctx.send(_header(_END, self._sizes), dest=self._stages[1], tag=_HEADER, operation="headers")


def run_stage(ctx: RankContext, stages: Sequence[Rank], sizes: StageSizes, *, run_part: RunPart) -> None:
    """Compute this rank's stage of all plans, until the head says that it was the last.

    Args:
        ctx: This rank.
        stages: All stages in order.
        sizes: The same on all stages.
        run_part: Computes this rank's part.

    Cost: of each plan, two messages from the stage before; two to the next one, or one of 4LV bytes to the head, 4LD if it
        is tied.
    Order: that in which the head begins plans.

    Raises:
        ValueError: The stage before sent something else than a plan for this cache.
    """
    place = stages.index(ctx.rank)
    before, after = stages[place - 1], (stages[place + 1] if place + 1 < len(stages) else None)
    numbers = torch.empty(sizes.header_numbers, dtype=torch.int64)
    sending: list[tuple[Pending, Tensor]] = []
    kind = _BEAT
    while kind != _END:
        ctx.recv(numbers, source=before, tag=_HEADER, operation="headers")
        kind = int(numbers[0])
        if kind != _PLAN:
            _pass_on(ctx, numbers, head=stages[0], after=after)
            continue
        plan = StepPlan.from_tensor(numbers[1:], slots=sizes.slots, context=sizes.context)
        rows_RD = torch.empty(plan.rows, sizes.width)
        ctx.recv(rows_RD, source=before, tag=_ROWS, operation="rows")
        out = run_part(plan, rows_RD)
        _wait(sending)  # what the plan before has sent must not change until then
        if after is not None:
            sending = _send(ctx, after, header=numbers.clone(), rows_RD=out)
        elif plan.wanted:
            answer = out[plan.wanted_rows()] if sizes.is_tied else out.contiguous()
            sending = [(ctx.isend(answer, dest=stages[0], tag=_LOGITS, operation="logits"), answer)]
        else:
            sending = []
    _wait(sending)


def _pass_on(ctx: RankContext, numbers: Tensor, *, head: Rank, after: Rank | None) -> None:
    """Hand a header without a plan to the next stage; the last stage answers a beat."""
    if after is not None:
        ctx.send(numbers, dest=after, tag=_HEADER, operation="headers")
    elif int(numbers[0]) == _BEAT:
        ctx.send(torch.zeros(1, dtype=torch.int64), dest=head, tag=_LOGITS, operation="logits")


def _wait(sending: list[tuple[Pending, Tensor]]) -> None:
    for pending, _ in sending:
        pending.wait()


def _send(ctx: RankContext, dest: Rank, *, header: Tensor, rows_RD: Tensor) -> list[tuple[Pending, Tensor]]:
    rows_RD = rows_RD.contiguous()
    return [
        (ctx.isend(header, dest=dest, tag=_HEADER, operation="headers"), header),
        (ctx.isend(rows_RD, dest=dest, tag=_ROWS, operation="rows"), rows_RD),
    ]


def _header(kind: int, sizes: StageSizes, plan: StepPlan | None = None) -> Tensor:
    numbers = torch.zeros(sizes.header_numbers, dtype=torch.int64)
    numbers[0] = kind
    if plan is not None:
        told = plan.to_tensor()
        numbers[1 : 1 + len(told)] = told
    return numbers
