"""A served model in stages: the head has the embedding and the first blocks, the last stage has the head matrix.

    head -- rows --> stage -- rows --> ... --> last stage -- logits --> head

If head and embedding share a matrix, the head has it, once for both uses, and the last stage sends rows instead of logits.

Every stage computes the same plans in the same order, each from its own cache, so the bits are those of one process.
Several plans may be under way, one in each stage. A message of zero rows, a beat, passes through all stages like any plan, shows
that each of them still answers, and brings to the head what each has computed and sent.

Shapes: R = rows of a plan, D = width of the residual stream, V = vocabulary, L = rows whose logits are wanted.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.parallel.serving.tally import Tally
from ttlaunch.runtime.serving.step_plan import StepPlan
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.serving import header_numbers

_PLAN, _BEAT, _END = 0, 1, 2
_HEADER, _ROWS, _LOGITS, _TOLD = 1, 2, 3, 6
"""Tags of messages: what to do, its rows, the answer of the last stage, and what a beat collects."""

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
        return header_numbers(self.slots)


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
        tally: What this rank has done, and as of the last beat every other one.
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
        self.depth, self.tally = len(stages), Tally(ctx)
        self._score = score if sizes.is_tied and self.depth > 1 else None
        self._ctx, self._stages, self._sizes, self._run_part = ctx, stages, sizes, run_part
        self._begun: deque[_Begun] = deque()

    def begin(self, plan: StepPlan, tokens_R: Tensor) -> None:
        """Compute the first stage of a plan, and send its rows on; see `Parts`.

        Cost: two messages to the next stage: a header of 8 bytes a number, and 4RD bytes.
        Order: plans arrive at each stage in the order of these calls.
        """
        out = self.tally.run(self._run_part, plan, tokens_R)
        if self.depth == 1:
            self._begun.append(_Begun(out, None))
            return
        answer = torch.empty(plan.wanted, self._sizes.answer_width)
        arriving = None
        if plan.wanted:
            arriving = self._ctx.irecv(answer, source=self._stages[-1], tag=_LOGITS)
        begun = _Begun(answer, arriving)
        with self.tally.sending():
            begun.sending += _send(self._ctx, self._stages[1], header=_header(_PLAN, self._sizes, plan), rows_RD=out)
        self._begun.append(begun)

    def finish(self) -> Tensor:
        """Wait for the logits of the oldest plan under way, shape (L, V); see `Parts`.

        Cost: one message of 4LV bytes from the last stage, or of 4LD if the model is tied, if logits are wanted.
        Order: plans are finished in the order in which they were begun.
        """
        begun = self._begun.popleft()
        if begun.arriving is not None:
            with self.tally.waiting():
                begun.arriving.wait()
        with self.tally.sending():
            _wait(begun.sending)
        if self._score is None:
            return begun.answer
        with self.tally.computing():
            return self._score(begun.answer)

    def beat(self) -> None:
        """Pass a message through all stages and back; returns when it has come back, with `tally.told_nF` up to date.

        Cost: from each stage to the next one header; and the numbers of all ranks, which the last stage sends to the head.
        Order: behind all plans that have been begun.
        """
        self.tally.write()
        if self.depth == 1:
            return
        ctx, told_nF = self._ctx, self.tally.told_nF
        self.tally.counts["beats"] += 1
        ctx.send(_header(_BEAT, self._sizes), dest=self._stages[1], tag=_HEADER, operation="headers")
        ctx.send(told_nF, dest=self._stages[1], tag=_TOLD, operation="tallies")
        ctx.recv(told_nF, source=self._stages[-1], tag=_TOLD, operation="tallies")

    def end(self) -> None:
        """Let all stages return; call it once, when no plan is under way.

        Cost: one header from each stage to the next.
        Order: behind all plans.
        """
        if self.depth > 1:
            self.tally.counts["ends"] += 1
            self._ctx.send(_header(_END, self._sizes), dest=self._stages[1], tag=_HEADER, operation="headers")


def run_stage(ctx: RankContext, stages: Sequence[Rank], sizes: StageSizes, *, run_part: RunPart) -> None:
    """Compute this rank's stage of all plans, until the head says that it was the last.

    Args:
        ctx: This rank.
        stages, sizes: All stages in order; the sizes are the same on all of them.
        run_part: Computes this rank's part.

    Cost: of each plan, two messages from the stage before; two to the next one, or one of 4LV bytes to the head, 4LD if it
        is tied. Of each beat, as `StagedModel.beat` says. Order: that in which the head begins plans.

    Raises:
        ValueError: The stage before sent something else than a plan for this cache.
    """
    place = stages.index(ctx.rank)
    before, after = stages[place - 1], (stages[place + 1] if place + 1 < len(stages) else None)
    numbers = torch.empty(sizes.header_numbers, dtype=torch.int64)
    sending: list[tuple[Pending, Tensor]] = []
    kind, tally = _BEAT, Tally(ctx)
    while kind != _END:
        ctx.recv(numbers, source=before, tag=_HEADER, operation="headers")
        kind = int(numbers[0])
        if kind != _PLAN:
            if after is not None:
                ctx.send(numbers, dest=after, tag=_HEADER, operation="headers")
            _heed(ctx, tally, kind, before=before, after=stages[0] if after is None else after)
            continue
        plan = StepPlan.from_tensor(numbers[1:], slots=sizes.slots, context=sizes.context)
        rows_RD = torch.empty(plan.rows, sizes.width)
        with tally.sending():
            ctx.recv(rows_RD, source=before, tag=_ROWS, operation="rows")
        out = tally.run(run_part, plan, rows_RD)
        with tally.sending():
            _wait(sending)  # what the plan before has sent must not change until then
            if after is not None:
                sending = _send(ctx, after, header=numbers.clone(), rows_RD=out)
            else:
                sending = _answer(ctx, plan, out, head=stages[0], is_tied=sizes.is_tied)
    _wait(sending)


def _answer(
    ctx: RankContext, plan: StepPlan, out: Tensor, *, head: Rank, is_tied: bool
) -> list[tuple[Pending, Tensor]]:
    """Send the head the logits that a plan wants, or their rows if it scores them itself; nothing if it wants none."""
    if not plan.wanted:
        return []
    answer = out[plan.wanted_rows()] if is_tied else out.contiguous()
    return [(ctx.isend(answer, dest=head, tag=_LOGITS, operation="logits"), answer)]


def _heed(ctx: RankContext, tally: Tally, kind: int, *, before: Rank, after: Rank) -> None:
    """Count the end; or add this rank's numbers to those of a beat, and hand them on."""
    tally.counts["ends" if kind == _END else "beats"] += 1
    if kind == _END:
        return
    ctx.recv(tally.told_nF, source=before, tag=_TOLD, operation="tallies")
    tally.enter_own()
    ctx.send(tally.told_nF, dest=after, tag=_TOLD, operation="tallies")
    tally.write()


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
