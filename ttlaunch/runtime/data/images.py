"""Images to classify, micro-batch by micro-batch: a pure function of the rows, seed and step.

An image is a sequence of pixels with one target, its class. A validation computes its images twice: first for the
loss, then for the number of wrong answers, for which its targets are marked. So accuracy needs no code in recipes: it reaches the
reporting rank by the same messages as the loss.

Shapes: B = images of a micro-batch, T = pixels of an image.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ttlaunch.runtime.comm.reduction import mean_per_token
from ttlaunch.runtime.data.batches import MicroBatch
from ttlaunch.runtime.data.order import SampleOrder, micro_batch_ranges
from ttlaunch.runtime.model.losses import ask_for_errors
from ttlaunch.spec.recipe.corpus import Corpus, spread_evenly
from ttlaunch.spec.recipe.images import count_images
from ttlaunch.spec.recipe.sections import TrainingFile


class ImageData:
    """Images and their classes; see `TrainingData`. The vocabulary is the classes.

    Pixels are scaled to 0 to 255, from 0 to the largest of all.
    """

    counts = "samples"

    def __init__(self, corpus: Corpus, cfg: TrainingFile) -> None:
        """Parse the rows.

        Raises:
            CorpusError: They are no images of the configured size, or too few.
        """
        training = cfg.training_config
        self.training_sequences, self._available = count_images(corpus, cfg)
        rows = np.array([row.split(b",") for row in corpus.text.split()]).astype(np.int64)
        pixels, labels = rows[:, :-1], rows[:, -1]
        self._pixels = pixels * 255 // max(1, int(pixels.max()))
        self._labels = labels
        self.vocabulary = int(labels.max()) + 1
        size = training.sequences_per_micro_batch
        whole = min(training.validation_sequences, self._available) // size * size
        self.validation_tokens = max(size, whole)
        self.validation_sequences = 2 * self.validation_tokens
        self._validation_sizes = micro_batch_ranges(self.validation_tokens, size)
        self._order = SampleOrder(training, count=self.training_sequences)
        self.total_steps, self.position = self._order.total_steps, self._order.position

    @property
    def validation_micro_batches(self) -> int:
        return 2 * len(self._validation_sizes)

    def training_batch(self, step: int, index: int) -> MicroBatch:
        """Micro-batch `index` of `step`, from 1."""
        return self._batch(index, self._order.samples(step, index))

    def validation_batch(self, index: int) -> MicroBatch:
        """Micro-batch `index` of every validation; those of the second half ask for the errors of the first."""
        again, part = divmod(index, len(self._validation_sizes))
        chosen = spread_evenly(self.validation_tokens, self._available)
        samples = [self.training_sequences + chosen[place] for place in self._validation_sizes[part]]
        _, x_BT, y_B1 = self._batch(index, samples)
        return index, x_BT, ask_for_errors(y_B1) if again else y_B1

    def validation_values(self, losses: Sequence[float], *, tokens: int) -> dict[str, float]:
        """The mean loss per image, and the share of right answers."""
        half = len(losses) // 2
        loss = mean_per_token(sum(losses[:half]), tokens)
        accuracy = 1 - mean_per_token(sum(losses[half:]), tokens)
        return {"loss": loss, "samples": tokens, "accuracy": accuracy}

    def _batch(self, index: int, samples: Sequence[int]) -> MicroBatch:
        places = np.array(samples)
        return index, torch.from_numpy(self._pixels[places]), torch.from_numpy(self._labels[places][:, None])
