"""The transformer language model as Llama has it, cut where a pipeline may cut it: embedding, blocks, head.

Pre-norm blocks without biases: norms divide by the root of the mean square, positions turn queries and keys, several heads
may share keys and values, and a feed-forward layer multiplies what it has inside by a gate.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = embedding_dim, V = vocabulary, H = heads, K = heads of
keys and values, W = width of a head, I = width of a feed-forward layer inside.
Sources: H. Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023; J. Su et al., "RoFormer", 2021;
N. Shazeer, "GLU Variants Improve Transformer", 2020; J. Ainslie et al., "GQA", 2023. The order of each computation is that
of transformers, `models/llama/modeling_llama.py`.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttlaunch.runtime.model.dropout import Dropout, Masks
from ttlaunch.runtime.model.layers import WHOLE, Layers
from ttlaunch.runtime.model.tied import second_use
from ttlaunch.spec.recipe.sections import TransformerConfig


class TokenEmbedding(nn.Module):
    """Tokens as vectors; positions come in where a block attends."""

    def __init__(self, cfg: TransformerConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, cfg.embedding_dim)
        self.dropout = Dropout("embedding", probability=cfg.dropout_prob)

    def forward(self, tokens_BT: Tensor, masks: Masks | None) -> Tensor:
        x_BTD: Tensor = self.dropout(self.token(tokens_BT), masks)
        return x_BTD


class LlamaBlock(nn.Module):
    """Causal self-attention, then a gated feed-forward layer, each added to the residual stream.

    Where `layers` splits matrices, the block has some of the heads with their keys and values, and some of what the
    feed-forward layer has inside; the rest is whole.
    """

    def __init__(self, cfg: TransformerConfig, *, index: int, layers: Layers = WHOLE) -> None:
        super().__init__()
        width, inside = cfg.embedding_dim, cfg.inner_width
        self.head_width = width // cfg.num_heads
        self.heads, self.kv_heads = cfg.num_heads, cfg.kv_heads
        keys = self.kv_heads * self.head_width
        self.attention_norm = nn.RMSNorm(width, eps=cfg.norm_epsilon)
        self.attention_in = layers.linear_in(width, (width, keys, keys), bias=False)
        self.attention_out = layers.linear_out(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width, eps=cfg.norm_epsilon)
        self.feed_forward_in = layers.linear_in(width, (inside, inside), bias=False)
        self.feed_forward_out = layers.linear_out(inside, width, bias=False)
        self.attention_dropout = Dropout(f"blocks.{index}.attention", probability=cfg.dropout_prob)
        self.feed_forward_dropout = Dropout(f"blocks.{index}.feed_forward", probability=cfg.dropout_prob)
        self.positions = RotaryPositions(cfg)

    def forward(self, x_BTD: Tensor, masks: Masks | None) -> Tensor:
        x_BTD = x_BTD + self.attention_dropout(self._attend(self.attention_norm(x_BTD)), masks)
        hidden_BTI = gated(self.feed_forward_in(self.feed_forward_norm(x_BTD)))
        out_BTD: Tensor = x_BTD + self.feed_forward_dropout(self.feed_forward_out(hidden_BTI), masks)
        return out_BTD

    def split_heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut what `attention_in` returns, shape (..., (H + 2K) W), into queries (..., H, W), keys and values (..., K, W)."""
        by_head = projected.unflatten(-1, (-1, self.head_width))
        kept = by_head.shape[-2] * self.kv_heads // (self.heads + 2 * self.kv_heads)
        query, key, value = by_head.split([by_head.shape[-2] - 2 * kept, kept, kept], dim=-2)
        return query, key, value

    def _attend(self, x_BTD: Tensor) -> Tensor:
        query, key, value = self.split_heads(self.attention_in(x_BTD))
        cos_TW, sin_TW = self.positions.of_length(x_BTD.shape[1], device=x_BTD.device)
        query, key = (rotated(part, cos_TW, sin_TW) for part in (query, key))
        mixed_BHTW = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        out_BTD: Tensor = self.attention_out(mixed_BHTW.transpose(1, 2).flatten(2))
        return out_BTD


class LlamaHead(nn.Module):
    """Scores of the next token."""

    def __init__(self, cfg: TransformerConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(cfg.embedding_dim, eps=cfg.norm_epsilon)
        self.output = nn.Linear(cfg.embedding_dim, vocabulary, bias=False)

    def forward(self, x_BTD: Tensor, *, tied_VD: Tensor | None = None) -> Tensor:
        """Score with the head's own matrix, or with that of the embedding; see `tied.py`."""
        weight_VD = self.output.weight if tied_VD is None else second_use(tied_VD, self.output.weight)
        logits_BTV: Tensor = functional.linear(self.norm(x_BTD), weight_VD)
        return logits_BTV


def gated(projected: Tensor) -> Tensor:
    """Multiply the second half of the last dimension by the SiLU of the first: from shape (..., 2I) to (..., I)."""
    gate, up = projected.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of values, one from each half of a head, by the angles of a position.

    Args:
        x: Heads, shape (..., T, H, W).
        cos, sin: Of the angles, shape (T, W), float32.

    Returns:
        The same shape and format; in between, values are float32, so that a shorter format rounds only once.
    """
    low, high = x.float().chunk(2, dim=-1)
    turned = x.float() * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    return turned.to(x.dtype)


class RotaryPositions:
    """The angles by which positions turn queries and keys; all blocks of a process share the tables."""

    def __init__(self, cfg: TransformerConfig) -> None:
        scaling = cfg.rope_scaling
        self._width, self._theta = cfg.embedding_dim // cfg.num_heads, cfg.rope_theta
        self._longest = cfg.max_sequence_length
        self._scaling = None if scaling is None else tuple(scaling.model_dump().values())

    def of_length(self, length: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the first positions, each of shape (length, W)."""
        longest = max(length, self._longest)
        cos_TW, sin_TW = _tables(longest, self._width, theta=self._theta, scaling=self._scaling, device=device)
        return cos_TW[:length], sin_TW[:length]


@lru_cache(maxsize=8)
def _tables(
    length: int, width: int, *, theta: float, scaling: tuple[float, ...] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all positions.

    Angles are products of float32 numbers, as in the trainings whose weights are imported. Their cosines are computed in
    float64 and rounded, so that they are the nearest ones, whichever instructions a processor has.
    """
    turns_W = _frequencies(width, theta)
    turns_W = turns_W if scaling is None else _slowed_down(turns_W, *scaling)
    angles_TW = (torch.arange(length, dtype=torch.float32)[:, None] * turns_W).double().repeat(1, 2)
    return angles_TW.cos().float().to(device), angles_TW.sin().float().to(device)


def _frequencies(width: int, theta: float) -> Tensor:
    """Return radians a token of each pair of values, shape (W / 2,)."""
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def _slowed_down(turns_W: Tensor, factor: float, low: float, high: float, original_length: float) -> Tensor:  # noqa: PLR0917  the numbers of a section, in its order
    """Return frequencies as Llama 3 changes them: fast rotations stay, slow ones are divided, between them it changes smoothly."""
    wavelengths_W = 2 * math.pi / turns_W
    share_W = (original_length / wavelengths_W - low) / (high - low)
    between_W = (1 - share_W) * turns_W / factor + share_W * turns_W
    is_slow, is_fast = wavelengths_W > original_length / low, wavelengths_W < original_length / high
    return torch.where(is_slow, turns_W / factor, torch.where(is_fast, turns_W, between_W))
