"""Which layers a kind of model is made of (embedding, blocks, head), and how its blocks are cut into parts."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from ttlaunch.runtime.model.conv import ClassHead, ConvolutionBlock, ImageEmbedding
from ttlaunch.runtime.model.gpt import Block, Embedding, Head
from ttlaunch.runtime.model.llama import LlamaBlock, LlamaHead, TokenEmbedding
from ttlaunch.runtime.model.mlp import ContextEmbedding, FeedForwardBlock

Parts = tuple[type[Any], type[Any], type[Any]]
"""Classes of the embedding, of every block and of the head; each kind's have the same arguments."""


def parts_of(model_type: str) -> Parts:
    """The layers of `training_config.model_type`."""
    known: dict[str, Parts] = {
        "gpt": (Embedding, Block, Head),
        "llama": (TokenEmbedding, LlamaBlock, LlamaHead),
        "mlp": (ContextEmbedding, FeedForwardBlock, Head),
        "conv": (ImageEmbedding, ConvolutionBlock, ClassHead),
    }
    return known[model_type]


def cut_into_parts(blocks_per_stage: Sequence[int], *, num_chunks: int) -> list[range]:
    """The model's blocks, part by part.

    >>> cut_into_parts([2, 4], num_chunks=1)
    [range(0, 2), range(2, 6)]
    >>> cut_into_parts([2, 4], num_chunks=2)
    [range(0, 1), range(1, 3), range(3, 4), range(4, 6)]

    Raises:
        ValueError: The blocks of a stage are not a multiple of `num_chunks`.
    """
    if any(blocks % num_chunks for blocks in blocks_per_stage):
        raise ValueError(f"{num_chunks} equal chunks cannot share the blocks of every stage of {blocks_per_stage}")
    ends = accumulate([blocks // num_chunks for blocks in blocks_per_stage] * num_chunks, initial=0)
    return [range(first, end) for first, end in pairwise(ends)]
