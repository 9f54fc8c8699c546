"""An optimizer's state with the tasks that are open, for the checkpoints of a server that hands out tasks (`membership/tasks.py`)."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ttlaunch.membership.tasks import TaskList
from ttlaunch.runtime.training.optimizers import Optimizer

_OPEN = "open_steps"


class TaskedState:
    """An optimizer's state and the open steps, for checkpoints."""

    def __init__(self, optimizer: Optimizer, tasks: TaskList) -> None:
        self._optimizer = optimizer
        self._tasks = tasks

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        return self._optimizer.named_state()

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        self._optimizer.wait_before_update(ready)

    def scaler_state(self) -> Mapping[str, Any] | None:
        """Return the open steps, which take the place of the loss scaler's state: stale gradients are never scaled."""
        return {_OPEN: self._tasks.open_steps()}

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        self._tasks.reopen(list((state or {}).get(_OPEN, ())))
