"""Which samples a step sees: a function of seed and step alone, never of the number of ranks.

Sample k of epoch e is permutation(seed, e)(k); k counts over the whole run's samples, so (e, k) is all the state the
data has.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ttlaunch.spec.recipe.sections import TrainingConfig


class SampleOrder:
    """The samples of every micro-batch of a training.

    Attributes:
        count: Samples of one epoch.
        total_steps: Steps until `steps` are done or `num_epochs` are used up, whatever comes first.
    """

    def __init__(self, training: TrainingConfig, *, count: int) -> None:
        self.count = count
        self._seed = training.seed
        self._sizes = micro_batch_ranges(training.sequences_per_step, training.sequences_per_micro_batch)
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}
        epochs = training.num_epochs
        possible = training.steps if epochs is None else epochs * count // training.sequences_per_step
        self.total_steps = min(training.steps, possible)

    def position(self, step: int) -> dict[str, int]:
        """Where the data stands after a step: the next sample is number `sample` of epoch `epoch`, both from 0."""
        epoch, sample = divmod(step * self._sizes[-1].stop, self.count)
        return {"epoch": epoch, "sample": sample}

    def samples(self, step: int, index: int) -> Sequence[int]:
        """Return the samples of micro-batch `index` of `step`; steps count from 1."""
        first = (step - 1) * self._sizes[-1].stop
        return [self._sample(first + position) for position in self._sizes[index]]

    def _sample(self, position: int) -> int:
        epoch, k = divmod(position, self.count)
        if epoch not in self._permutations:
            self._permutations[epoch] = permutation(self._seed, epoch, count=self.count)
            self._permutations.pop(epoch - 2, None)
        return int(self._permutations[epoch][k])


@lru_cache(
    maxsize=2
)  # simulated ranks have one process and go through the same epochs; as many as a `SampleOrder` keeps
def permutation(seed: int, epoch: int, *, count: int) -> npt.NDArray[np.int64]:
    """The order of an epoch's samples, read-only; numpy's legacy generator, whose stream is frozen for good."""
    digest = hashlib.sha256(f"epoch\0{seed}\0{epoch}".encode()).digest()
    generator = np.random.RandomState(np.frombuffer(digest, dtype="<u4").astype(np.uint32))
    order: npt.NDArray[np.int64] = generator.permutation(count).astype(np.int64)
    order.flags.writeable = False
    return order


def micro_batch_ranges(sequences: int, size: int) -> list[range]:
    """Places of the sequences of each micro-batch; the last one may be smaller."""
    return [range(start, min(start + size, sequences)) for start in range(0, sequences, size)]
