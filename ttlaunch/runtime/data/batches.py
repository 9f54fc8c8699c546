"""The common interface of all kinds of training data, and which part of a step each rank reads.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.model.losses import count_tokens
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile

MicroBatch = tuple[int, Tensor, Tensor]
"""The data of one forward pass: the index of the micro-batch in its step, the inputs and the targets; int64.

For text, the inputs are tokens and the targets are the tokens that follow them, both (B, T). For images, the inputs are
pixels, (B, T), and the targets are labels, (B, 1). A target that does not count in the loss is
`IGNORED` instead.
"""


class TrainingData(Protocol):
    """Data to train on, cut into sequences; an image is a sequence of pixels.

    Attributes:
        vocabulary: Number of different tokens, or of classes.
        validation_sequences: The number of sequences that one validation evaluates.
        validation_micro_batches: The number of micro-batches of one validation.
        validation_tokens: Targets that count in one validation.
        total_steps: Steps until `steps` are done or `num_epochs` are used up, whatever comes first.
        counts: What reports call the targets that count in the loss: "tokens", or "samples" if each sample has one.
    """

    counts: str
    vocabulary: int
    validation_sequences: int
    validation_tokens: int
    total_steps: int

    @property
    def validation_micro_batches(self) -> int: ...

    def position(self, step: int) -> dict[str, int]:
        """Where the data stands after a step: the next sample is number `sample` of epoch `epoch`, both from 0."""

    def training_batch(self, step: int, index: int) -> MicroBatch:
        """Return micro-batch `index` of a step; steps are counted from 1, micro-batches from 0."""

    def validation_batch(self, index: int) -> MicroBatch:
        """Return micro-batch `index` of a validation; every validation has the same sequences."""

    def validation_values(self, losses: Sequence[float], *, tokens: int) -> dict[str, float]:
        """Compute what a validation reports from the summed losses of its micro-batches: `loss`, and further values."""


class CountsTrained(Protocol):
    """A member of an elastic run, which reports its own speed."""

    def count_trained(self, targets: int) -> None:
        """Note a micro-batch that this rank has differentiated, with so many targets that count."""


class HasData(Protocol):
    """The part of a rank's context that data needs."""

    @property
    def rank(self) -> Rank: ...

    @property
    def device(self) -> torch.device: ...

    def data(self, cfg: TrainingFile) -> TrainingData: ...

    @property
    def elastic(self) -> CountsTrained | None: ...


def micro_batches(
    cfg: TrainingFile,
    ctx: HasData,
    step: int,
    *,
    among: Sequence[Rank] = (),
    indices: Iterable[int] | None = None,
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of a step, in the order of their indices.

    Args:
        cfg: Batch sizes and seed.
        ctx: The rank, for its data and device.
        step: The step, from 1.
        among: Ranks that share the step, each with a contiguous block of it; empty: this rank takes all.
        indices: Those that this rank takes; None: as `among` says.
    """
    data = ctx.data(cfg)
    for index in _share(cfg.training_config.micro_batches, ctx.rank, among) if indices is None else indices:
        index_x_y = _on_device(data.training_batch(step, index), ctx.device)
        yield index_x_y
        if ctx.elastic is not None:  # whoever asks for the next one is done with it
            ctx.elastic.count_trained(count_tokens(index_x_y[2]))


def validation_micro_batches(cfg: TrainingFile, ctx: HasData, *, among: Sequence[Rank] = ()) -> Iterator[MicroBatch]:
    """This rank's micro-batches of a validation, as in `micro_batches`; none for some ranks if there are fewer micro-batches than ranks."""
    data = ctx.data(cfg)
    for index in _share(data.validation_micro_batches, ctx.rank, among):
        yield _on_device(data.validation_batch(index), ctx.device)


def _share(count: int, rank: Rank, among: Sequence[Rank]) -> range:
    return contiguous_blocks(count, len(among))[among.index(rank)] if among else range(count)


def _on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    index, x_BT, y_BT = batch
    return index, x_BT.to(device), y_BT.to(device)
