"""Which worker has which tasks: a server hands them out in order, each step's data once, and again where a worker is gone."""

from collections import deque
from collections.abc import Collection, Iterable


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


class TasksInHand:
    """What the server of an elastic run knows of the tasks of its workers, by the numbers that they have for life.

    The server knows which tasks each worker has. Those that a worker does not name after a change are in an answer that was lost, and
    those of a worker that is gone are lost with it: both are handed out again. No gradient of a task that is closed is applied, so
    every task is applied exactly once, whatever is pushed twice.

    Attributes:
        handed_out_again: How many tasks were taken from workers that are gone.
        is_ending: Whether no step is left, so that nobody gets a task or waits for one any more.
    """

    def __init__(self, tasks: TaskList) -> None:
        """Know no worker."""
        self.handed_out_again, self.is_ending = 0, False
        self._tasks = tasks
        self._of: dict[int, set[int]] = {}

    @property
    def has_more(self) -> bool:
        """Whether a worker that waits for a task need not wait any more."""
        return self.is_ending or self._tasks.has_more

    def has_some(self, number: int) -> bool:
        """Whether a worker has tasks, whose gradients are still to come."""
        return bool(self._of[number])

    def is_awaited(self, number: int, task: int) -> bool:
        """Whether the gradient of this task is to be applied if this worker brings it."""
        return task in self._of[number]

    def begin_epoch(self, numbers: Collection[int]) -> None:
        """Take back the tasks of workers that are gone; those that stay have theirs, and who comes has none."""
        for number in self._of.keys() - set(numbers):
            self.handed_out_again += len(self._of[number])
            self._tasks.take_back(self._of[number])
        self._of = {number: self._of.get(number, set()) for number in numbers}

    def meet(self, number: int, *, wanted: int, pushed: int, others: Collection[int]) -> tuple[bool, int]:
        """Bring a worker's tasks in line with what it says at the begin of an epoch.

        Args:
            number: The worker.
            wanted: How many tasks it wants to have at a time.
            pushed: The task whose gradient it has sent and got no answer to; 0 if there is none.
            others: The tasks that it still computes, and zeros.

        Returns:
            Whether it has to send that gradient again, and how many tasks it gets at once: 0 if its next gradient comes first.

        Raises:
            ValueError: It names tasks that it cannot have.
        """
        has, held = self._of[number], {pushed, *others} - {0}
        if not held - {pushed} <= has:
            raise ValueError(f"worker {number} says that it has the tasks {sorted(held)}, and got {sorted(has)}")
        self._tasks.take_back(has - held)
        self._of[number] = has & held
        is_open = pushed in has
        if is_open or (any(others) and not pushed):
            return is_open, 0
        return is_open, 1 if pushed else wanted

    def hand_out(self, number: int, *, count: int = 1) -> list[int] | None:
        """Return the next tasks for a worker, 0 in place of each that is not there; None if it has no task and waits for one."""
        found = [0 if self.is_ending else self._tasks.hand_out() for _ in range(count)]
        if not any(found) and not self._of[number] and not self.is_ending:
            return None
        self._of[number].update(task for task in found if task)
        return found

    def close(self, number: int, task: int) -> None:
        """Note that the gradient of a task has been applied."""
        self._tasks.close(task)
        self._of[number].discard(task)

    def drop(self, number: int, task: int) -> None:
        """Note that the gradient of a task has come and is not needed any more."""
        self._of[number].discard(task)
