"""Sequences that a random Markov chain draws: any number of them, without a file, and with a known lowest loss.

In a chain of order k, the next token is one of b consecutive tokens, with equal probability. The first of these b is the sum of k
values: for each of the last k tokens, the value that a random table has for it. At the beginning of a sequence there are fewer:

    x_t = (f_1(x_{t-1}) + ... + f_k(x_{t-k}) + u_t) mod V,    u_t uniform on 0 to b - 1,    x_0 on 0 to V - 1

So a model that knows the tables gives the token that follows the probability 1/b. Its loss is ln b and its perplexity b, for every
sample and not only in the mean. That is the chain's entropy rate: no model that has not seen the sample has a lower expected loss.

A sequence depends on the seed and its number alone, and is drawn when it is needed. Training uses the first numbers, validations
use those after them.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, V = vocabulary.
Source: T. M. Cover, J. A. Thomas, "Elements of Information Theory", 2nd edition, Wiley, 2006, for the entropy rate of a
    chain; this one is ours.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from ttlaunch.runtime.comm.reduction import mean_per_token
from ttlaunch.runtime.data.batches import MicroBatch
from ttlaunch.runtime.data.order import SampleOrder, micro_batch_ranges
from ttlaunch.runtime.model.losses import perplexity
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.sections import DataConfig, TrainingFile
from ttlaunch.spec.recipe.synthetic import check_synthetic


class MarkovChain:
    """A chain, and its sequences by number."""

    def __init__(self, cfg: DataConfig) -> None:
        """Draw the tables, `order` × V numbers."""
        self._cfg = cfg
        size = cfg.vocabulary
        self._generator = np.random.RandomState()
        self._seed("chain")
        self._tables = [self._generator.randint(size, size=size).tolist() for _ in range(cfg.order)]

    def draw(self, number: int, *, length: int) -> list[int]:
        """A sequence by its number.

        Cost: a fraction of a microsecond a token and order, for which numpy would take longer.
        """
        self._seed("sequence", number)
        size, draw = self._cfg.vocabulary, self._generator.randint
        tokens: list[int] = [draw(size)]
        for choice in draw(self._cfg.branching, size=length - 1).tolist():
            at = choice
            for away, table in enumerate(self._tables[: len(tokens)], 1):
                at += table[tokens[-away]]
            tokens.append(at % size)
        return tokens

    def _seed(self, *key: object) -> None:
        """Let numpy's legacy generator, whose stream is frozen for good, go on from the key alone."""
        text = "\0".join(map(str, ("synthetic", self._cfg.seed, *key)))
        digest = hashlib.sha256(text.encode()).digest()
        self._generator.seed(np.frombuffer(digest, dtype="<u4").astype(np.uint32))


class SyntheticData:
    """Drawn sequences for training and validation; see `TrainingData`.

    Attributes:
        training_sequences: The number of sequences in one epoch.
    """

    counts = "tokens"

    def __init__(self, corpus: Corpus, cfg: TrainingFile) -> None:
        """Draw the chain.

        Raises:
            CorpusError: There are too few sequences.
        """
        check_synthetic(corpus, cfg)
        training = cfg.training_config
        self._chain = MarkovChain(cfg.data_config)
        self._length = cfg.transformer_config.max_sequence_length
        self.vocabulary = cfg.data_config.vocabulary
        self.training_sequences = cfg.data_config.sequences
        self.validation_sequences = training.validation_sequences
        self.validation_tokens = self.validation_sequences * self._length
        self._validation_sizes = micro_batch_ranges(self.validation_sequences, training.sequences_per_micro_batch)
        self._order = SampleOrder(training, count=self.training_sequences)
        self.total_steps, self.position = self._order.total_steps, self._order.position

    @property
    def validation_micro_batches(self) -> int:
        return len(self._validation_sizes)

    def training_batch(self, step: int, index: int) -> MicroBatch:
        """Micro-batch `index` of `step`, from 1."""
        return self._batch(index, self._order.samples(step, index))

    def validation_batch(self, index: int) -> MicroBatch:
        """Micro-batch `index` of every validation."""
        return self._batch(index, [self.training_sequences + place for place in self._validation_sizes[index]])

    def validation_values(self, losses: Sequence[float], *, tokens: int) -> dict[str, float]:
        """The mean loss per token, and its perplexity; added up in the order of the micro-batches."""
        loss = mean_per_token(sum(losses), tokens)
        return {"loss": loss, "perplexity": perplexity(loss), "tokens": tokens}

    def _batch(self, index: int, numbers: Sequence[int]) -> MicroBatch:
        tokens = torch.tensor([self._chain.draw(number, length=self._length + 1) for number in numbers])
        return index, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
