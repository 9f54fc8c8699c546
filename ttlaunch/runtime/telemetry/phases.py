"""Records in the traffic counter when a rank runs a forward pass, a backward pass or an update.

So messages that gradient hooks send during a backward pass are attributed to this pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ttlaunch.runtime.telemetry.traffic_counter import BACKWARD, FORWARD, TrafficCounter


def watch_passes(model: nn.Module, traffic: TrafficCounter) -> None:
    """Enter and leave the phases of every pass with gradients that the model makes.

    A backward pass begins when the gradient of the model's output is known and ends with the whole of autograd's work.
    Values and gradients are not touched.
    """
    model.register_forward_pre_hook(partial(_begin_forward, traffic))
    model.register_forward_hook(partial(_end_forward, traffic))


@contextmanager
def phase(holder: object, name: str) -> Iterator[None]:
    """Run a block in a phase; does nothing for a holder without a traffic counter, such as a model that is not watched."""
    traffic: TrafficCounter | None = getattr(holder, "traffic", None)
    if traffic is None:
        yield
        return
    traffic.enter(name)
    try:
        yield
    finally:
        traffic.leave()


def _begin_forward(traffic: TrafficCounter, _model: nn.Module, inputs: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        traffic.enter(FORWARD, micro_batch=_micro_batch(inputs))


def _end_forward(traffic: TrafficCounter, _model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    traffic.leave()
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(partial(_begin_backward, traffic, _micro_batch(inputs)))


def _begin_backward(traffic: TrafficCounter, micro_batch: int | None, _gradient: Tensor) -> None:
    traffic.enter(BACKWARD, micro_batch=micro_batch)
    engine: Any = Variable._execution_engine  # noqa: SLF001  as torch's own FSDP does
    engine.queue_callback(traffic.leave)


def _micro_batch(inputs: tuple[Any, ...]) -> int | None:
    """Return the micro-batch of a pass, from the masks from which it draws dropout."""
    found = [one.micro_batch for one in inputs if hasattr(one, "micro_batch")]
    return found[0] if found else None
