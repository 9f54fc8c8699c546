"""Watches one rank through one step: its micro-batches, what each layer makes of them, gradients, and the state after the update.

Nothing that is computed changes: hooks only read. Shapes: N = values of any tensor.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ttlaunch.records.replay import FirstNotFinite, NamedTensor, PassTensor, ShownBatch, ShownRank, TensorFacts
from ttlaunch.runtime.model.flat import raw_bytes

_PARTS = 10
"""The parts of a histogram."""


class StepObserver:
    """Describes what a rank has in a step, while `is_active`.

    Attributes:
        is_active: Whether the rank is in the step.
        is_complete: Whether it has come to its end.
        model, optimizer: What the rank trains; None until the recipe restores them.
        batches: The inputs and targets of each micro-batch, by its index.
    """

    def __init__(self) -> None:
        self.is_active = self.is_complete = False
        self.model: Any = None
        self.optimizer: Any = None
        self.batches: dict[int, tuple[Tensor, Tensor]] = {}
        self._models: list[nn.Module] = []
        self._tensors: dict[str, TensorFacts] = {}
        self._gradients: dict[str, TensorFacts] = {}
        self._activations: dict[tuple[int, int], PassTensor] = {}
        self._micro_gradients: dict[tuple[int, int], PassTensor] = {}
        self._forward: int | None = None  # the micro-batch of the pass that runs
        self._backward: int | None = None
        self._passes = 0
        self._not_finite: dict[int, FirstNotFinite] = {}  # by micro-batch

    def watch(self, model: nn.Module) -> None:
        """Describe what a model's layers and passes make, in the step."""
        self._models.append(model)
        model.register_forward_pre_hook(self._begin_forward)
        model.register_forward_hook(self._end_forward)
        for place, (name, layer) in enumerate(_layers(model)):
            layer.register_forward_hook(partial(self._note_activation, place, name))
            layer.register_forward_hook(partial(self._watch_inputs, name))

    def begin(self) -> None:
        """Begin the step: gradients of parameters are watched from here on, which earlier steps need not pay for."""
        self.is_active = True
        for model in self._models:
            for place, (name, parameter) in enumerate(model.named_parameters()):
                if parameter.requires_grad:
                    parameter.register_hook(partial(self._note_micro_gradient, place, name))

    def note_batch(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        """Keep a micro-batch that the rank reads in the step."""
        self.batches[index] = inputs, targets

    @torch.no_grad()
    def note_gradients(self) -> None:
        """Describe the gradients that an update is about to use; an update in several parts calls this before each."""
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and (name not in self._gradients or bool(parameter.grad.any())):
                    self._gradients[name] = describe(parameter.grad)

    def note_state(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Describe parameters and state after the step."""
        self.is_complete = True
        self._tensors |= {name: describe(tensor) for name, tensor in named_tensors}

    def end(self) -> None:
        """Leave the step."""
        self.is_active = False

    def state(self, *, rank: int, role: str, texts: Any) -> ShownRank:
        """Return what was seen; `texts` makes the texts of a micro-batch from its inputs and targets."""
        return ShownRank(
            rank=rank,
            role=role,
            is_complete=self.is_complete,
            batches=tuple(
                ShownBatch(
                    index=index,
                    inputs_sha256=sha256(inputs),
                    targets_sha256=sha256(targets),
                    shape=tuple(inputs.shape),
                    texts=tuple(texts(inputs, targets)),
                )
                for index, (inputs, targets) in sorted(self.batches.items())
            ),
            activations=_in_order(self._activations),
            micro_gradients=_in_order(self._micro_gradients),
            gradients=tuple(NamedTensor(name=name, facts=facts) for name, facts in self._gradients.items()),
            tensors=tuple(NamedTensor(name=name, facts=facts) for name, facts in self._tensors.items()),
            not_finite=self._not_finite[min(self._not_finite)] if self._not_finite else None,
        )

    def _begin_forward(self, _model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self.is_active or not torch.is_grad_enabled():
            return  # a validation
        named = [one.micro_batch for one in inputs if hasattr(one, "micro_batch")]  # what dropout masks are drawn from
        self._forward = named[0] if named else self._passes
        self._passes += 1

    def _end_forward(self, _model: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        micro_batch, self._forward = self._forward, None
        if micro_batch is not None and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._begin_backward, micro_batch))

    def _begin_backward(self, micro_batch: int, gradient: Tensor) -> None:
        self._backward = micro_batch
        self._check_gradient(micro_batch, "loss", gradient)

    def _check_gradient(self, micro_batch: int | None, layer: str, gradient: Tensor) -> None:
        """Note a layer whose backward pass has made a gradient that is not finite: that of its input, or of a parameter."""
        if self.is_active and micro_batch is not None and micro_batch not in self._not_finite:
            self._check(micro_batch, layer, describe(gradient), is_backward=True)

    def _check(self, micro_batch: int, layer: str, facts: TensorFacts, *, is_backward: bool) -> None:
        if facts.nans or facts.infs:
            found = FirstNotFinite(
                micro_batch=micro_batch, layer=layer, is_backward=is_backward, nans=facts.nans, infs=facts.infs
            )
            self._not_finite.setdefault(micro_batch, found)  # passes run in order

    def _note_activation(self, place: int, name: str, _layer: nn.Module, _inputs: Any, output: Any) -> None:
        # A layer that computes its activations again in the backward pass makes the same ones: `_forward` is None then.
        if self._forward is None or not isinstance(output, Tensor):
            return
        key = self._forward, place
        if key not in self._activations:
            facts = describe(output)
            self._activations[key] = PassTensor(micro_batch=self._forward, name=name, facts=facts)
            self._check(self._forward, name, facts, is_backward=False)

    def _watch_inputs(self, name: str, _layer: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        """Check the gradient of a layer's input, which its backward pass makes."""
        micro_batch = self._forward
        for one in inputs if micro_batch is not None else ():
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(partial(self._check_gradient, micro_batch, name))

    def _note_micro_gradient(self, place: int, name: str, gradient: Tensor) -> None:
        if self.is_active and self._backward is not None:
            facts = describe(gradient)
            known = PassTensor(micro_batch=self._backward, name=name, facts=facts)
            self._micro_gradients[self._backward, place] = known
            self._check(self._backward, _layer_of(name), facts, is_backward=True)


def _in_order(known: dict[tuple[int, int], PassTensor]) -> tuple[PassTensor, ...]:
    return tuple(known[key] for key in sorted(known))


def _layer_of(parameter: str) -> str:
    """Return the name that `_layers` gives to the layer of a parameter, such as `blocks.1` of `blocks.1.norm.weight`."""
    first, second, *_ = f"{parameter}.".split(".")
    return f"{first}.{second}" if second.isdecimal() else first


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model in the order in which a forward pass runs them; each block of a list is one."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from ((f"{name}.{part}", layer) for part, layer in child.named_children())
        else:
            yield name, child


@torch.no_grad()
def describe(tensor: Tensor) -> TensorFacts:
    """Describe a tensor of any shape and dtype, on any device.

    Cost: some passes over a copy in host memory, in which floating-point values are float64 for the norm.
    """
    values_N = tensor.detach().cpu().reshape(-1).to(torch.float32)
    finite_N = values_N[values_N.isfinite()]
    has_some = finite_N.numel() > 0
    lowest, highest = (float(finite_N.min()), float(finite_N.max())) if has_some else (0.0, 0.0)
    counts = torch.histc(finite_N, _PARTS, lowest, highest) if has_some and lowest < highest else None
    return TensorFacts(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        sha256=sha256(tensor),
        norm=float(torch.linalg.vector_norm(finite_N, dtype=torch.float64)) if has_some else 0.0,
        lowest=lowest,
        highest=highest,
        nans=int(values_N.isnan().sum()),
        infs=int(values_N.isinf().sum()),
        histogram=tuple(int(count) for count in counts.tolist()) if counts is not None else (finite_N.numel(),),
    )


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()
