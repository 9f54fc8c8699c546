"""The mean gradient among members that come and go: a step that was interrupted goes on among others, with the same bits.

    step s      usual: buckets travel while the last micro-batch is differentiated
    a change    each member keeps the nodes of the tree that it has
    step s      the members of the next epoch compute what nobody has any more, then add up kept and new nodes
    step s + 1  usual

Every leaf of a step is at exactly one member, and sums follow one tree, so the mean has the bits of one process.

Shapes: N = values of the flat gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.comm.reduction import Subtree, aligned_subtrees
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.elastic.feed import Mean
from ttlaunch.runtime.elastic.member import INTERRUPTIONS, ElasticMember
from ttlaunch.runtime.parallel.gradients.exchange import GradientExchange
from ttlaunch.runtime.world import Rank


class ElasticExchange:
    """Has the methods of `GradientExchange` that a recipe's loop calls.

    Cost of a step: that of `GradientExchange` with `keeps_nodes`. The first step of an epoch sends nothing before all of its nodes
        are complete, and a node that was kept is sent by itself.
    Order: that of the tree over micro-batches, then one division: the bits of one process, whoever comes and goes.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        ctx: RankContext,
        among: Sequence[Rank],
        micro_batches: int,
        bucket_megabytes: float | None = None,
    ) -> None:
        """Make the parameters views of one flat vector; nothing is sent. Arguments are those of `GradientExchange`.

        Raises:
            ValueError: The run is not elastic.
        """
        if ctx.elastic is None:
            raise ValueError("an elastic exchange needs a run that was started with `--elastic`")
        self._member: ElasticMember = ctx.elastic
        self._exchange = GradientExchange(
            parameters,
            ctx=ctx,
            among=among,
            micro_batches=micro_batches,
            bucket_megabytes=bucket_megabytes,
            keeps_nodes=True,
        )
        self._nodes: list[Subtree] = []  # of the step that was interrupted
        self._is_adding = False
        self._is_warm = False
        self._member.follow(self._divide)
        self._member.past.values = len(self._exchange.mean_N)  # it may get the state before it takes part

    def mean(self, step: int, enter: Callable[[Iterable[int]], object]) -> tuple[float, int]:
        """Make a step, however often the members change meanwhile: leave the mean gradient in the parameters' gradients.

        Args:
            step: The step; all steps before it are in the weights.
            enter: Differentiates the micro-batches with the given indices, with `expect` and `accumulate` for each.

        Returns:
            Mean loss per token and number of tokens of the whole step, on every member. Zeros, and a mean gradient of zeros, on a
            member that gets the whole state instead, because nobody has the mean any more: `ElasticMember.apply` puts it in place.

        Raises:
            LeftError: This worker takes part no longer.
        """
        self._member.end_step(step - 1)
        while True:
            try:
                if self._member.owes_validation:
                    self._member.validate(step - 1)
                mean = self._follow(step, enter) if self._member.follows else self._make(step, enter)
            except INTERRUPTIONS:
                self._stop()
                self._member.regroup()
            else:
                self._exchange.give_back(self._nodes)
                self._nodes = []
                self._member.keep_mean(mean)
                return (0.0, 0) if mean is None else (mean.loss, mean.tokens)

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Announce the backward pass of a micro-batch; see `GradientExchange`."""
        if not self._is_adding:
            self._exchange.expect(index, tokens=tokens, loss=loss)

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch's *summed* loss; see `GradientExchange`."""
        if self._is_adding:
            self._exchange.add(index, tokens=tokens, loss=loss)
        else:
            self._exchange.accumulate(index, tokens=tokens, loss=loss)

    def _divide(self, begin: Begin, _place: int) -> None:
        blocks = [range(first, stop) for first, stop in begin.blocks]
        self._exchange.divide([Rank(rank) for rank in range(len(begin.seats))], blocks)

    def _make(self, step: int, enter: Callable[[Iterable[int]], object]) -> Mean | None:
        mean_N = self._exchange.mean_N
        self._drop_what_does_not_count()
        if self._member.begin.applied >= step:
            return self._use(self._member.catch_up, step)
        if self._member.is_first_step():
            loss, tokens = self._go_on(enter)
        else:
            loss, tokens = self._exchange.mean(step, lambda indices: enter(self._member.each(indices)))
        return Mean(step, loss, tokens, mean_N)

    def _follow(self, step: int, enter: Callable[[Iterable[int]], object]) -> Mean | None:
        """Use the mean that members make while this worker is none."""
        if not self._is_warm:  # the first backward pass of a process takes long: nobody has to wait for it here
            self._is_warm = self._is_adding = True
            enter([0])
            self._is_adding = False
            self._exchange.give_back(self._exchange.interrupt())
        return self._use(self._member.past.follow, step)

    def _use(self, pull: Callable[[int, Tensor], Mean | None], step: int) -> Mean | None:
        """Take the mean of a step from others."""
        mean_N = self._exchange.mean_N
        pulled_N = torch.empty(mean_N.shape, dtype=mean_N.dtype)
        mean = pull(step, pulled_N)
        if mean is None:
            return None
        mean_N.copy_(pulled_N)
        self._exchange.use_mean()
        return Mean(step, mean.loss, mean.tokens, mean_N)

    def _go_on(self, enter: Callable[[Iterable[int]], object]) -> tuple[float, int]:
        """Compute this member's leaves of the epoch's first step, and add up the nodes of all members."""
        self._is_adding = True
        for row in self._member.leaves_to_compute():
            enter(self._member.each(row))
            self._nodes += (
                self._exchange.interrupt()
            )  # complete nodes only: the rows of one member need not be neighbours
        self._is_adding = False
        self._nodes.sort(key=lambda node: node.start)
        layout = [list(chain.from_iterable(map(aligned_subtrees, rows))) for rows in self._member.nodes_of_step()]
        return self._exchange.reduce(self._nodes, layout)

    def _stop(self) -> None:
        """Keep the complete nodes of the step, when no transfer reads or writes tensors any more."""
        self._member.await_change()
        if not self._exchange.has_mean:
            self._member.keep_mean(None)  # a part of it is that of the next step
        self._nodes += self._exchange.interrupt()
        self._nodes.sort(key=lambda node: node.start)
        self._is_adding = False
        self._member.hold(node.leaves for node in self._nodes)

    def _drop_what_does_not_count(self) -> None:
        counted = self._member.held()
        self._exchange.give_back(node for node in self._nodes if node.leaves not in counted)
        self._nodes = [node for node in self._nodes if node.leaves in counted]
