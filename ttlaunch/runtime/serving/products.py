"""The linear layers of a served model: whole, or a rank's columns of each.

Ranks that share matrices by output columns gather what each has computed. Nothing is summed, so a row has the bits of the
whole product, which a split by input rows with its sum of partial products would not have.

Shapes: R = rows, at least 4; K = inputs, N = outputs of a layer; n = outputs that this rank computes.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.model.split import Split
from ttlaunch.runtime.serving import rules, transposed
from ttlaunch.runtime.serving.shares import Shares
from ttlaunch.runtime.serving.tried_rows import tried_counts
from ttlaunch.spec.recipe.sections import TrainingFile

Gather = Callable[[Tensor, Sequence[int]], Tensor]
"""Puts together what all shares have: from this rank's columns, shape (R, n), and the number of columns of every share in
order, to all of them, shape (R, N). Every share calls it, in the same order."""

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_format(cfg: TrainingFile, device: torch.device) -> torch.dtype:
    """Return the format in which a served model computes products and attention.

    Raises:
        ValueError: No model is served in `training_config.precision` on this device.
    """
    precision = cfg.training_config.precision
    if precision == "fp16" and device.type == "cpu":
        raise ValueError(f"no model is served in {precision} on a CPU")
    return _FORMATS[precision]


class Products:
    """Computes linear layers by name: `blocks.3.feed_forward_in`, `head`, `embedding.context`.

    Attributes:
        heads: The heads of every block whose keys and values this rank keeps; empty if the model has none. Of a llama, where
            heads share them, each rank has all.
        device: Where the model is.
        format: The number format of products and attention.
        padding: Whether rows get the bits of training.
    """

    def __init__(
        self,
        cfg: TrainingFile,
        model: Model,
        *,
        place: int = 0,
        count: int = 1,
        gather: Gather | None = None,
        padding: rules.Padding = rules.EXACT,
        training_rows: int | None = None,
    ) -> None:
        """Take the layers of a model, or copies of a share's columns where the model has whole matrices.

        Args:
            cfg: The precision and the heads.
            model: All blocks or those of a stage, with whole matrices or this rank's columns of them.
            place: This rank's position among those that share the matrices.
            count: The number of ranks that share them.
            gather: Gathers columns; required if `count` is above 1.
            padding: `rules.EXACT`, or `rules.FAST` for fewer rows with other bits.
            training_rows: Rows of a product in training, on which bits depend on a GPU; None: those of one sequence.

        Raises:
            ValueError: The matrices are too narrow for so many shares, the precision is not served, or on a GPU, products of training
                are too large to try.
        """
        if count > 1 and gather is None:
            raise ValueError("shares of matrices need a way to gather columns")
        self.device = next(model.parameters()).device
        self.format, self.padding = compute_format(cfg, self.device), padding
        self._gather, self._place, self._count = gather, place, count
        self._sharing = Shares(cfg, count)
        self.heads = self._sharing.heads(place)
        self._own: dict[str, list[range]] = {}
        self._widths: dict[str, list[int]] = {}
        self._layers: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, (weight_NK, bias_N) in linear_layers(model).items():
            self._add(name, weight_NK, bias_N, split=model.splits.get(_parameter(name)))
        matrices = [weight for weight, _ in self._layers.values()]
        # Ranks that share matrices send padded rows, so their number must not depend on what each of them can do.
        is_alone = padding.is_exact and count == 1
        is_on_gpu = padding.is_exact and self.device.type != "cpu"
        most = training_rows or cfg.transformer_config.max_sequence_length
        self._counts = tried_counts(self._layers.values(), rows=most) if is_on_gpu else ()
        has_copies = is_alone and transposed.can_transpose(matrices, least_rows=padding.least_rows)
        self._of_few_rows = (
            {name: transposed.products_of_few_rows(*layer) for name, layer in self._layers.items()}
            if has_copies
            else {}
        )

    def _add(self, name: str, weight_NK: Tensor, bias_N: Tensor | None, *, split: Split | None) -> None:
        outputs = len(weight_NK) if split is None else split.shape[0]
        self._own[name] = [range(outputs)]
        if self._count == 1:
            self._keep(name, weight_NK, bias_N)
            return
        parts = self._sharing.parts(name, outputs)
        self._widths[name] = [sum(map(len, part)) for part in parts]
        if self._sharing.is_gated(name):
            self._widths[name] = [len(first) for first, _ in parts]  # what is gathered has been multiplied by its gate
        if min(self._widths[name]) < rules.LEAST_SHARE:
            few = f"{min(self._widths[name])} columns of {name}; each rank needs at least {rules.LEAST_SHARE}"
            raise ValueError(f"{self._count} ranks would leave one of them {few}")
        own = self._own[name] = parts[self._place]
        if split is not None:  # only these columns were read
            self._keep(name, weight_NK, bias_N)
            return
        cut = [
            torch.cat([whole[each.start : each.stop] for each in own])
            for whole in (weight_NK, bias_N)
            if whole is not None
        ]
        self._keep(name, cut[0], cut[1] if bias_N is not None else None)

    def _keep(self, name: str, weight_nK: Tensor, bias_n: Tensor | None) -> None:
        weight = weight_nK.to(self.format)
        if not self.padding.is_exact:
            weight = weight.T.contiguous()  # a product of one row takes two thirds of the time, and has other bits
        self._layers[name] = weight, None if bias_n is None else bias_n.to(self.format)

    def product_rows(self, rows: int) -> int:
        """Return to how many rows those of a step are padded."""
        if self._counts:
            most = self._counts[-1]
            return next((count for count in self._counts if count >= rows), -(-rows // most) * most)
        if self._of_few_rows and rows < self.padding.least_rows:
            return max(transposed.FEWEST_ROWS, rows)
        return self.padding.product_rows(rows)

    def columns(self, name: str) -> list[range]:
        """Return which columns of a layer's outputs this rank computes, in their order in `own`."""
        return self._own[name]

    @property
    def sent_values(self) -> tuple[int, int]:
        """Return how many values this rank sends to each other one: of a row in all blocks and the embedding, and of a row of logits.

        The blocks gather what every layer has computed but the first of attention in a gpt, whose heads are gathered instead.
        """
        if self._count == 1:
            return 0, 0
        own = {name: widths[self._place] for name, widths in self._widths.items()}
        if self.heads and self._sharing.heads_of_all[self._place]:
            own |= {name: width // 3 for name, width in own.items() if name.endswith("attention_in")}
        head = own.pop("head")
        return sum(own.values()), head

    def own(self, name: str, rows_RK: Tensor) -> Tensor:
        """Compute this rank's columns of a layer, shape (R, n), in `format`; no message."""
        weight, bias_n = self._layers[name]
        if rows_RK.dtype != self.format:
            rows_RK = rows_RK.to(self.format)
        if self.padding.is_exact:
            return self._exact(name, rows_RK)
        return rows_RK @ weight if bias_n is None else torch.addmm(bias_n, rows_RK, weight)

    def _exact(self, name: str, rows_RK: Tensor) -> Tensor:
        weight, bias_n = self._layers[name]
        if self._counts:
            return self._of_tried_rows(rows_RK, weight, bias_n)
        count, least = rows_RK.shape[0], self.padding.least_rows
        if count >= least or not self._of_few_rows:
            return functional.linear(rows_RK, weight, bias_n)
        products = self._of_few_rows[name]
        if (product := products.get(count)) is not None:
            return product(rows_RK)
        # The other layers have products of so few rows, and this one has not: it is padded alone.
        more = next((rows for rows in sorted(products) if rows > count), least)
        padded_RK = rules.padded_rows(rows_RK, torch.arange(more, device=self.device).clamp_(max=count - 1))
        found_Rn = products[more](padded_RK) if more < least else functional.linear(padded_RK, weight, bias_n)
        return found_Rn[:count]

    def _of_tried_rows(self, rows_RK: Tensor, weight: Tensor, bias_n: Tensor | None) -> Tensor:
        """Compute a layer of which training never computed more rows at once than the last of the tried counts."""
        most = self._counts[-1]
        if len(rows_RK) <= most:
            return functional.linear(rows_RK, weight, bias_n)
        return torch.cat([functional.linear(part, weight, bias_n) for part in rows_RK.split(most)])

    def gathered_as(self, name: str, own_Rn: Tensor) -> Tensor:
        """Put together the columns that all shares have of the outputs of layer `name`, shape (R, N)."""
        return self._gathered(own_Rn, self._widths.get(name, ()))

    def gathered_heads(self, mixed_Rn: Tensor) -> Tensor:
        """Put together what the heads of all shares have mixed, shape (R, D)."""
        if self._count == 1:
            return mixed_Rn
        width = mixed_Rn.shape[1] // max(1, len(self.heads))
        return self._gathered(mixed_Rn, [len(part) * width for part in self._sharing.heads_of_all])

    def whole(self, name: str, rows_RK: Tensor) -> Tensor:
        """Compute a layer, shape (R, N), in `format`: this rank's columns, gathered with those of the others."""
        return self.gathered_as(name, self.own(name, rows_RK))

    def _gathered(self, own_Rn: Tensor, widths: Sequence[int]) -> Tensor:
        return own_Rn if self._gather is None or self._count == 1 else self._gather(own_Rn, widths)


def linear_layers(model: Model) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return what this rank has of each linear layer's matrix and bias, by name; the head's matrix may be the embedding's."""
    found: dict[str, tuple[Tensor, Tensor | None]] = {
        name: (layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name != "head.output"
    }
    if model.head is not None:
        is_shared = model.is_tied and model.embedding is not None and not model.head_has_copy
        source = model.embedding.token if is_shared and model.embedding is not None else model.head.output
        found["head"] = cast("Tensor", source.weight).detach(), None
    return found


def _parameter(layer: str) -> str:
    """Return the name of a layer's matrix."""
    return "head.output.weight" if layer == "head" else f"{layer}.weight"
