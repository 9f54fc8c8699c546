"""Forward and backward passes a layer at a time, for all of a rank's micro-batches, so that a step gathers each layer twice.

The usual order takes a micro-batch through all layers before the next one, and would gather every layer twice for each
micro-batch. The price of the order here is memory for the activations of all micro-batches, as in one large batch; with
`activation_checkpointing`, only for those between layers. Both orders make the same operations on the same operands, so
the bits are the same.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = width of the residual stream.
Source: B. Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New Execution Algorithm",
arXiv:2002.05645, 2020, for the order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import MicroBatch, validation_micro_batches
from ttlaunch.runtime.model.backward import run_backward
from ttlaunch.runtime.model.losses import count_tokens, summed_loss
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.zero.weights import GatheredWeights
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile


class LayerPasses:
    """The passes of one step over a rank's micro-batches.

    Attributes:
        batches: The rank's micro-batches.
        counts: Tokens and summed loss of each micro-batch whose backward pass has begun.
    """

    def __init__(self, model: Model, batches: Sequence[MicroBatch], *, step: int) -> None:
        """Take the micro-batches of a step; no layer has run yet."""
        self.batches = batches
        self.counts: list[tuple[int, float]] = []
        self._model = model
        self._masks = [model.masks(step, index) for index, _, _ in batches]
        self._into: list[list[Tensor]] = [[x_BT] for _, x_BT, _ in batches]  # inputs, by micro-batch and layer
        self._out: list[list[Tensor]] = [[] for _ in batches]  # outputs, by micro-batch and layer
        self._gradients: list[Tensor | None] = [None] * len(batches)  # of the output of the layer to differentiate next

    def forward(self, layer: int) -> None:
        """Run a layer other than the last for all micro-batches, after the layers before it."""
        for place in range(len(self.batches)):
            out_BTD = self._model(self._into[place][layer], self._masks[place], layer=layer)
            self._out[place].append(out_BTD)
            self._into[place].append(out_BTD.detach().requires_grad_())

    def backward(self, layer: int, place: int) -> None:
        """Differentiate a layer for one micro-batch, after the layers that follow it; the last layer runs forward first.

        Args:
            layer: The layer whose parameters get gradients of the *summed* loss, times the loss scale.
            place: The place of the micro-batch; call for the micro-batches in order.
        """
        x = self._into[place].pop()
        if layer > len(self._out[place]) - 1:
            _, _, y_BT = self.batches[place]
            loss = summed_loss(self._model(x, self._masks[place], layer=layer), y_BT)
            self.counts.append((count_tokens(y_BT), self._model.note_loss(self._masks[place], loss.item())))
            run_backward(loss, self._model.loss_scaler.seed(loss))
        else:
            out_BTD = self._out[place].pop()
            run_backward(out_BTD, self._gradients[place])
        self._gradients[place] = x.grad


@torch.no_grad()
def losses_by_layer(  # noqa: PLR0917  users' trainers call it so
    cfg: TrainingFile, ctx: RankContext, model: Model, weights: GatheredWeights, *, among: Sequence[Rank]
) -> Tensor:
    """Evaluate this rank's share of the validation, without dropout, as `validation_losses` does.

    Every rank gathers every layer once, whatever its share is.

    Returns:
        The summed loss of each micro-batch of the share in order, float64, on the CPU; empty if the share is empty.
    """
    batches = list(validation_micro_batches(cfg, ctx, among=among))
    inputs, losses = [x_BT for _, x_BT, _ in batches], []
    last = weights.layers[-1].index
    with ctx.announced("evaluation"):
        for layer in range(last):
            weights.fetch(layer, then=layer + 1)
            inputs = [model(x, layer=layer) for x in inputs]
        weights.fetch(last, then=None)
        for x_BTD, (_, _, y_BT) in zip(inputs, batches, strict=True):
            losses.append(summed_loss(model(x_BTD, layer=last), y_BT).item())
    return torch.tensor(losses, dtype=torch.float64)
