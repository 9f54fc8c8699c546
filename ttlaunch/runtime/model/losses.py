"""The loss, summed over tokens: the division by their number comes once, after all gradients are added.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, V = vocabulary.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""A target that counts for nothing: it adds no loss and no gradient, and is no token. PyTorch's number for it."""

_ASKED = -1000
"""A target of this or less asks whether the most likely answer is another than `_ASKED - target`."""


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy of the next token in nats, summed over the targets that count; computed in float32.

    Zero, with a gradient of zeros, if none of them counts. Without gradients, targets may `ask_for_errors`.
    """
    logits = logits_BTV.flatten(0, 1).float()
    if not torch.is_grad_enabled() and bool((targets_BT <= _ASKED).all()):
        return (logits.argmax(1) != _ASKED - targets_BT.flatten()).sum()
    return functional.cross_entropy(logits, targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")


def ask_for_errors(targets_BT: Tensor) -> Tensor:
    """Mark targets so that `summed_loss` counts wrong answers for them, in place of the loss; without gradients."""
    return _ASKED - targets_BT


def count_tokens(targets_BT: Tensor) -> int:
    """How many targets count: the weight that a micro-batch has in the mean."""
    return int((targets_BT != IGNORED).sum().item())


def perplexity(mean_loss: float) -> float:
    """The exponential of a mean loss in nats: a uniform choice among this many tokens would have the same loss."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
