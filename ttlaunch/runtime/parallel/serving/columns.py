"""A served model whose ranks have columns of every matrix of its blocks: each rank computes some outputs, and all gather all of them.

    x_RK --> columns of the head  --> y of the head  --+
    x_RK --> columns of a share   --> y of the share --+--> y_RN, the same on every rank

A sum of partial products, as in training with `tensor_parallel`, would have other bits than one product. A column of the result
needs no sum over ranks, so gathered columns have the bits of the whole product, as long as no rank has fewer than 16 of them.
Each rank computes with 1/r of the matrices, attends with 1/r of the heads, and has these heads' cache.

Shapes: R = rows of a plan, K = inputs, N = outputs, n = those of this rank; L = rows whose logits are wanted, V = vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.parallel.serving.tally import Tally
from ttlaunch.runtime.serving.forward import CachedPart
from ttlaunch.runtime.serving.step_plan import StepPlan
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.serving import header_numbers

_PLAN, _BEAT, _END = 0, 1, 2
_HEADER, _TOKENS, _COLUMNS, _ANSWER = 1, 2, 3, 4
RunPart = Callable[[StepPlan, Tensor], Tensor]
"""Computes a plan with this rank's columns, together with the other ranks: from tokens (R,) to logits."""


Gather = Callable[[Tensor, Sequence[int]], Tensor]
"""Joins the columns of all ranks: from this rank's, shape (R, n), and the number of columns of each rank, to shape (R, N)."""


def columns_among(ctx: RankContext, ranks: Sequence[Rank]) -> Gather:
    """Return the function with which ranks join the columns that each has computed.

    Args:
        ctx: Every one of `ranks` must call the function, in the same order.
        ranks: The ranks that share the model, in the order of their columns.

    Cost: of each call, a message from each rank to each other one, with its own columns.
    Order: columns are joined, nothing is summed, so the bits do not depend on the number of ranks.
    """

    def gather(mine_Rn: Tensor, widths: Sequence[int]) -> Tensor:
        mine_Rn = mine_Rn.contiguous()
        parts, waiting = [], []
        for rank, width in zip(ranks, widths, strict=True):
            if rank == ctx.rank:
                parts.append(mine_Rn)
                continue
            arriving = mine_Rn.new_empty(len(mine_Rn), width)
            waiting.append(ctx.irecv(arriving, source=rank, tag=_COLUMNS, operation="columns"))
            waiting.append(ctx.isend(mine_Rn, dest=rank, tag=_COLUMNS, operation="columns"))
            parts.append(arriving)
        for pending in waiting:
            pending.wait()
        return torch.cat(parts, dim=1)

    return gather


class ColumnModel:
    """A model by columns whose first rank is the head: it computes plans as `Parts` of the serving engine.

    Attributes:
        tally: What this rank has done, and as of the last beat every other one.
    """

    depth = 1

    def __init__(self, ctx: RankContext, ranks: Sequence[Rank], part: CachedPart) -> None:
        """Take the head's place.

        Args:
            ctx: This rank.
            ranks: All ranks that share the model; the first is this one.
            part: This rank's columns and cache; it computes plans together with the other ranks.
        """
        self._ctx, self._others, self._slots, self._part = ctx, list(ranks[1:]), part.cache.slots, part
        self._logits_LV: list[Tensor] = []
        self.tally = Tally(ctx)

    def begin(self, plan: StepPlan, tokens_R: Tensor) -> None:
        """Compute a plan with all ranks; see `Parts`.

        Cost: two messages to each other rank, a header and 8R bytes; then those of `columns_among` for each matrix.
        Order: all ranks compute plans in the order of these calls.
        """
        header = _header(_PLAN, self._slots, plan)
        with self.tally.sending():
            for rank in self._others:
                self._ctx.send(header, dest=rank, tag=_HEADER, operation="headers")
                self._ctx.send(tokens_R.contiguous(), dest=rank, tag=_TOKENS, operation="tokens")
        self._logits_LV.append(_run(self.tally, self._part, plan, tokens_R))

    def finish(self) -> Tensor:
        """Return the logits of the oldest plan that was begun, shape (L, V)."""
        return self._logits_LV.pop(0)

    def beat(self) -> None:
        """Send a message to all ranks, and wait for an answer of each, with which `tally.told_nF` is up to date.

        Cost: a header to each rank, and its numbers back.
        Order: behind all plans.
        """
        self.tally.write()
        self.tally.counts["beats"] += 1
        for rank in self._others:
            self._ctx.send(_header(_BEAT, self._slots), dest=rank, tag=_HEADER, operation="headers")
        for rank in self._others:
            self._ctx.recv(self.tally.told_nF[rank], source=rank, tag=_ANSWER, operation="tallies")

    def end(self) -> None:
        """Let all other ranks return.

        Cost: a header to each rank.
        Order: behind all plans.
        """
        self.tally.counts["ends"] += 1
        for rank in self._others:
            self._ctx.send(_header(_END, self._slots), dest=rank, tag=_HEADER, operation="headers")


def run_share(ctx: RankContext, head: Rank, part: CachedPart) -> None:
    """Compute this rank's columns of all plans, until the head says that it was the last.

    Args:
        ctx: This rank.
        head: The first of the ranks that share the model.
        part: This rank's columns and cache; it computes plans together with the other ranks.

    Cost: of each plan, two messages from the head, and those of `columns_among` for each matrix.
    Order: that in which the head begins plans.

    Raises:
        ValueError: The head sent something else than a plan for this cache.
    """
    slots, context, tally = part.cache.slots, part.cache.context, Tally(ctx)
    numbers = torch.empty(header_numbers(slots), dtype=torch.int64)
    while True:
        ctx.recv(numbers, source=head, tag=_HEADER, operation="headers")
        kind = int(numbers[0])
        if kind == _END:
            return
        if kind == _BEAT:
            tally.counts["beats"] += 1
            ctx.send(tally.own(), dest=head, tag=_ANSWER, operation="tallies")
            tally.write()
            continue
        plan = StepPlan.from_tensor(numbers[1:], slots=slots, context=context)
        tokens_R = torch.empty(plan.rows, dtype=torch.int64)
        with tally.sending():
            ctx.recv(tokens_R, source=head, tag=_TOKENS, operation="tokens")
        _run(tally, part, plan, tokens_R)


def _run(tally: Tally, part: CachedPart, plan: StepPlan, tokens_R: Tensor) -> Tensor:  # noqa: PLR0917  private
    """Compute a plan, and count the padded rows whose columns are sent."""
    padded = part.products.product_rows
    tally.counts["padded_rows"] += padded(plan.rows)
    tally.counts["padded_wanted"] += padded(plan.wanted) if plan.wanted else 0
    tally.counts["row_values"], tally.counts["logits_values"] = part.products.sent_values
    return tally.run(part.run, plan, tokens_R)


def _header(kind: int, slots: int, plan: StepPlan | None = None) -> Tensor:
    numbers = torch.zeros(header_numbers(slots), dtype=torch.int64)
    numbers[0] = kind
    if plan is not None:
        told = plan.to_tensor()
        numbers[1 : 1 + len(told)] = told
    return numbers
