"""An optimizer that is somewhere else: gradients go out, weights come back.

    optimizer = RemoteOptimizer(model.parameters(), server, ctx=ctx, block=block)
    optimizer.receive_weights()
    for step in ctx.steps(cfg):
        optimizer.zero_grad()
        loss = ...
        loss.backward()
        optimizer.step()

Shapes: N = values of the flat vectors, padding included.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from ttlaunch.runtime.flat import FlatParameters
from ttlaunch.runtime.reduction import GradientTree
from ttlaunch.runtime.sockets import Socket
from ttlaunch.runtime.world import Rank


class RemoteOptimizer:
    """Stands in for a local optimizer in a worker's loop; keeps no state but a gradient sum.

    `step()` moves 2S bytes, S = 4N: the gradients to the rank that aggregates, the new weights back (one further S for
    each further subtree if the worker's block of micro-batches is not a node of the reduction's tree).
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], aggregator_rank: Rank, *, ctx: Socket, block: range = range(1)
    ) -> None:
        """Look at the parameters; nothing is sent.

        Args:
            parameters: Of the local replica, float32; they become views of one flat vector.
            aggregator_rank: Who takes gradients and gives weights.
            ctx: How to reach it.
            block: Micro-batches of a step that this rank differentiates, as the aggregating rank counts them.

        Raises:
            ValueError: No parameters, ones that are not float32, or an empty block.
        """
        if not block:
            raise ValueError("a worker needs at least one micro-batch of a step")
        self._flat = FlatParameters(parameters)
        self._aggregator = aggregator_rank
        self._socket = ctx
        self._block = block
        self._sums = GradientTree(self._flat.weights_N.numel(), device=self._flat.weights_N.device)
        self._accumulated = 0

    def receive_weights(self) -> None:
        """Wait for the current weights and overwrite the local ones; call once before the first step."""
        self._socket.recv(self._flat.weights_N, source=self._aggregator)

    def zero_grad(self) -> None:
        """Zero all gradients; they stay views of one flat vector."""
        self._flat.grads_N.zero_()

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch's *summed* loss into the step's sum, and zero them.

        Args:
            index: Of the micro-batch; the block's indices, in order.
            tokens: That the micro-batch predicted.
            loss: Summed over them.
        """
        self._flat.attach_gradients()
        self._sums.add(index, self._flat.grads_N, tokens=tokens, loss=loss)
        self._accumulated += 1
        self.zero_grad()

    def step(self) -> None:
        """Send the gradients, wait for the updated weights.

        If `accumulate()` was not called, the gradients as they stand count as one micro-batch of weight 1: then the
        aggregating rank takes the plain mean over workers, as data-parallel training does with mean losses.

        Raises:
            ValueError: Only a part of the block was accumulated.
        """
        if not self._accumulated:
            self._accumulate_whole_block()
        if self._accumulated != len(self._block):
            raise ValueError(f"{self._accumulated} micro-batches were accumulated, the block has {len(self._block)}")
        self._accumulated = 0
        self._sums.send(self._socket, dest=self._aggregator)
        self.receive_weights()

    def _accumulate_whole_block(self) -> None:
        first, *others = self._block
        self.accumulate(first, tokens=1, loss=math.nan)
        nothing_N = torch.zeros_like(self._flat.grads_N)
        for index in others:
            self._sums.add(index, nothing_N, tokens=0, loss=0.0)
            self._accumulated += 1
