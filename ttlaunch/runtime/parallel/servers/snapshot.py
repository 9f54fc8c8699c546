"""Validations by a rank that has more urgent work: it evaluates a copy of the weights, one micro-batch at a time.

Shapes: N = values of the flat vector.
"""

from collections import deque

import torch

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import validation_micro_batches
from ttlaunch.runtime.model.losses import summed_loss
from ttlaunch.runtime.model.model import Model
from ttlaunch.spec.recipe.sections import TrainingFile


class SnapshotValidation:
    """Evaluates a copy of the weights in small parts, and reports the mean loss when the last one is done.

    Memory: a second model.
    """

    def __init__(self, cfg: TrainingFile, ctx: RankContext, model: Model) -> None:
        """Make room for the copy; `begin` fills it."""
        self._cfg, self._ctx, self._model = cfg, ctx, model
        blocks = range(cfg.transformer_config.num_blocks)
        self._copy = Model(cfg, vocabulary=model.vocabulary, blocks=blocks, has_embedding=True, has_head=True)
        self._copy.flatten(ctx.device)
        self._batches: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._losses: list[float] = []
        self._step = 0

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Copy the weights after `step`; first finish a validation that is still under way."""
        self.finish()
        self._copy.weights_N.copy_(self._model.weights_N)
        self._batches = deque((x_BT, y_BT) for _, x_BT, y_BT in validation_micro_batches(self._cfg, self._ctx))
        self._losses, self._step = [], step

    @torch.no_grad()
    def advance(self) -> bool:
        """Evaluate one micro-batch; return False if none was left."""
        if not self._batches:
            return False
        x_BT, y_BT = self._batches.popleft()
        self._losses.append(summed_loss(self._copy(x_BT), y_BT).item())
        if not self._batches:
            tokens = self._ctx.data(self._cfg).validation_tokens
            self._ctx.report_validation(self._step, self._losses, tokens=tokens)
        return True

    def finish(self) -> None:
        """Evaluate the remaining micro-batches."""
        with self._ctx.announced("evaluation"):
            while self.advance():
                pass


def begin_task(ctx: RankContext, task: int) -> None:
    """Set the step that this rank's records belong to from now on; for ranks that do not take part in every step."""
    ctx.step = task
    ctx.traffic.begin_step(task)
