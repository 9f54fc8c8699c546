"""Dropout whose masks depend on seed, step, micro-batch and layer alone, so they are the same wherever a pass runs."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Masks(NamedTuple):
    """What the dropout masks of one forward pass are drawn from, besides the layer; never from a rank's generator."""

    seed: int
    step: int
    micro_batch: int


def seeded_generator(*key: object) -> torch.Generator:
    """A generator whose numbers depend on the key alone."""
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class Dropout(nn.Module):
    """Zero a share of the activations; which ones follows from seed, step, micro-batch and layer."""

    def __init__(self, layer: str, *, probability: float) -> None:
        super().__init__()
        self._layer = layer
        self._probability = probability

    def forward(self, x: Tensor, masks: Masks | None) -> Tensor:
        if masks is None or not self._probability:
            return x
        drawn = torch.rand(x.shape, generator=seeded_generator("dropout", *masks, self._layer))
        kept = (drawn >= self._probability).to(x.device, x.dtype)
        return x * kept / (1 - self._probability)
