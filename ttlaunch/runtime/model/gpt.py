"""The transformer language model, cut where a pipeline may cut it: embedding, blocks, head.

Pre-norm blocks with learned positions, as in A. Radford et al., "Language Models are Unsupervised Multitask Learners",
2019 (GPT-2); unlike it the head has weights of its own, unless `tie_embeddings` says otherwise.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = embedding_dim, H = heads, V = vocabulary.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttlaunch.runtime.model.tied import second_use
from ttlaunch.runtime.parallel.tensor.layers import linear_in, linear_out
from ttlaunch.runtime.parallel.tensor.share import ModelShare
from ttlaunch.spec.recipe.sections import TransformerConfig


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


class Embedding(nn.Module):
    """Tokens and their positions as vectors."""

    def __init__(self, cfg: TransformerConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, cfg.embedding_dim)
        self.position = nn.Embedding(cfg.max_sequence_length, cfg.embedding_dim)
        self.dropout = Dropout("embedding", probability=cfg.dropout_prob)

    def forward(self, tokens_BT: Tensor, masks: Masks | None) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: Tensor = self.dropout(self.token(tokens_BT) + self.position(positions_T), masks)
        return x_BTD


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each added to the residual stream.

    Of a block that ranks split, each has some heads, and some of what the feed-forward layer has inside; the rest is whole.
    """

    def __init__(self, cfg: TransformerConfig, *, index: int, share: ModelShare | None = None) -> None:
        super().__init__()
        width = cfg.embedding_dim
        self.head_width = width // cfg.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = linear_in(width, 3 * width, share, matrices=3)
        self.attention_out = linear_out(width, width, share)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = linear_in(width, 4 * width, share)
        self.feed_forward_out = linear_out(4 * width, width, share)
        self.attention_dropout = Dropout(f"blocks.{index}.attention", probability=cfg.dropout_prob)
        self.feed_forward_dropout = Dropout(f"blocks.{index}.feed_forward", probability=cfg.dropout_prob)

    def forward(self, x_BTD: Tensor, masks: Masks | None) -> Tensor:
        x_BTD = x_BTD + self.attention_dropout(self._attend(self.attention_norm(x_BTD)), masks)
        hidden = functional.gelu(self.feed_forward_in(self.feed_forward_norm(x_BTD)))
        out_BTD: Tensor = x_BTD + self.feed_forward_dropout(self.feed_forward_out(hidden), masks)
        return out_BTD

    def _attend(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        heads = (batch, length, -1, self.head_width)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.attention_in(x_BTD).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out_BTD: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out_BTD


class Head(nn.Module):
    """Scores of the next token."""

    def __init__(self, cfg: TransformerConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(cfg.embedding_dim)
        self.output = nn.Linear(cfg.embedding_dim, vocabulary, bias=False)

    def forward(self, x_BTD: Tensor, *, tied_VD: Tensor | None = None) -> Tensor:
        """Score with the head's own matrix, or with that of the embedding; see `tied.py`."""
        weight_VD = self.output.weight if tied_VD is None else second_use(tied_VD, self.output.weight)
        logits_BTV: Tensor = functional.linear(self.norm(x_BTD), weight_VD)
        return logits_BTV
