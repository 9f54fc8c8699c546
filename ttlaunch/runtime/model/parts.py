"""Which layers a kind of model is made of: an embedding, blocks, a head."""

from typing import Any

from ttlaunch.runtime.model.conv import ClassHead, ConvolutionBlock, ImageEmbedding
from ttlaunch.runtime.model.gpt import Block, Embedding, Head
from ttlaunch.runtime.model.mlp import ContextEmbedding, FeedForwardBlock

Parts = tuple[type[Any], type[Any], type[Any]]
"""Classes of the embedding, of every block and of the head; each kind's have the same arguments."""


def parts_of(model_type: str) -> Parts:
    """The layers of `training_config.model_type`."""
    known: dict[str, Parts] = {
        "gpt": (Embedding, Block, Head),
        "mlp": (ContextEmbedding, FeedForwardBlock, Head),
        "conv": (ImageEmbedding, ConvolutionBlock, ClassHead),
    }
    return known[model_type]
