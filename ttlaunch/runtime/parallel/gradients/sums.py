"""Add gradients along one tree on several ranks: every rank gets the mean, or a shard of it.

`GradientAggregator` has one rank add for all, and `GradientExchange` does what `all_reduce_mean` does, in buckets. All
of them make the additions of the same tree, so the mean has the bits that one process gets, for any number of ranks and
blocks of any length.

Shapes: N = values of the flat gradient. n = ranks, S = bytes of the gradient, k = the largest number of tree nodes
into which a rank's block splits: 1 if every block has the same power of two of micro-batches, else at most
2 log2(b) + 1 for a block of b micro-batches.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.comm.reduction import GradientTree, aligned_subtrees, contiguous_blocks, mean_per_token
from ttlaunch.runtime.comm.tree_exchange import Nodes, add_up_rows, gather_shards, sum_shard
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_COUNTS = 30_005


def all_reduce_mean(
    ctx: Communicator, sums: GradientTree, out_N: Tensor, *, among: Sequence[Rank], micro_batches: int
) -> tuple[float, int]:
    """Give every rank the gradient of the mean loss over all micro-batches, and clear `sums`.

    Args:
        ctx: Every rank of `among` must call, in the same step.
        sums: Holds the sums over all micro-batches of this rank's block, from `contiguous_blocks(micro_batches, n)`.
        out_N: Gets the mean, shape `(N,)`, float32, contiguous.
        among: The ranks that share the micro-batches, in the order of their blocks.
        micro_batches: M, the micro-batches of the whole step.

    Returns:
        Mean loss per token and number of tokens of the whole step, on every rank.

    Raises:
        ValueError: The tree does not hold this rank's block; raised before any message is sent.

    Cost: `(k + 2) * (n - 1)` messages each way, `(k + 1) * (n - 1) / n * S` bytes and 16 for each node; buffers for
        `k * (n - 1) / n * S`.
    Order: that of the tree, then one division.
    """
    shards = contiguous_blocks(len(out_N), len(among))
    mine = shards[among.index(ctx.rank)]
    mean_N, loss, tokens = _reduce(ctx, sums, shards, among=among, micro_batches=micro_batches)
    out_N[mine.start : mine.stop].copy_(mean_N)
    with operation(ctx, "gradients"):
        gather_shards(ctx, out_N, among=among)
    return loss, tokens


def reduce_scatter_mean(
    ctx: Communicator, sums: GradientTree, *, among: Sequence[Rank], micro_batches: int
) -> tuple[Tensor, float, int]:
    """Keep only this rank's shard of the mean gradient over all micro-batches, and clear `sums`.

    Args:
        ctx: Every rank of `among` must call, in the same step.
        sums: Holds the sums over all micro-batches of this rank's block, from `contiguous_blocks(micro_batches, n)`, float32.
        among: The ranks that share the micro-batches, in the order of their blocks.
        micro_batches: M, the micro-batches of the whole step.

    Returns:
        This rank's part of `contiguous_blocks(N, n)`, in a new tensor; mean loss per token; tokens.

    Raises:
        ValueError: The tree does not hold this rank's block; raised before any message is sent.

    Cost: `(k + 1) * (n - 1)` messages each way, `k * (n - 1) / n * S` bytes and 16 for each node.
    Order: that of the tree, then one division: the bits of one process for any number of ranks.
    """
    return _reduce(ctx, sums, contiguous_blocks(sums.num_values, len(among)), among=among, micro_batches=micro_batches)


def _reduce(
    ctx: Communicator, sums: GradientTree, shards: list[range], *, among: Sequence[Rank], micro_batches: int
) -> tuple[Tensor, float, int]:
    layout = [list(aligned_subtrees(block)) for block in contiguous_blocks(micro_batches, len(among))]
    place, subtrees = among.index(ctx.rank), sums.subtrees()
    found = [range(subtree.start, subtree.start + subtree.size) for subtree in subtrees]
    if found != layout[place]:
        raise ValueError(f"rank {ctx.rank} holds the sums over {found}, expected {layout[place]}")
    held: list[Nodes] = [[(leaves, None) for leaves in nodes] for nodes in layout]
    held[place] = [(leaves, node.gradient_N) for leaves, node in zip(found, subtrees, strict=True)]
    tokens, loss = CountsExchange(ctx, layout, [(node.tokens, node.loss) for node in subtrees], among=among).wait()
    with operation(ctx, "gradients"):
        shard_N = sum_shard(ctx, held, shards=shards, among=among)
    sums.clear()
    return shard_N.div_(max(1, tokens)), mean_per_token(loss, tokens), tokens


class CountsExchange:
    """Sends the tokens and the summed loss of this rank's nodes to every other rank, and adds up those of all ranks.

    Cost: one message of 16 bytes a node (float64) to each other rank.
    Order: that of the tree over micro-batches: the same bits on every rank.
    """

    def __init__(
        self, ctx: Communicator, layout: list[list[range]], own: list[tuple[int, float]], *, among: Sequence[Rank]
    ) -> None:
        """Begin to send and to receive.

        Args:
            ctx: Every rank of `among` must begin an exchange.
            layout: The nodes that each rank holds; together all ranks hold each leaf once.
            own: Tokens and summed loss of each node that this rank holds.
            among: The ranks.
        """
        place = among.index(ctx.rank)
        self._layout = layout
        lengths = [len(nodes) for nodes in layout]
        # One tensor for all: among thousands of ranks, each takes as long to make as to send.
        self._rows = torch.empty(sum(lengths), 2, dtype=torch.float64)
        counts = self._rows.split(lengths)
        counts[place].copy_(torch.tensor(own, dtype=torch.float64).reshape(-1, 2))  # also where a rank holds none
        others = [other for other in range(len(among)) if other != place]
        with operation(ctx, "counts"):
            self._pending = [ctx.irecv(counts[other], source=among[other], tag=_COUNTS) for other in others]
            self._pending += [ctx.isend(counts[place], dest=among[other], tag=_COUNTS) for other in others]

    def wait(self) -> tuple[int, float]:
        """Wait for the messages, and return tokens and summed loss over all micro-batches."""
        for message in self._pending:
            message.wait()
        leaves, rows = chain.from_iterable(self._layout), self._rows.tolist()
        tokens, loss = add_up_rows(sorted(zip(leaves, rows, strict=True), key=lambda node: node[0].start))
        return int(tokens), loss
