"""Update rules, the learning rate's schedule and clipping; all of them give the same bits however ranks share the work.

The kernels are torch's fused ones through its functional interface: the classes of `torch.optim` import the compiler
on first use, which costs each rank two seconds.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ttlaunch.runtime.model.loss_scaling import LossScaler
from ttlaunch.runtime.telemetry.memory import GRADIENTS, OPTIMIZER, PARAMETERS
from ttlaunch.runtime.telemetry.phases import phase
from ttlaunch.runtime.telemetry.traffic_counter import UPDATE, register_owner
from ttlaunch.runtime.training.norms import Part, SquaredNorms, join_sums
from ttlaunch.spec.recipe.sections import TrainingFile


def learning_rate(cfg: TrainingFile, step: int, *, total_steps: int) -> float:
    """The learning rate of `step`, 1 to `total_steps`.

    The warm-up rises to the peak at step `warmup_steps`, and the rate stays there for `hold_steps` more; linear and
    cosine then fall to `min_learning_rate_ratio` of it at the last step.
    """
    schedule, peak = cfg.scheduler_config, cfg.training_config.learning_rate
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    falls_after = schedule.warmup_steps + schedule.hold_steps
    if schedule.type == "constant" or step <= falls_after:
        return peak
    done = (step - falls_after) / (total_steps - falls_after)
    shape = 1 - done if schedule.type == "linear" else (1 + math.cos(math.pi * done)) / 2
    lowest = schedule.min_learning_rate_ratio
    return peak * (lowest + (1 - lowest) * shape)


def global_norm(squared_norms: Sequence[float]) -> float:
    """The Euclidean norm over parameters, from the square of each one's, in the order in which the model names them.

    The squares are added as one fixed binary tree, so the norm has the same bits however parameters are dealt to ranks.
    """
    level = list(squared_norms)
    while len(level) > 1:
        level = [sum(level[at : at + 2]) for at in range(0, len(level), 2)]
    return math.sqrt(level[0]) if level else 0.0


class NotFiniteError(ArithmeticError):
    """The gradient of a step has NaN or infinite values, and `training_config.on_not_finite` says that training stops then."""


class Updated(Protocol):
    """The part of a model that an optimizer uses: parameters, and their gradients in one flat vector."""

    grads_N: Tensor
    loss_scaler: LossScaler

    @property
    def copies(self) -> frozenset[str]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def take_gradients(self) -> Tensor: ...

    def add_head_gradient(self) -> None: ...


class Optimizer:
    """AdamW, or SGD with momentum, over all parameters of a model; weight decay is decoupled and only on matrices.

    Source: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    def __init__(self, model: Updated, cfg: TrainingFile, *, total_steps: int) -> None:
        self._cfg = cfg
        self._total_steps = total_steps
        self._model = model
        self._ready: Callable[[], object] | None = None
        self._parts: dict[range, list[_Group]] = {}
        self._skips = False
        self.squares: dict[
            str, float
        ] = {}  # norms of gradients by name; a technique that splits matrices completes them
        self._norms: dict[range | None, SquaredNorms] = {}
        named, has_squares = list(model.named_parameters()), cfg.training_config.optimizer == "adamw"
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        matrices = {name: parameter for name, parameter in named if _is_matrix(parameter)}
        others = {name: parameter for name, parameter in named if not _is_matrix(parameter)}
        self._groups = [
            _Group(matrices, cfg.training_config.weight_decay, has_squares=has_squares),
            _Group(others, 0.0, has_squares=has_squares),
        ]
        register_owner(model, self, Optimizer.held_tensors)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """What the update rule keeps of each parameter: `mean.NAME`, and for AdamW `square.NAME` and `step.NAME`.

        The tensors themselves: writing to them restores a state.
        """
        for group in self._groups:
            for kind, tensors in (("mean", group.means), ("square", group.squares), ("step", group.steps)):
                yield from ((f"{kind}.{name}", tensor) for name, tensor in zip(group.names, tensors, strict=False))

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that it updates, their gradients, and its state, each with its kind; see `telemetry/memory.py`."""
        yield from ((PARAMETERS, parameter) for parameter in self._parameters)
        yield from ((GRADIENTS, one.grad) for one in self._parameters if one.grad is not None)
        yield from ((OPTIMIZER, tensor) for _, tensor in self.named_state())

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        """Let the next update begin only when `ready()` has returned, because a copy for a checkpoint still reads what it changes."""
        self._ready = ready

    def finish_copy(self) -> None:
        """Wait for the copy for a checkpoint, if one is being made: its tensors may then change in another way than by an update."""
        if self._ready is not None:
            self._ready()
            self._ready = None

    def squared_norms(self, parameters: range | None = None) -> list[float]:
        """The squared norm of each parameter's gradient, the loss scale divided out, in the order of the model's names.

        Args:
            parameters: Places of those that count; None: all.
        """
        part = slice(None) if parameters is None else slice(parameters.start, parameters.stop)
        if parameters is None or 0 in parameters:  # the embedding's, which gradients reach last
            self._model.add_head_gradient()
        if parameters not in self._norms:
            chosen = self._parameters[part]
            starts = [parameter.storage_offset() for parameter in chosen]
            values = [range(at, at + parameter.numel()) for at, parameter in zip(starts, chosen, strict=True)]
            self._norms[parameters] = SquaredNorms([Part(at, 0, one) for at, one in enumerate(values)])
        norms = self._norms[parameters]
        sums = join_sums(zip(norms.nodes, norms.sums(self._model.take_gradients()), strict=True))
        squares = [square / self._model.loss_scaler.scale**2 for square in sums.values()]
        self.squares.update(zip(self._names[part], squares, strict=True))
        return squares

    def layer_norms(self) -> dict[str, float]:
        """The norm of the gradient of each layer that this rank updates, from the `squared_norms` of the step.

        The squares of all layers' norms add up to that of the whole gradient, up to rounding.
        """
        names = [name for name in self._names if name not in self._model.copies]
        return norms_of_layers({name: self.squares[name] for name in names})

    def step(self, step: int, *, norm: float, rate_factor: float = 1.0) -> float:
        """Clip the gradients in `grads_N`, update the parameters, and zero the gradients.

        With fp16 the update is skipped if a gradient has overflowed; see `loss_scaling`. Otherwise `on_not_finite` decides.

        Args:
            step: The step, from 1.
            norm: `global_norm` of the gradients of the whole model, which may be more than this rank has.
            rate_factor: A factor of the schedule's learning rate, for gradients that count less than others.

        Returns:
            The learning rate used.
        """
        self.clip(self._model.grads_N, norm=norm)
        rate = self.update(step, rate_factor=rate_factor)
        self.end_step()
        self._model.grads_N.zero_()
        return rate

    @torch.no_grad()
    def clip(self, grads_N: Tensor, *, norm: float) -> None:
        """Divide gradients, or a part of them, by the loss scale, and clip them to the configured norm.

        Args:
            grads_N: Gradients of the step; each value may be passed only once.
            norm: The norm of the whole gradient, without the loss scale. If it is not finite with fp16, the step is
                skipped.

        Raises:
            NotFiniteError: The norm is not finite, and training stops then. It is the same on all ranks that update, so all of
                them raise in the same step, without a message and before anything has changed.
        """
        training, scaler = self._cfg.training_config, self._model.loss_scaler
        self.check(norm)
        self._skips = scaler.skips and not math.isfinite(norm)
        factor = 1 / scaler.scale
        if training.use_clip_grad_norm and norm > training.clip_grad_norm_max_norm:
            factor *= training.clip_grad_norm_max_norm / norm
        if factor != 1 and not self._skips:
            grads_N.mul_(factor)

    def check(self, norm: float) -> None:
        """Raise if the norm of a step's gradient is not finite and training stops then.

        Raises:
            NotFiniteError: It is so.
        """
        if (
            not math.isfinite(norm)
            and self._cfg.training_config.on_not_finite == "stop"
            and not self._model.loss_scaler.skips
        ):
            raise NotFiniteError(f"the norm of the gradient is {norm}")

    @torch.no_grad()
    def update(self, step: int, parameters: range | None = None, *, rate_factor: float = 1.0) -> float:
        """Update parameters from their gradients; each of them once in a step.

        Args:
            step: The step, from 1.
            parameters: Places of those to update; None: all.

        Returns:
            The learning rate used.
        """
        rate = rate_factor * learning_rate(self._cfg, step, total_steps=self._total_steps)
        if self._skips:
            return rate
        self.finish_copy()
        update = _adamw if self._cfg.training_config.optimizer == "adamw" else _sgd
        with phase(self._model, UPDATE):
            for group in self._groups if parameters is None else self._part(parameters):
                if group.parameters:
                    update(group, self._cfg, rate)
        return rate

    def end_step(self) -> None:
        """Choose the next step's loss scale; call once in a step, after all its updates."""
        self._model.loss_scaler.update(overflowed=self._skips)

    def scaler_state(self) -> dict[str, Any] | None:
        """What the loss scale goes on from; None without fp16."""
        return self._model.loss_scaler.state()

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a `scaler_state()`."""
        self._model.loss_scaler.restore(state)

    def _part(self, parameters: range) -> "list[_Group]":
        """The groups, cut down to some parameters; the tensors are the same."""
        if parameters not in self._parts:
            chosen = {id(parameter) for parameter in self._parameters[parameters.start : parameters.stop]}
            self._parts[parameters] = [group.part(chosen) for group in self._groups]
        return self._parts[parameters]


def build_optimizer(cfg: TrainingFile, model: Updated, *, total_steps: int) -> Optimizer:
    """The optimizer of `cfg` over the model's parameters; its state lives on this rank and nowhere else."""
    return Optimizer(model, cfg, total_steps=total_steps)


def norms_of_layers(squares: Mapping[str, float]) -> dict[str, float]:
    """The norm of each layer's gradient, from the squared norms of its parameters' by name."""
    found: dict[str, list[float]] = {}
    for name, square in squares.items():
        found.setdefault(layer_of(name), []).append(square)
    return {layer: global_norm(squares) for layer, squares in found.items()}


def layer_of(name: str) -> str:
    """The layer of a parameter: `embedding`, `blocks.3` or `head`."""
    kind, *rest = name.split(".")
    return f"{kind}.{rest[0]}" if kind == "blocks" else kind


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() > 1


class _Group:
    """Parameters that share a weight decay, and the state of their update rule."""

    def __init__(self, named_parameters: Mapping[str, Tensor], weight_decay: float, *, has_squares: bool) -> None:
        self.names = list(named_parameters)
        self.parameters = list(named_parameters.values())
        self.weight_decay = weight_decay
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        counted = self.parameters if has_squares else []
        self.squares = [torch.zeros_like(parameter) for parameter in counted]
        self.steps = [torch.zeros((), device=parameter.device) for parameter in counted]

    def part(self, chosen: set[int]) -> "_Group":
        """The same state, but only of the parameters with these identities."""
        places = [at for at, parameter in enumerate(self.parameters) if id(parameter) in chosen]
        part = _Group({}, self.weight_decay, has_squares=bool(self.squares))
        part.names = [self.names[at] for at in places]
        part.parameters = [self.parameters[at] for at in places]
        part.means = [self.means[at] for at in places]
        part.squares = [self.squares[at] for at in places if self.squares]
        part.steps = [self.steps[at] for at in places if self.steps]
        return part

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def _adamw(group: _Group, cfg: TrainingFile, rate: float) -> None:
    training = cfg.training_config
    adamw(
        group.parameters,
        group.gradients,
        group.means,
        group.squares,
        [],
        group.steps,
        fused=True,
        amsgrad=False,
        beta1=training.beta1,
        beta2=training.beta2,
        lr=rate,
        weight_decay=group.weight_decay,
        eps=training.epsilon,
        maximize=False,
    )


def _sgd(group: _Group, cfg: TrainingFile, rate: float) -> None:
    for parameter in group.parameters:
        parameter.mul_(1 - rate * group.weight_decay)
    sgd(
        group.parameters,
        group.gradients,
        list(group.means),
        fused=True,
        weight_decay=0.0,
        momentum=cfg.training_config.beta1,
        lr=rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
