"""Which tokens a micro-batch holds: a pure function of text, seed and step, never of the number of ranks.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ttlaunch.runtime.comm.reduction import mean_per_token
from ttlaunch.runtime.data.batches import MicroBatch
from ttlaunch.runtime.data.order import SampleOrder, micro_batch_ranges
from ttlaunch.runtime.model.losses import IGNORED, count_tokens, perplexity
from ttlaunch.spec.recipe.corpus import Corpus, count_sequences, split_tokens, spread_evenly
from ttlaunch.spec.recipe.responses import check_responses, response_ranges
from ttlaunch.spec.recipe.sections import TrainingFile

_Text = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Tokens, and the same as targets: those that do not count are `IGNORED`."""


class TextData:
    """Tokens of a text, cut into sequences for training and validation.

    Attributes:
        vocabulary: Number of different tokens.
        training_sequences: The number of sequences in one epoch.
        validation_sequences: The number of sequences that one validation evaluates.
        validation_tokens: Targets that count in one validation.
        total_steps: Steps until `steps` are done or `num_epochs` are used up, whatever comes first.
    """

    counts = "tokens"

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
        self._order = SampleOrder(training, count=self.training_sequences)
        self.total_steps, self.position = self._order.total_steps, self._order.position
        self._validation_sizes = micro_batch_ranges(self.validation_sequences, training.sequences_per_micro_batch)
        validation = map(self.validation_batch, range(len(self._validation_sizes)))
        self.validation_tokens = sum(count_tokens(y_BT) for _, _, y_BT in validation)

    @property
    def validation_micro_batches(self) -> int:
        return len(self._validation_sizes)

    def training_batch(self, step: int, index: int) -> MicroBatch:
        """Micro-batch `index` of `step`, from 1."""
        return self._batch(index, self._training, self._order.samples(step, index))

    def validation_batch(self, index: int) -> MicroBatch:
        """Micro-batch `index` of every validation: always the same sequences, spread evenly over the text kept for it."""
        chosen = spread_evenly(self.validation_sequences, self._available)
        return self._batch(index, self._validation, [chosen[place] for place in self._validation_sizes[index]])

    def validation_values(self, losses: Sequence[float], *, tokens: int) -> dict[str, float]:
        """The mean loss per token, and its perplexity; added up in the order of the micro-batches."""
        loss = mean_per_token(sum(losses), tokens)
        return {"loss": loss, "perplexity": perplexity(loss), "tokens": tokens}

    def _batch(self, index: int, text: _Text, sequences: Sequence[int]) -> MicroBatch:
        tokens, targets = text
        places = np.array(sequences)[:, None] * self._length + np.arange(self._length)
        return index, torch.from_numpy(tokens[places]), torch.from_numpy(targets[places + 1])


def tokenize(corpus: Corpus, tokenizer: str) -> tuple[npt.NDArray[np.int64], int]:
    """Tokens, and the size of the vocabulary: bytes, characters in the order of their code points, or given ids."""
    if tokenizer == "byte":
        return np.frombuffer(corpus.text, dtype=np.uint8).astype(np.int64), 256
    if tokenizer == "ids":
        return np.array(corpus.ids, dtype=np.int64), corpus.vocabulary_of_ids or 0
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
