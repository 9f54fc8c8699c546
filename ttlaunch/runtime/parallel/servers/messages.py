"""The messages between workers and parameter servers: tags, and small messages of fixed shape.

Shapes: K = nodes of the tree over micro-batches that a worker's block makes, W = workers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.comm.reduction import Subtree
from ttlaunch.runtime.world import Rank

COUNTS, GRADIENTS, WEIGHTS, VERDICT, ORDER, AVERAGE, VALIDATION = range(30_100, 30_107)
"""Tags of a synchronous server."""

REGISTER, PUSHES, ANSWERS, PULLED, VERDICT_OF_PUSH = range(30_110, 30_115)
"""Tags of an asynchronous server."""

TAKE, REFUSE, END = range(3)
"""The orders of the first server to the others: use these workers' gradients, refuse this worker's gradient, end."""

_COLUMNS = 5


class Verdict(NamedTuple):
    """The first server's answer to a gradient.

    Attributes:
        version: The number of updates in the weights that come with it.
        is_over: Whether there will be no further step.
        members: The workers whose gradients are in the last of these updates; empty if the gradient was refused.
    """

    version: int
    is_over: bool
    members: tuple[Rank, ...]


def pack_verdict(verdict: Verdict, workers: Sequence[Rank]) -> Tensor:
    """Pack a verdict into a tensor of shape `(2 + W,)`, int64."""
    flags = [int(worker in verdict.members) for worker in workers]
    return torch.tensor([verdict.version, int(verdict.is_over), *flags])


def read_verdict(message: Tensor, workers: Sequence[Rank]) -> Verdict:
    """Unpack the verdict from a tensor of `pack_verdict`."""
    version, is_over, *flags = message.tolist()
    return Verdict(version, bool(is_over), tuple(w for w, flag in zip(workers, flags, strict=True) if flag))


def pack_order(kind: int, chosen: Sequence[Rank], workers: Sequence[Rank]) -> Tensor:
    """Pack an order, its kind and its workers, into a tensor of shape `(1 + W,)`, int64."""
    return torch.tensor([kind, *(int(worker in chosen) for worker in workers)])


def read_order(message: Tensor, workers: Sequence[Rank]) -> tuple[int, tuple[Rank, ...]]:
    """Unpack the kind and the workers from a tensor of `pack_order`."""
    kind, *flags = message.tolist()
    return kind, tuple(worker for worker, flag in zip(workers, flags, strict=True) if flag)


def pack_counts(step: int, sums: Sequence[Subtree]) -> Tensor:
    """Pack the step that a gradient is of, with tokens and loss of each of its nodes: shape `(K, 5)`, float64."""
    return torch.tensor([[step, node.start, node.size, node.tokens, node.loss] for node in sums], dtype=torch.float64)


def empty_counts(nodes: Sequence[range]) -> Tensor:
    """Make room for the `pack_counts` of a block that makes these nodes."""
    return torch.empty(len(nodes), _COLUMNS, dtype=torch.float64)


def check_counts(rows: Tensor, nodes: Sequence[range], *, worker: Rank, newest: int) -> int:
    """Return the step of a worker's gradient.

    Raises:
        CommunicationError: The gradient is not that of the worker's micro-batches, or of a step that none has begun.
    """
    sent = [range(int(start), int(start + size)) for start, size in rows[:, 1:3].tolist()]
    steps = {int(step) for step in rows[:, 0].tolist()}
    if sent != list(nodes) or len(steps) != 1:
        raise CommunicationError(f"rank {worker} brings the sums over {sent}, expected {list(nodes)}")
    (step,) = steps
    if step > newest:
        raise CommunicationError(f"rank {worker} brings a gradient of step {step}, but step {newest} is not done")
    return step
