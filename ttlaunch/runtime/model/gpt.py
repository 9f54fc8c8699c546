"""The transformer language model, cut where a pipeline may cut it: embedding, blocks, head.

Pre-norm blocks with learned positions, as in A. Radford et al., "Language Models are Unsupervised Multitask Learners",
2019 (GPT-2); unlike it the head has weights of its own, unless `tie_embeddings` says otherwise.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = embedding_dim, H = heads, V = vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttlaunch.runtime.model.activations import ACTIVATIONS
from ttlaunch.runtime.model.dropout import Dropout, Masks
from ttlaunch.runtime.model.layers import WHOLE, Layers
from ttlaunch.runtime.model.tied import second_use
from ttlaunch.spec.recipe.sections import TransformerConfig


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

    Where `layers` splits matrices, the block has some of the heads, and some of what the feed-forward layer has inside;
    the rest is whole.
    """

    def __init__(self, cfg: TransformerConfig, *, index: int, layers: Layers = WHOLE) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation]
        width = cfg.embedding_dim
        self.head_width = width // cfg.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = layers.linear_in(width, (width, width, width))
        self.attention_out = layers.linear_out(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = layers.linear_in(width, (4 * width,))
        self.feed_forward_out = layers.linear_out(4 * width, width)
        self.attention_dropout = Dropout(f"blocks.{index}.attention", probability=cfg.dropout_prob)
        self.feed_forward_dropout = Dropout(f"blocks.{index}.feed_forward", probability=cfg.dropout_prob)

    def forward(self, x_BTD: Tensor, masks: Masks | None) -> Tensor:
        x_BTD = x_BTD + self.attention_dropout(self._attend(self.attention_norm(x_BTD)), masks)
        hidden = self.activation(self.feed_forward_in(self.feed_forward_norm(x_BTD)))
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
