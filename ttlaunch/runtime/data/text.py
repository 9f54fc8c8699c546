"""Which tokens a micro-batch holds: a pure function of text, seed and step, never of the number of ranks.

Sample k of epoch e is permutation(seed, e)(k); k counts over the whole run's samples, so (e, k) is all the state the
data has.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttlaunch.recipe import TrainingFile
from ttlaunch.recipe.corpus import Corpus, count_sequences, split_tokens, spread_evenly
from ttlaunch.recipe.responses import check_responses, response_ranges
from ttlaunch.runtime.collectives.reduction import contiguous_blocks
from ttlaunch.runtime.training.losses import IGNORED, count_tokens
from ttlaunch.runtime.world import Rank

MicroBatch = tuple[int, Tensor, Tensor]
"""What one forward pass sees: its index in the step, tokens, and the token that follows each; int64, (B, T).

A following token that does not count in the loss is `IGNORED` instead.
"""

_Text = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Tokens, and the same as targets: those that do not count are `IGNORED`."""


class HasData(Protocol):
    """The part of a rank's context that data needs."""

    @property
    def rank(self) -> Rank: ...

    @property
    def device(self) -> torch.device: ...

    def data(self, cfg: TrainingFile) -> "TextData": ...


class TextData:
    """Tokens of a text, cut into sequences for training and validation.

    Attributes:
        vocabulary: Number of different tokens.
        training_sequences: That one epoch has.
        validation_sequences: That one validation evaluates.
        validation_tokens: Targets that count in one validation.
        total_steps: Steps until `steps` are done or `num_epochs` are used up, whatever comes first.
    """

    def __init__(self, corpus: Corpus, cfg: TrainingFile) -> None:
        """Tokenize.

        Raises:
            CorpusError: The text is too short, or nothing in it counts.
        """
        training = cfg.training_config
        tokens, self.vocabulary = tokenize(corpus, training.tokenizer_type)
        self.training_sequences, self._available = count_sequences(corpus, cfg)
        self.validation_sequences = min(training.validation_sequences, self._available)
        check_responses(corpus, cfg)
        border, _ = split_tokens(corpus, cfg)
        targets = _as_targets(tokens, response_ranges(corpus, training))
        self._training, self._validation = (tokens[:border], targets[:border]), (tokens[border:], targets[border:])
        self._length = cfg.transformer_config.max_sequence_length
        self._seed = training.seed
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}
        self._sizes = _micro_batch_ranges(training.sequences_per_step, training.sequences_per_micro_batch)
        self._validation_sizes = _micro_batch_ranges(self.validation_sequences, training.sequences_per_micro_batch)
        epochs = training.num_epochs
        possible = training.steps if epochs is None else epochs * self.training_sequences // training.sequences_per_step
        self.total_steps = min(training.steps, possible)
        validation = map(self.validation_batch, range(len(self._validation_sizes)))
        self.validation_tokens = sum(count_tokens(y_BT) for _, _, y_BT in validation)

    @property
    def validation_micro_batches(self) -> int:
        return len(self._validation_sizes)

    def position(self, step: int) -> dict[str, int]:
        """Where the data stands after a step: the next sample is number `sample` of epoch `epoch`, both from 0."""
        epoch, sample = divmod(step * self._sizes[-1].stop, self.training_sequences)
        return {"epoch": epoch, "sample": sample}

    def training_batch(self, step: int, index: int) -> MicroBatch:
        """Micro-batch `index` of `step`, from 1."""
        first = (step - 1) * self._sizes[-1].stop
        samples = [self._sample(first + position) for position in self._sizes[index]]
        return self._batch(index, self._training, samples)

    def validation_batch(self, index: int) -> MicroBatch:
        """Micro-batch `index` of every validation: always the same sequences, spread evenly over the text kept for it."""
        chosen = spread_evenly(self.validation_sequences, self._available)
        return self._batch(index, self._validation, [chosen[place] for place in self._validation_sizes[index]])

    def _sample(self, position: int) -> int:
        epoch, k = divmod(position, self.training_sequences)
        if epoch not in self._permutations:
            self._permutations[epoch] = permutation(self._seed, epoch, count=self.training_sequences)
            self._permutations.pop(epoch - 2, None)
        return int(self._permutations[epoch][k])

    def _batch(self, index: int, text: _Text, sequences: Sequence[int]) -> MicroBatch:
        tokens, targets = text
        places = np.array(sequences)[:, None] * self._length + np.arange(self._length)
        return index, torch.from_numpy(tokens[places]), torch.from_numpy(targets[places + 1])


def micro_batches(cfg: TrainingFile, ctx: HasData, step: int, *, among: Sequence[Rank] = ()) -> Iterator[MicroBatch]:
    """This rank's micro-batches of a step, in the order of their indices.

    Args:
        cfg: Batch sizes and seed.
        ctx: The rank, for its data and device.
        step: From 1.
        among: Ranks that share the step, each with a contiguous block of it; empty: this rank takes all.
    """
    data = ctx.data(cfg)
    for index in _share(cfg.training_config.micro_batches, ctx.rank, among):
        yield _on_device(data.training_batch(step, index), ctx.device)


def validation_micro_batches(cfg: TrainingFile, ctx: HasData, *, among: Sequence[Rank] = ()) -> Iterator[MicroBatch]:
    """This rank's micro-batches of a validation, as in `micro_batches`; none if there are more ranks than those."""
    data = ctx.data(cfg)
    for index in _share(data.validation_micro_batches, ctx.rank, among):
        yield _on_device(data.validation_batch(index), ctx.device)


def permutation(seed: int, epoch: int, *, count: int) -> npt.NDArray[np.int64]:
    """The order of an epoch's samples; numpy's legacy generator, whose stream is frozen for good."""
    digest = hashlib.sha256(f"epoch\0{seed}\0{epoch}".encode()).digest()
    generator = np.random.RandomState(np.frombuffer(digest, dtype="<u4").astype(np.uint32))
    return generator.permutation(count).astype(np.int64)


def tokenize(corpus: Corpus, tokenizer: str) -> tuple[npt.NDArray[np.int64], int]:
    """Tokens, and the size of the vocabulary: bytes, or the characters of the text in the order of their code points."""
    if tokenizer == "byte":
        return np.frombuffer(corpus.text, dtype=np.uint8).astype(np.int64), 256
    points = np.frombuffer(corpus.characters.encode("utf-32-le"), dtype="<u4")
    alphabet, tokens = np.unique(points, return_inverse=True)
    return tokens.astype(np.int64), len(alphabet)


def _as_targets(tokens: npt.NDArray[np.int64], counted: Sequence[range] | None) -> npt.NDArray[np.int64]:
    """The tokens, `IGNORED` in place of those outside the ranges; None: all of them count."""
    if counted is None:
        return tokens
    targets = np.full_like(tokens, IGNORED)
    for span in counted:
        targets[span.start : span.stop] = tokens[span.start : span.stop]
    return targets


def _micro_batch_ranges(sequences: int, size: int) -> list[range]:
    return [range(start, min(start + size, sequences)) for start in range(0, sequences, size)]


def _share(count: int, rank: Rank, among: Sequence[Rank]) -> range:
    return contiguous_blocks(count, len(among))[among.index(rank)] if among else range(count)


def _on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    index, x_BT, y_BT = batch
    return index, x_BT.to(device), y_BT.to(device)
