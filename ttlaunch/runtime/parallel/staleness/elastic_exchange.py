"""Bounded staleness among members that come and go: steps that are under way when the members change are made anew by those that stay.

    member 0    applied 7    has given steps 8, 9
    member 1    applied 8    has given steps 9, 10       a mean is complete at one member a little sooner than at another
    member 2    is lost
    then        both have applied 8, member 0 with the state of member 1; both compute their new parts of steps 9 and 10 with these weights

A mean counts as soon as one member has applied it: others then take over its state. A mean that no member has applied counts for
nothing, whatever parts of it there are. So every step is in the weights of all members exactly once. Which weights a gradient was
computed with, every member records before it applies the mean, so that `ttlaunch repro` can make the same updates again.

Shapes: K = the bound, S = bytes of the gradient.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from ttlaunch import contract
from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.elastic.member import INTERRUPTIONS, ElasticMember
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.staleness.exchange import BoundedMeans, Mean
from ttlaunch.runtime.parallel.staleness.protocol import Staleness
from ttlaunch.runtime.world import Rank

T = TypeVar("T")


class ElasticBoundedMeans:
    """Has the methods of `BoundedMeans` that a recipe's loop calls; see `MeanGradients`.

    Cost of a step: that of `BoundedMeans`. A change costs the gradients of at most K + 1 steps, and the state for a member that
    has not applied the last mean. Memory: that of `BoundedMeans`; nothing of what was under way is kept over a change.

    Attributes:
        staleness: The staleness of the gradients that this worker has applied itself.
        computed_again: How many gradients of this worker were lost by changes of the members.
    """

    def __init__(
        self,
        model: Model,
        *,
        ctx: RankContext,
        bound: int,
        damping: float,
        is_validated: Callable[[int], bool],
    ) -> None:
        """Wait for the first epoch; nothing is sent. Arguments are those of `mean_gradients`.

        Raises:
            ValueError: The run is not elastic.
        """
        if ctx.elastic is None:
            raise ValueError("an elastic exchange needs a run that was started with `--elastic`")
        self.staleness = Staleness()
        self.computed_again = 0
        self._member: ElasticMember = ctx.elastic
        self._model, self._ctx = model, ctx
        self._bound, self._damping, self._is_validated = bound, damping, is_validated
        self._means: BoundedMeans | None = None  # of this epoch
        self._enters: dict[int, Callable[[Iterable[int]], object]] = {}  # by step, of those that are not in the weights
        self._member.takes_states = True
        self._member.follow(self._begin_epoch)

    def make(self, step: int, enter: Callable[[Iterable[int]], object]) -> None:
        """Differentiate this worker's micro-batches; `enter` is called again if the members change before the step is in the weights.

        Raises:
            LeftError: This worker takes part no longer.
        """
        self._enters[step] = enter
        self._insist(lambda _: None)

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Announce the backward pass of a micro-batch."""
        self._present().expect(index, tokens=tokens, loss=loss)

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch's *summed* loss."""
        self._present().accumulate(index, tokens=tokens, loss=loss)

    def ready(self, *, until: int) -> Iterator[Mean]:
        """Yield the means that are complete, in the order of the steps; wait for those of steps up to `until`.

        Means that this worker lacked when the members changed are not among them: the state of another member is then in the weights.

        Raises:
            LeftError: This worker takes part no longer.
        """
        while (mean := self._insist(partial(self._next, until=until))) is not None:
            yield mean
            # The caller has updated the weights. Nothing in between sends a message, so no change came in between either.
            self._member.apply(mean.step, validation_is_due=self._is_validated(mean.step))
            del self._enters[mean.step]

    def close(self) -> None:
        """Report what changes of the members have cost; all members have made all steps, so nothing is under way."""
        if self.computed_again:
            name = contract.worker_name(self._member.own.number)
            self._ctx.result(f"gradients that {name} computed again", self.computed_again)

    def _begin_epoch(self, _begin: Begin, _place: int) -> None:
        """Drop what was under way; no transfer of an epoch that is over reads or writes tensors."""
        if self._means is not None:
            self.computed_again += len([step for step in self._enters if step <= self._means.given])
        self._means = None
        self._model.zero_grad()

    def _present(self) -> BoundedMeans:
        """Return the exchange among the members of this epoch.

        Raises:
            EpochOverError: The members change.
        """
        begin = self._member.begin
        if self._means is None:
            self._means = BoundedMeans(
                self._model,
                ctx=self._ctx,
                among=[Rank(rank) for rank in range(len(begin.seats))],
                blocks=[range(first, stop) for first, stop in begin.blocks],
                bound=self._bound,
                damping=self._damping,
                record=partial(self._ctx.report_update, epoch=begin.epoch),
                staleness=self.staleness,
            )
        return self._means

    def _insist(self, act: Callable[[BoundedMeans], T]) -> T:
        """Act with all steps given that have begun, however often the members change meanwhile."""
        while True:
            try:
                if self._member.owes_validation:
                    self._member.validate(self._member.applied)
                return act(self._give_all())
            except INTERRUPTIONS:
                self._member.regroup()

    def _give_all(self) -> BoundedMeans:
        """Compute this member's part of all steps that have begun, are not in the weights, and that it has not given in this epoch."""
        means = self._present()
        self._enters = {step: enter for step, enter in self._enters.items() if step > self._member.applied}
        for step in sorted(self._enters):
            if step > means.given:
                means.begin(step)
                self._enters[step](self._member.each(means.block))
        return means

    def _next(self, means: BoundedMeans, *, until: int) -> Mean | None:
        return means.next_ready(until=until) if self._enters else None
