"""Tells a rank's books when it runs a forward pass, a backward pass or an update, so that recipes need not.

What is sent from within a backward pass, by hooks of its gradients, is so attributed to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ttlaunch.runtime.telemetry.ledger import BACKWARD, FORWARD, Ledger


def watch_passes(model: nn.Module, ledger: Ledger) -> None:
    """Enter and leave the phases of every pass with gradients that the model makes.

    A backward pass begins when the gradient of the model's output is known and ends with the whole of autograd's work.
    Values and gradients are not touched.
    """
    model.register_forward_pre_hook(partial(_begin_forward, ledger))
    model.register_forward_hook(partial(_end_forward, ledger))


@contextmanager
def phase(holder: object, name: str) -> Iterator[None]:
    """Do a block in a phase; a holder without a ledger, such as a model that nobody watches, is left alone."""
    ledger: Ledger | None = getattr(holder, "ledger", None)
    if ledger is None:
        yield
        return
    ledger.enter(name)
    try:
        yield
    finally:
        ledger.leave()


def _begin_forward(ledger: Ledger, _model: nn.Module, inputs: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        ledger.enter(FORWARD, micro_batch=_micro_batch(inputs))


def _end_forward(ledger: Ledger, _model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    ledger.leave()
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(partial(_begin_backward, ledger, _micro_batch(inputs)))


def _begin_backward(ledger: Ledger, micro_batch: int | None, _gradient: Tensor) -> None:
    ledger.enter(BACKWARD, micro_batch=micro_batch)
    engine: Any = Variable._execution_engine  # noqa: SLF001  as torch's own FSDP does
    engine.queue_callback(ledger.leave)


def _micro_batch(inputs: tuple[Any, ...]) -> int | None:
    """Which one a pass is of, from the masks that it draws dropout from."""
    found = [one.micro_batch for one in inputs if hasattr(one, "micro_batch")]
    return found[0] if found else None
