"""The model of a rank: all of the language model, or the contiguous part of it that one pipeline stage has.

If several ranks split the matrices of the blocks, each has its share of these matrices, and all other parameters whole.

Every parameter is drawn from a generator seeded by (seed, name). A stage therefore starts with the values that its
parameters have in the whole model, and ranks start with equal values without communicating.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = embedding_dim, V = vocabulary, N = values of the
flat vectors of `flat.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from ttlaunch.runtime.model.dropout import Masks, seeded_generator
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.model.layers import WHOLE, Layers, splits_of
from ttlaunch.runtime.model.loss_scaling import LossScaler
from ttlaunch.runtime.model.parts import parts_of
from ttlaunch.runtime.model.recompute import recomputed
from ttlaunch.runtime.model.split import Split
from ttlaunch.runtime.model.tied import EMBEDDING, HEAD
from ttlaunch.spec.recipe.sections import TrainingConfig, TrainingFile


class PassRecorder(Protocol):
    """Records when a model begins and ends a pass or an update."""

    def enter(self, phase: str, *, micro_batch: int | None = None) -> None: ...

    def leave(self) -> None: ...


class Model(nn.Module):
    """Embedding, blocks and head, or those of them that one stage has.

    Attributes:
        weights_N: All parameters in one flat view, float32; writing here changes them.
        grads_N: All gradients, in the same layout; backward passes add to it.
        traffic: Records updates; set by `RankContext.watch`. None: nobody watches the model.
        report_not_finite: What `note_loss` reports to; None: nobody.
        loss_scaler: The factor by which losses are multiplied before a backward pass, in this step.
        splits: For each parameter that is split among ranks, which of its values are here; parameters without an entry
            are whole.
        head_has_copy: Whether the head has a copy of a shared matrix although the embedding is here, too.
    """

    head_has_copy = False

    def __init__(
        self,
        cfg: TrainingFile,
        *,
        vocabulary: int,
        blocks: Iterable[int],
        has_embedding: bool,
        has_head: bool,
        layers: Layers = WHOLE,
    ) -> None:
        super().__init__()
        sizes = cfg.transformer_config
        embedding, block, head = parts_of(cfg.training_config.model_type)
        self.embedding = embedding(sizes, vocabulary=vocabulary) if has_embedding else None
        self.blocks = nn.ModuleDict({str(index): block(sizes, index=index, layers=layers) for index in blocks})
        self.head = head(sizes, vocabulary=vocabulary) if has_head else None
        self.num_blocks = sizes.num_blocks
        self.is_tied = sizes.tie_embeddings
        self.vocabulary = vocabulary
        self.traffic: PassRecorder | None = None
        self.report_not_finite: Callable[..., object] | None = None
        self._not_finite_in: int | None = None  # the last step of which a loss was reported
        self._cfg = cfg
        self.loss_scaler = LossScaler(cfg)
        self.seed = cfg.training_config.seed
        self.splits: Mapping[str, Split] = splits_of(self)
        self._has_common_part = layers.has_common_part
        self._initialise()
        if self._shared_matrix_and_buffer is not None:
            nn.init.zeros_(self._shared_matrix_and_buffer[1])

    @torch.no_grad()
    def _initialise(self) -> None:
        """Set every parameter from (seed, name) alone. Of a split parameter, each rank draws all values and keeps its part.

        Parameters on torch's device `meta` have no memory: whoever builds such a model gives them memory and values.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            split = self.splits.get(name)
            whole = parameter if split is None else parameter.new_empty(split.shape)
            initialise(name, whole, seed=self.seed, num_blocks=self.num_blocks, is_tied=self.is_tied)
            if split is not None:
                parameter.copy_(split.cut(whole))

    def flatten(self, device: torch.device) -> None:
        """Move to the device and lay parameters and gradients out flat; call once, before training."""
        self.to(device)
        flat = FlatParameters(self.parameters())
        self._flat: FlatParameters | None = flat
        self.weights_N, self.grads_N = flat.weights_N, flat.grads_N

    @property
    def copies(self) -> frozenset[str]:
        """Names that this rank leaves out of its checkpoints, because another rank has the same values and writes them.

        If ranks split matrices, the first of them writes the parameters that all have, and each matrix's count of updates.
        """
        if not self._has_common_part:
            names = [name for name, _ in self.named_parameters()]
            return frozenset(f"step.{name}" if name in self.splits else name for name in names)
        return (
            frozenset({EMBEDDING}) if self.is_tied and self.embedding is None and self.head is not None else frozenset()
        )

    @property
    def tied_gradient_VD(self) -> Tensor | None:
        """The gradient of this rank's use of a matrix that embedding and head share across ranks; None if they do not."""
        if not self.is_tied or self._shared_matrix_and_buffer is not None:
            return None
        use = (
            self.embedding.token if self.embedding is not None else self.head.output if self.head is not None else None
        )
        return None if use is None else use.weight.grad

    @property
    def _shared_matrix_and_buffer(self) -> tuple[Tensor, Tensor] | None:
        """The matrix that embedding and head share, and the buffer for the head's gradient of it, if both are on this rank."""
        if not self.is_tied or self.embedding is None or self.head is None:
            return None
        return self.embedding.token.weight, self.head.output.weight

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002  signature of nn.Module
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, under its name in the whole model; a matrix that two layers share has the embedding's name."""
        start = f"{prefix}." if prefix else ""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if not self.is_tied or name != start + HEAD:
                yield name, parameter
            elif self.embedding is None:
                yield start + EMBEDDING, parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: FBT001, FBT002  signature of nn.Module
        """Iterate over all that has a gradient; last comes the buffer for the head's gradient of a shared matrix."""
        return (parameter for _, parameter in super().named_parameters(recurse=recurse))

    @torch.no_grad()
    def add_head_gradient(self) -> None:
        """Add the head's gradient of a shared matrix to the embedding's; the optimizer calls this once both are complete."""
        if self._shared_matrix_and_buffer is not None:
            first, second = (parameter.grad for parameter in self._shared_matrix_and_buffer)
            if first is not None and second is not None:
                first.add_(second)
                second.zero_()

    def release_flat_vectors(self, *, weights: bool) -> None:
        """Release the flat vector of gradients and, with `weights`, that of weights; the caller lays them out in another way.

        Afterwards `take_gradients` and `zero_grad` do nothing, and the caller gives parameters new memory before a pass.
        """
        nothing = self.weights_N.new_empty(0)
        for parameter in self.parameters():
            parameter.grad = None
            if weights:
                parameter.data = nothing
        self.grads_N, self._flat = nothing, None
        if weights:
            self.weights_N = nothing

    def take_gradients(self) -> Tensor:
        """Return `grads_N`, all gradients; a parameter that got none counts as zero. Zero them before the next backward pass."""
        if self._flat is not None:
            self._flat.attach_gradients()
        return self.grads_N

    def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: FBT001, FBT002  signature of nn.Module
        """Zero all gradients; they stay views of `grads_N` whatever the argument says."""
        del set_to_none
        self.grads_N.zero_()

    def names_of_whole(self) -> frozenset[str]:
        """Return the names of all parameters of the whole model, of which this rank may have only some."""
        sizes = self._cfg.transformer_config
        tiny = sizes.model_copy(update={"embedding_dim": sizes.num_heads, "max_sequence_length": 2, "mlp_dim": 1})
        cfg = self._cfg.model_copy(update={"transformer_config": tiny})
        blocks = range(sizes.num_blocks)
        whole = Model(cfg, vocabulary=2, blocks=blocks, has_embedding=True, has_head=True)
        return frozenset(name for name, _ in whole.named_parameters())

    def named_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Name each parameter, or the parts of it that this rank has, by names that show which values those are."""
        for name, parameter in self.named_parameters():
            split = self.splits.get(name)
            if split is None:
                yield name, parameter
            else:
                yield from ((str(part), values) for part, values in split.parts(name, parameter.detach()))

    def masks(self, step: int, micro_batch: int) -> Masks:
        """Return what the dropout masks of a training pass are drawn from; it is the same on any rank."""
        return Masks(self.seed, step, micro_batch)

    def note_loss(self, masks: Masks, loss: float) -> float:
        """Report the loss of a training pass if it is NaN or infinite, and the first one of its step; `masks` names both.

        Returns:
            The loss.
        """
        if not math.isfinite(loss) and masks.step != self._not_finite_in and self.report_not_finite is not None:
            self._not_finite_in = masks.step
            self.report_not_finite(masks.step, micro_batch=masks.micro_batch, loss=loss)
        return loss

    def ranges_of_blocks(self, blocks: range) -> tuple[range, range]:
        """Find the parameters of `blocks`; the first block includes the embedding, the last one the head.

        Returns:
            Their range in `named_parameters()` and their range in the flat vectors.
        """
        parameters = list(self.named_parameters())
        chosen = [place for place, (name, _) in enumerate(parameters) if _is_in(name, blocks, self.num_blocks)]
        starts = [parameter.storage_offset() for _, parameter in parameters]
        after = chosen[-1] + 1
        end = starts[after] if blocks.stop < self.num_blocks and after < len(starts) else len(self.weights_N)
        return range(chosen[0], after), range(starts[chosen[0]], end)

    def forward(
        self, x: Tensor, masks: Masks | None = None, *, blocks: range | None = None, layer: int | None = None
    ) -> Tensor:
        """Run the part of the model that this rank has, or one chunk of it.

        Args:
            x: Tokens, shape (B, T), int64, where the embedding comes first; else the activations of the part before,
                shape (B, T, D).
            masks: What to draw dropout masks from; None: no dropout, as in validation.
            blocks: Which of the blocks, with the embedding before the model's first one and the head behind its last
                one; None: all that this rank has.
            layer: The one layer of a whole model to run: 0 is the embedding, then come the blocks, then the head.

        Returns:
            Logits, shape (B, T, V), where the head comes last; else activations, shape (B, T, D).
        """
        with self._computing():
            if layer is not None and 0 < layer <= self.num_blocks:
                return self._run_block(self.blocks[str(layer - 1)], x, masks)
            if layer is not None:
                blocks = range(0) if layer == 0 else range(self.num_blocks, self.num_blocks)
            return self._run(x, masks, blocks)

    def _run(self, x: Tensor, masks: Masks | None, blocks: range | None) -> Tensor:
        if self.embedding is not None and (blocks is None or blocks.start == 0):
            x = self.embedding(x, masks).float()  # the residual stream is float32 in every precision
        for block in self.blocks.values() if blocks is None else [self.blocks[str(index)] for index in blocks]:
            x = self._run_block(block, x, masks)
        if self.head is None or (blocks is not None and blocks.stop < self.num_blocks):
            return x
        tied_VD = (
            self._shared_matrix_and_buffer[0]
            if self._shared_matrix_and_buffer is not None and not self.head_has_copy
            else None
        )
        logits_BTV: Tensor = self.head(x, tied_VD=tied_VD)
        return logits_BTV

    def _run_block(self, block: nn.Module, x_BTD: Tensor, masks: Masks | None) -> Tensor:
        def run(x_BTD: Tensor) -> Tensor:
            with self._computing():
                out_BTD: Tensor = block(x_BTD, masks)
            return out_BTD

        keeps_activations = not self._cfg.training_config.activation_checkpointing or not x_BTD.requires_grad
        return run(x_BTD) if keeps_activations else recomputed(run, x_BTD)

    def _computing(self) -> AbstractContextManager[object]:
        return computing(self._cfg.training_config, self.weights_N.device)


def place_of_second_use(model: Model) -> Tensor | None:
    """Find where a whole model gathers the gradient of a shared matrix's second use; None if it shares no matrix."""
    return list(model.parameters())[-1] if model.is_tied else None


def _is_in(name: str, blocks: range, num_blocks: int) -> bool:
    """Whether a parameter belongs to these blocks, or to what comes before the first block or behind the last."""
    kind, rest = name.split(".", 1)
    if kind == "blocks":
        return int(rest.split(".", 1)[0]) in blocks
    return blocks.start == 0 if kind == "embedding" else blocks.stop == num_blocks


_STDS = {EMBEDDING: 1.0, "embedding.position.weight": 0.1, HEAD: 0.02}


def initialise(name: str, parameter: Tensor, *, seed: int, num_blocks: int, is_tied: bool) -> None:
    """Set a parameter from (seed, name) alone, so that it does not matter which rank has it.

    Biases are 0, norms 1. The standard deviation is 1 for tokens and 0.1 for positions. It is 0.02 for the head, and
    for tokens that share its matrix, so that training begins at the loss of guessing. For other matrices it is
    1 / sqrt(inputs), and for those that add to the residual stream 1 / sqrt(2 num_blocks) of that, as in GPT-2.
    """
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name:
        parameter.fill_(1)
    else:
        std = _STDS.get(HEAD if is_tied and name == EMBEDDING else name, float(parameter[0].numel()) ** -0.5)
        if name.endswith("_out.weight"):
            std *= (2 * num_blocks) ** -0.5
        parameter.normal_(0, std, generator=seeded_generator("parameter", seed, name))


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computing(training: TrainingConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return a block that computes in `training_config.precision` on this device; fp32 leaves everything as it is.

    Weights, gradients, their sums and the optimizer's state are float32 in every precision; autocast gives matrix
    products and attention copies of their operands in bfloat16 or float16. The residual stream, which crosses from one
    pipeline stage to the next, is float32 too, and so are the logits' loss and its gradient. So a stage computes the
    bits that one process does, at the price of messages twice as long as they could be.

    Source: P. Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """
    dtype = _DTYPES.get(training.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
