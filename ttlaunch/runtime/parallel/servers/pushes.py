"""A gradient on its way to an asynchronous server, with what the server has to know of it, in one message.

It is one message, so that the server can wait for the first worker to push, and then never waits for the rest of a gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 64
"""Eight numbers, float64; what follows begins at a border that suits every dtype."""

_NUMBERS = HEADER_BYTES // 8


class Push(NamedTuple):
    """The header of a gradient.

    Attributes:
        task: The step whose data it is of.
        version: Updates that the weights had seen that it was computed with; their mean over its micro-batches.
        tokens: The number of tokens that it is the mean over.
        loss: Their mean.
        wants_weights: Whether the answer is to bring the server's weights.
    """

    task: int
    version: float
    tokens: int
    loss: float
    wants_weights: bool


def pack_push(push: Push, payload: Tensor) -> Tensor:
    """Header and payload, uint8, in a new tensor."""
    numbers = [*map(float, push), *[0.0] * (_NUMBERS - len(push))]
    header = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
    return torch.cat([header.to(payload.device), payload])


def read_push(message: Tensor) -> tuple[Push, Tensor]:
    """What `pack_push` was given; the payload is a view."""
    task, version, tokens, loss, wants_weights = message[:HEADER_BYTES].cpu().view(torch.float64).tolist()[:5]
    return Push(int(task), version, int(tokens), loss, bool(wants_weights)), message[HEADER_BYTES:]
