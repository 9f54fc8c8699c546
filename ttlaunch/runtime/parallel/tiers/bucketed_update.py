"""An optimizer's step, bucket by bucket: complete buckets are updated while other gradients have not yet arrived."""

from collections.abc import Iterable, Iterator, Sequence

from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.gradients.buckets import Bucket
from ttlaunch.runtime.training.optimizers import Optimizer, global_norm
from ttlaunch.spec.recipe.sections import TrainingFile


class BucketedUpdate:
    """The steps of an `Optimizer`, with the same bits as `Optimizer.step`.

    With `use_clip_grad_norm`, and with fp16, the update of every bucket needs the norm of the whole gradient. Squared
    norms are computed as buckets arrive, but the first update comes after the last gradient. So updates and the sending of
    weights no longer overlap with the arrival of gradients.

    Without, a step that stops at NaN or infinite values has updated the buckets that arrived before the first of these.

    Attributes:
        norm: The norm of the last step's gradient, before clipping.
        rate: The learning rate of the last step.
    """

    def __init__(self, optimizer: Optimizer, *, cfg: TrainingFile, model: Model) -> None:
        self._optimizer = optimizer
        self._model = model
        self._waits_for_norm = cfg.training_config.updates_need_the_norm
        self.norm = self.rate = 0.0

    def step(self, step: int, arriving: Iterable[Bucket]) -> Iterator[Bucket]:
        """Update all parameters.

        Args:
            step: The step, from 1.
            arriving: Yields all buckets, each when its gradients are in `grads_N`.

        Yields:
            Each bucket when its weights are final, in `update_order`.
        """
        squared: list[tuple[int, list[float]]] = []
        buckets: list[Bucket] = []
        for bucket in arriving:
            squares = self._optimizer.squared_norms(bucket.parameters)
            squared.append((bucket.parameters.start, squares))
            buckets.append(bucket)
            if not self._waits_for_norm:
                self._optimizer.check(
                    global_norm(squares)
                )  # buckets before this one have their update; none gets a bad value
                self.rate = self._optimizer.update(step, bucket.parameters)
                yield bucket
        self.norm = global_norm([square for _, squares in sorted(squared) for square in squares])
        self._optimizer.check(self.norm)
        if self._waits_for_norm:
            for bucket in reversed(buckets):
                self._optimizer.clip(bucket.of(self._model.grads_N), norm=self.norm)
                self.rate = self._optimizer.update(step, bucket.parameters)
                yield bucket
        self._optimizer.end_step()


def update_order(cfg: TrainingFile, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the order in which buckets are updated: that of a forward pass if updates wait for the norm, else of a backward pass."""
    return list(reversed(buckets)) if cfg.training_config.updates_need_the_norm else list(buckets)
