"""A feed-forward language model: each token is predicted from a fixed number of tokens before it.

It is cut like the transformer (embedding, blocks, head), so every recipe runs with either. After Y. Bengio et al., "A
Neural Probabilistic Language Model", JMLR 3, 2003, with residual blocks in place of its one hidden layer.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = embedding_dim, C = tokens of context.
"""

from torch import Tensor, nn
from torch.nn import functional

from ttlaunch.runtime.model.activations import ACTIVATIONS
from ttlaunch.runtime.model.dropout import Dropout, Masks
from ttlaunch.runtime.model.layers import WHOLE, Layers
from ttlaunch.spec.recipe.sections import TransformerConfig

CONTEXT_TOKENS = 8
"""C: the present token and those before it that a prediction sees."""


class ContextEmbedding(nn.Module):
    """The last C tokens as one vector; before the first token of a sequence there are zeros."""

    def __init__(self, cfg: TransformerConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, cfg.embedding_dim)
        self.context = nn.Linear(CONTEXT_TOKENS * cfg.embedding_dim, cfg.embedding_dim)
        self.dropout = Dropout("embedding", probability=cfg.dropout_prob)

    def forward(self, tokens_BT: Tensor, masks: Masks | None) -> Tensor:
        batch, length = tokens_BT.shape
        padded = functional.pad(self.token(tokens_BT), (0, 0, CONTEXT_TOKENS - 1, 0))
        window_BTDC = padded.unfold(1, CONTEXT_TOKENS, 1)
        x_BTD: Tensor = self.dropout(self.context(window_BTDC.reshape(batch, length, -1)), masks)
        return x_BTD


class FeedForwardBlock(nn.Module):
    """A feed-forward layer added to the residual stream."""

    def __init__(self, cfg: TransformerConfig, *, index: int, layers: Layers = WHOLE) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation]
        width = cfg.embedding_dim
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = layers.linear_in(width, (4 * width,))
        self.feed_forward_out = layers.linear_out(4 * width, width)
        self.feed_forward_dropout = Dropout(f"blocks.{index}.feed_forward", probability=cfg.dropout_prob)

    def forward(self, x_BTD: Tensor, masks: Masks | None) -> Tensor:
        hidden = self.activation(self.feed_forward_in(self.feed_forward_norm(x_BTD)))
        out_BTD: Tensor = x_BTD + self.feed_forward_dropout(self.feed_forward_out(hidden), masks)
        return out_BTD
