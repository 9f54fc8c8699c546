"""An optimizer on another rank: gradients go out, weights come back.

    optimizer = RemoteOptimizer(model.parameters(), server, ctx=ctx)
    optimizer.receive_weights()
    for step in ctx.steps(cfg):
        optimizer.zero_grad()
        loss = ...
        loss.backward()
        optimizer.step()

With several micro-batches, call `expect()` before the backward pass of each and `accumulate()` after it: the last pass then
sends gradients while it still computes others. With `model`, the next forward pass begins before all weights have arrived.

Shapes: N = values of the flat vectors, padding included.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from ttlaunch.runtime.comm.agreement import SharedState
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.gradients.bucket_messages import AgreedBuckets
from ttlaunch.runtime.parallel.tiers.gradient_sender import GradientSender
from ttlaunch.runtime.parallel.tiers.weight_receiver import WeightReceiver
from ttlaunch.runtime.world import Rank


class RemoteOptimizer:
    """Used in a worker's loop like a local optimizer; its only state is the sums of gradients.

    The other end is a `GradientAggregator`, or the `RemoteOptimizer` of the rank that this one is a member of.

    Cost of a step: 2S bytes, S = 4N: the gradients (float32) to the rank that aggregates, and the new weights back, each
        in as many messages as there are buckets. If the worker's block makes several nodes of the reduction's tree, each
        further node costs S more. With a clipping norm no weights come back before the last gradient was sent.
    Order: that of the tree over micro-batches: the same bits for any number of workers.
    Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, with one server.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        aggregator_rank: Rank,
        *,
        ctx: Communicator,
        block: range = range(1),
        model: nn.Module | None = None,
        members: Mapping[Rank, range] | None = None,
        shared: SharedState | None = None,
    ) -> None:
        """Make the parameters views of one flat vector; nothing is sent.

        Args:
            parameters: The parameters of the local replica, float32; they become views of one flat vector.
            aggregator_rank: The rank that receives gradients and sends weights.
            ctx: The communicator of this rank.
            block: The micro-batches of a step that this rank differentiates, as the aggregating rank numbers them.
            model: The model whose parts wait for their weights before each forward pass. Parts are its children, and the
                children of containers; their parameters must be read only by calling them. None: `step()` waits for all
                weights.
            members: Ranks that have this one as their `aggregator_rank`, with their blocks, which follow this rank's.
            shared: A state that arrives with the weights, such as the model's loss scale.

        Raises:
            ValueError: There are no parameters, one is not float32, or the block is empty.
        """
        if not block:
            raise ValueError("a worker needs at least one micro-batch of a step")
        members = members or {}
        self._flat = FlatParameters(parameters)
        self._block = block
        self._agreed = AgreedBuckets(ctx, self._flat.starts, source=aggregator_rank, followers=members)
        self._sender = GradientSender(ctx, self._flat, dest=aggregator_rank, block=block, members=members)
        self._receiver = WeightReceiver(ctx, self._flat, source=aggregator_rank, members=members, shared=shared)
        self._has_weights = self._is_open = False
        self._accumulated = 0
        self._waits_at_once = model is None
        if model is not None:
            self._receiver.hold_back(model)

    def receive_weights(self) -> None:
        """Wait for the current weights, all of them.

        Call before the first step; and, if `model` was given, before reading weights other than in its forward pass.

        Cost: the first time one message of S bytes (float32); later no message of its own.
        """
        if not self._has_weights:
            self._receiver.receive_first()
            self._has_weights = True
        self._receiver.wait()

    def received(self, model: Model) -> Iterator[tuple[str, Tensor]]:
        """Wait for the current weights, as `receive_weights` does, and yield those of the model by name."""
        self.receive_weights()
        yield from model.named_parts()

    def zero_grad(self) -> None:
        """Zero all gradients; they stay views of one flat vector. Call before the first backward pass of a step."""
        self._flat.grads_N.zero_()

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Announce the backward pass of a micro-batch; in the pass of the block's last one, gradients are sent.

        Args:
            index: The micro-batch's index; calls go through the block's indices in order.
            tokens: The number of tokens that the micro-batch predicts.
            loss: The sum of their losses.

        Cost: none; at the block's last micro-batch that of `GradientSender.open`.
        """
        if index == self._block[-1]:
            self._open(index, tokens=tokens, loss=loss)

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch's *summed* loss into the step's sum.

        Args:
            index: The micro-batch's index; calls go through the block's indices in order.
            tokens: The number of tokens that the micro-batch predicted.
            loss: The sum of their losses.

        Cost: none; at the block's last micro-batch that of `GradientSender.open`, if `expect` was not called for it.
        """
        self._accumulated += 1
        if self._is_open:
            return  # the backward pass has already entered them, bucket by bucket
        if index == self._block[-1]:
            self._open(index, tokens=tokens, loss=loss)
            return
        self._sender.add(index, tokens=tokens, loss=loss)
        self.zero_grad()

    def step(self) -> None:
        """Send the gradients, and begin to receive the updated weights.

        If `accumulate()` was not called, the present gradients count as one micro-batch of weight 1. The aggregating
        rank then takes the plain mean over workers, as data-parallel training does with mean losses.

        Raises:
            ValueError: Only a part of the block was accumulated.

        Cost: the remaining gradients of the step, and S bytes of weights (float32) in; see the class.
        """
        if not self._accumulated:
            self._accumulate_whole_block()
        if self._accumulated != len(self._block):
            raise ValueError(f"{self._accumulated} micro-batches were accumulated, the block has {len(self._block)}")
        self._accumulated, self._is_open = 0, False
        self._sender.close()
        self._receiver.begin(self._agreed.buckets)
        if self._waits_at_once:
            self._receiver.wait()

    def _open(self, index: int, *, tokens: int, loss: float) -> None:
        self._receiver.wait()  # for weights that no forward pass has read
        self._sender.open(index, self._agreed.begin_step(), tokens=tokens, loss=loss)
        self._is_open = True

    def _accumulate_whole_block(self) -> None:
        tokens, loss = 1, math.nan
        for index in self._block:
            self.accumulate(index, tokens=tokens, loss=loss)
            tokens, loss = 0, 0.0
