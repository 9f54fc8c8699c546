"""Hands the data of steps out to workers that do not wait for each other: in order, and each step exactly once."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ttlaunch.runtime.training.optimizers import Optimizer

_OPEN = "open_steps"


class TaskList:
    """The data of every step of a run, to be handed out.

    The gradient of a step's data is applied when it comes, so after n updates other data may have been used than that
    of steps 1 to n. What was handed out and not used yet is in checkpoints, and is handed out first by a run that goes
    on.
    """

    def __init__(self, *, done: int, last: int) -> None:
        """Begin behind the first `done` steps; `last` is the last one there is."""
        self._done, self._next, self._last = done, done + 1, last
        self._again: deque[int] = deque()
        self._open: set[int] = set()

    def hand_out(self) -> int:
        """The next step whose data nobody has; 0 if there is none left."""
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
        """The gradient of a step's data has been applied."""
        self._open.remove(step)

    def open_steps(self) -> list[int]:
        """Handed out by this run or the one before, and not applied."""
        return sorted(self._open | set(self._again))

    def reopen(self, steps: list[int]) -> None:
        """Go on from a checkpoint with these open; before anything is handed out."""
        self._again = deque(steps)
        self._next = self._done + len(steps) + 1


class TaskedState:
    """An optimizer's state and what is open, for checkpoints."""

    def __init__(self, optimizer: Optimizer, tasks: TaskList) -> None:
        self._optimizer = optimizer
        self._tasks = tasks

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        return self._optimizer.named_state()

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        self._optimizer.wait_before_update(ready)

    def scaler_state(self) -> Mapping[str, Any] | None:
        """What is kept as JSON; nothing is scaled where gradients may be stale."""
        return {_OPEN: self._tasks.open_steps()}

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        self._tasks.reopen(list((state or {}).get(_OPEN, ())))
