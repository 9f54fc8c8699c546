"""Hands out the data of steps to workers that do not wait for each other, in order and each step exactly once."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ttlaunch.runtime.training.optimizers import Optimizer

_OPEN = "open_steps"


class TaskList:
    """The steps of a run whose data is handed out to workers; a step is open until its gradient has been applied.

    Gradients are applied in the order in which they arrive, so after n updates the data used need not be that of steps 1
    to n. Checkpoints therefore contain the open steps, and a resumed run hands these out first.
    """

    def __init__(self, *, done: int, last: int) -> None:
        """Begin after the first `done` steps; `last` is the number of the last step."""
        self._done, self._next, self._last = done, done + 1, last
        self._again: deque[int] = deque()
        self._open: set[int] = set()

    def hand_out(self) -> int:
        """Return the next step that no worker has; 0 if none is left."""
        if self._again:
            step = self._again.popleft()
        elif self._next <= self._last:
            step = self._next
            self._next += 1
        else:
            return 0
        self._open.add(step)
        return step

    def close(self, step: int) -> None:
        """Note that the gradient of a step's data has been applied."""
        self._open.remove(step)

    @property
    def has_more(self) -> bool:
        """Whether there is a step that no worker has."""
        return bool(self._again) or self._next <= self._last

    def take_back(self, steps: Iterable[int]) -> None:
        """Hand out steps again that a worker had, before all others."""
        self._open -= set(steps)
        self._again = deque(sorted({*self._again, *steps}))

    def open_steps(self) -> list[int]:
        """Return the steps that this run or the one before has handed out and whose gradients have not been applied."""
        return sorted(self._open | set(self._again))

    def reopen(self, steps: list[int]) -> None:
        """Continue from a checkpoint with these open steps; call before the first `hand_out`."""
        self._again = deque(steps)
        self._next = self._done + len(steps) + 1


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
