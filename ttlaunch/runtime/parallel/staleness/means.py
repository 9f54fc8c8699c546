"""The exchange of mean gradients that a bound on staleness asks for, also where workers come and go."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.gradients.elastic_exchange import ElasticExchange
from ttlaunch.runtime.parallel.gradients.exchange import GradientExchange
from ttlaunch.runtime.parallel.staleness.elastic_exchange import ElasticBoundedMeans
from ttlaunch.runtime.parallel.staleness.exchange import BoundedMeans, Mean, MeanGradients
from ttlaunch.runtime.parallel.staleness.protocol import Staleness
from ttlaunch.runtime.world import Rank


def mean_gradients(
    model: Model,
    *,
    ctx: RankContext,
    among: Sequence[Rank],
    blocks: Sequence[range],
    bound: int,
    damping: float,
    bucket_megabytes: float | None = None,
    is_validated: Callable[[int], bool] = lambda _: False,
) -> MeanGradients:
    """Build the exchange of mean gradients for the configured `staleness_bound`; in an elastic run, before `ctx.restore`.

    Args:
        model: The model whose gradients are averaged.
        ctx: This rank.
        among: The workers; in an elastic run those that are there at first.
        blocks: The micro-batches of each worker.
        bound: K, the most steps between a gradient's step and its update.
        damping: How much less a stale gradient counts than a fresh one; see `BoundedMeans`.
        bucket_megabytes: The size of a bucket where K is 0; None: the first steps decide.
        is_validated: Whether all workers validate after a step; an elastic run with K > 0 has to know.
    """
    if bound and ctx.elastic is not None:
        return ElasticBoundedMeans(model, ctx=ctx, bound=bound, damping=damping, is_validated=is_validated)
    if bound:
        record = ctx.report_update if ctx.rank == among[0] else None
        return BoundedMeans(model, ctx=ctx, among=among, blocks=blocks, bound=bound, damping=damping, record=record)
    kind = GradientExchange if ctx.elastic is None else ElasticExchange
    count = blocks[-1].stop
    exchange = kind(model.parameters(), ctx=ctx, among=among, micro_batches=count, bucket_megabytes=bucket_megabytes)
    return SynchronousMeans(exchange, ctx=ctx)


class SynchronousMeans:
    """For K = 0: each mean is applied in its own step, and added along the tree, in buckets during the backward pass.

    Gradients are never stale, and nothing outlives a step, so workers may come and go between and during steps.
    """

    def __init__(self, exchange: GradientExchange | ElasticExchange, *, ctx: RankContext) -> None:
        self.staleness = Staleness()
        self._exchange, self._ctx = exchange, ctx
        self._mean: Mean | None = None
        self.expect, self.accumulate = exchange.expect, exchange.accumulate

    def make(self, step: int, enter: Callable[[Iterable[int]], object]) -> None:
        """Differentiate this worker's micro-batches, and wait for the mean."""
        loss, tokens = self._exchange.mean(step, enter)
        workers = len(self._ctx.ranks(self._ctx.role))  # as many as have ended the step
        self._mean = Mean(step, loss, tokens, staleness=(0,) * workers)

    def ready(self, *, until: int) -> Iterator[Mean]:
        mean, self._mean = self._mean, None
        if mean is None:
            return
        assert mean.step <= until  # noqa: S101  the caller counts the same steps
        for one in mean.staleness:
            self.staleness.count(one)
        yield mean

    def close(self) -> None:
        """Do nothing: every step has freed its buffers."""
