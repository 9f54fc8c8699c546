"""The message that brings a gradient to an asynchronous server: a header with the server's data about it, and the payload.

Both are in one message, so that the server can wait for the first message from any worker and then never has to wait for
the rest of a gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 64
"""Size of eight float64 numbers; the payload after them is aligned for every dtype."""

_NUMBERS = HEADER_BYTES // 8


class Push(NamedTuple):
    """The header of a gradient.

    Attributes:
        task: The step whose data the gradient was computed from.
        version: The number of updates in the weights that the gradient was computed with; the mean over its micro-batches.
        tokens: The number of tokens in the mean.
        loss: The mean loss per token.
        wants_weights: Whether the server's answer must include its weights.
        first_version, later_version: In an elastic run, `version` of the first micro-batch and of all others.
    """

    task: int
    version: float
    tokens: int
    loss: float
    wants_weights: bool
    first_version: int = 0
    later_version: int = 0


def pack_push(push: Push, payload: Tensor) -> Tensor:
    """Pack header and payload into a new uint8 tensor."""
    numbers = [*map(float, push), *[0.0] * (_NUMBERS - len(push))]
    header = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
    return torch.cat([header.to(payload.device), payload])


def read_push(message: Tensor) -> tuple[Push, Tensor]:
    """Unpack a message of `pack_push`; the payload is a view of it."""
    task, version, tokens, loss, wants, first, later = message[:HEADER_BYTES].cpu().view(torch.float64).tolist()[:7]
    return Push(int(task), version, int(tokens), loss, bool(wants), int(first), int(later)), message[HEADER_BYTES:]
