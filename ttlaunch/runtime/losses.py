"""The loss, summed over tokens: the division by their number comes once, after all gradients are added."""

from torch import Tensor
from torch.nn import functional


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy of the next token in nats, summed over all tokens of the micro-batch."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
