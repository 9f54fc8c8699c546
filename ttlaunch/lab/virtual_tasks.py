"""Tasks of an elastic run on a virtual clock: a server hands them out, and makes an update when a gradient comes.

    worker 1   task 7: its micro-batches | push | task 9: its first one | takes the answer (task 12, weights) | the next ones ...
    a change   all stop after the micro-batch that they compute | each says what it has, and goes on with it

Which worker has which task is decided by the code of a run's server (`membership/tasks.py`), and a worker does the same as in
`runtime/parallel/servers/elastic_tasks_client.py`. Nothing is computed again but the tasks of workers that are gone. What is under
way when the members change is lost: a gradient is sent again, an answer is given again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ttlaunch.lab.virtual_members import VirtualMembers
from ttlaunch.lab.virtual_passes import Passes
from ttlaunch.membership import worker
from ttlaunch.membership.messages import Begin
from ttlaunch.membership.tasks import TaskList, TasksInHand

_SERVER = 0
_ROUNDING = 1e-6  # of a micro-batch: a wait that is shorter is none


@dataclass
class _Worker:
    """How far a worker is.

    Attributes:
        tasks: Those that it has and has not begun.
        task: The one that it computes; 0 if there is none.
        done: How many micro-batches of it are done.
        pushed: The task whose gradient it has sent and got no answer to; 0 if there is none.
        awaits: Whether it has to take an answer of the server, which the first one is, too.
        answer: The tasks in the answer that is there and that it has not taken yet.
        has_met: Whether the server has heard in this epoch what this worker has.
        has_weights: Whether it has ever got weights.
    """

    tasks: deque[int] = field(default_factory=deque)
    task: int = 0
    done: int = 0
    pushed: int = 0
    awaits: bool = True
    answer: Sequence[int] | None = None
    has_met: bool = False
    has_weights: bool = False


class TasksHandedOut:
    """The tasks of workers that wait for nobody but the server, which is number 0 and has the first place in every epoch."""

    def __init__(self, members: VirtualMembers, *, most_in_hand: int) -> None:
        """Wait for the first epoch.

        Args:
            members: Who takes part.
            most_in_hand: How many tasks a worker has at a time. With more than one it begins the next one before the answer to its
                last gradient is there, and takes that after the first micro-batch.
        """
        self._members, self._costs = members, members.costs
        self._micro_batches, self._most_in_hand = members.limits.micro_batches, most_in_hand
        self._last_step = members.total_steps
        self._tasks = TasksInHand(TaskList(done=0, last=members.total_steps))
        self._passes = Passes(members)
        self._workers: dict[int, _Worker] = {}
        self._parked: list[int] = []  # those that wait for a task, in the order in which they began to
        self._dismissed: set[int] = set()  # those that have heard in this epoch that no step is left
        self._ways_s: dict[int, float] = {}  # by number: how long a gradient travels, and as long an answer
        self._weights_s: dict[int, float] = {}  # by number: how long the first weights travel, of those that have none

    def applied_at_start(self, number: int) -> int | None:
        """The server has the weights, and workers get them from it."""
        return 0 if number == _SERVER else None

    def usual_s(self, number: int) -> float | None:
        """Workers report micro-batches, and the server steps of the run."""
        return None if number == _SERVER else self._costs.leaf_s(number)

    def follow(self, number: int, members: Sequence[int]) -> None:
        """Nobody gets weights before it takes part, so no coordinator orders it."""
        raise AssertionError(f"worker {number} was ordered to follow {members}")

    def begin(self, begin: Begin, at_s: float) -> None:
        """Let the server take back the tasks of workers that are gone, and each worker say what it has."""
        processes, numbers = self._members.processes, [one for one in begin.numbers if one != _SERVER]
        before = self._tasks.handed_out_again
        self._tasks.begin_epoch(numbers)
        self._members.epochs[-1].tasks_again = self._tasks.handed_out_again - before
        self._parked, self._dismissed, self._ways_s = [], set(), {}
        self._workers = {number: self._workers.get(number, _Worker()) for number in numbers}
        for number, one in self._workers.items():
            one.has_met, one.answer = False, None
            one.awaits = one.awaits or processes[number].state.is_done  # who has ended hears of the end in each epoch
        lacking = [number for number, one in self._workers.items() if not one.has_weights]
        sizes = {_SERVER: float(self._costs.mean_bytes)}
        self._weights_s = dict(self._costs.transfers_s(dict.fromkeys(lacking, sizes)))
        for number in filter(self._members.hears, begin.numbers):  # one that is cut off never hears of the epoch
            processes[number].state = worker.begin(processes[number].state, begin)
        self._members.act_at(at_s, _SERVER, self._end_if_all_know)
        for number in numbers:
            self._members.act_at(at_s, number, partial(self._greet, number))

    def stop(self, number: int) -> float:
        """Let a worker stop after the micro-batch that it computes, and the server at once."""
        stopped_s, has_done_more = self._passes.stop(number)
        if number in self._workers:
            self._workers[number].has_met = False
            self._workers[number].done += has_done_more
        return stopped_s

    def go_on(self, number: int, since_s: float) -> None:
        """Let a worker compute the rest of its micro-batch."""
        self._passes.go_on(number, since_s)
        if number in self._workers:
            self._proceed(number)

    def _after(self, time_s: float, number: int, deed: Callable[[], None]) -> None:
        self._members.act_at(self._members.now + time_s, number, deed)

    def _way_s(self, number: int) -> float:
        """Return how long a gradient of a worker travels until it is applied, and the answer to it as well.

        A simulation of workers that stay has the time of a task. What of it is no computing is a wait for an answer, which has taken
        that long, after the first micro-batch of the next task if there is one. Without a wait the network alone says how long.
        """
        if number not in self._ways_s:
            numbers = self._members.epochs[-1].members
            leaf_s, size = self._costs.leaf_s(number), float(self._costs.mean_bytes)
            waited_s = self._costs.task_s(number, numbers) - self._micro_batches * leaf_s
            if self._most_in_hand == 1:
                both_s = max(0.0, waited_s)
            elif waited_s > _ROUNDING * leaf_s:
                both_s = leaf_s + waited_s
            else:
                there = self._costs.transfers_s({_SERVER: {number: size}})[_SERVER]
                back = self._costs.transfers_s({number: {_SERVER: size}})[number]
                both_s = min(leaf_s, there + back)
            self._ways_s[number] = both_s / 2
        return self._ways_s[number]

    def _latency_s(self, number: int) -> float:
        return self._costs.transfers_s({number: {_SERVER: 0.0}})[number]

    # What workers do

    def _greet(self, number: int) -> None:
        """Say what a worker has, and do nothing more until the server has heard it."""
        self._after(self._latency_s(number), _SERVER, lambda: self._meet(number))

    def _hear(self, number: int, *, is_open: bool) -> None:
        self._workers[number].has_met = True
        if is_open:
            self._send(number)
        self._proceed(number)

    def _proceed(self, number: int) -> None:
        """Let a worker do what comes next, as long as it takes no time."""
        one, process = self._workers[number], self._members.processes[number]
        while one.has_met and process.acts and not (process.state.has_ended or self._passes.is_computing(number)):
            has_some = one.task or one.tasks
            if one.awaits and (not has_some or (one.task and one.done == 1)):
                if one.answer is None:
                    return
                one.tasks.extend(task for task in one.answer if task)
                one.awaits, one.answer, one.pushed = False, None, 0
            elif not has_some:
                self._members.end_run(number)
            elif not one.task:
                one.task, one.done = one.tasks.popleft(), 0
            elif one.done < self._micro_batches:
                self._passes.compute(number, partial(self._end_micro_batch, number))
            else:
                self._push(number)

    def _end_micro_batch(self, number: int) -> None:
        if number in self._workers:  # else the others have gone on without it
            self._workers[number].done += 1
            self._proceed(number)

    def _push(self, number: int) -> None:
        one = self._workers[number]
        one.pushed, one.task, one.awaits = one.task, 0, True
        self._send(number)
        self._members.note_reported(number, one.pushed)
        self._members.on_step()

    def _send(self, number: int) -> None:
        task = self._workers[number].pushed
        self._after(self._way_s(number), _SERVER, lambda: self._serve(number, task))

    def _receive(self, number: int, tasks: Sequence[int]) -> None:
        one, process = self._workers[number], self._members.processes[number]
        if not one.has_weights:
            one.has_weights = True
            process.count(self._costs.mean_bytes, is_mean=False)
        one.answer = tasks
        self._proceed(number)

    # What the server does

    def _meet(self, number: int) -> None:
        one = self._workers[number]
        is_open, count = self._tasks.meet(
            number, wanted=self._most_in_hand, pushed=one.pushed, others=(one.task, *one.tasks)
        )
        latency_s = self._latency_s(number)
        self._after(latency_s, number, lambda: self._hear(number, is_open=is_open))
        if count:
            self._give(number, count=count)
        self._wake()
        self._end_if_all_know()

    def _serve(self, number: int, task: int) -> None:
        """Take a gradient, make an update with it if its task is open, and answer."""
        is_new = self._tasks.is_awaited(number, task)
        if is_new:
            self._tasks.close(number, task)
            self._make_step()
        self._give(number)
        if is_new:
            # Before the last report: a worker that ends then has not done what follows the last step.
            self._members.on_step()
            self._members.report(_SERVER)
        if self._members.steps_done >= self._last_step:
            self._tasks.is_ending = True
        self._wake()
        self._end_if_all_know()

    def _make_step(self) -> None:
        process, step = self._members.processes[_SERVER], self._members.steps_done + 1
        self._members.note_step(step, usual_s=None)
        process.state = worker.end_step(worker.apply(process.state))
        self._members.note_reported(_SERVER, step)

    def _give(self, number: int, *, count: int = 1) -> None:
        """Answer with tasks, and weights; a worker without any waits for one, unless no step is left."""
        tasks = self._tasks.hand_out(number, count=count)
        if tasks is None:
            self._parked.append(number)
            return
        if self._tasks.is_ending and not self._tasks.has_some(number):
            self._dismissed.add(number)
        travels_s = self._way_s(number) if self._workers[number].has_weights else self._weights_s[number]
        self._after(travels_s, number, lambda: self._receive(number, tasks))

    def _wake(self) -> None:
        """Give tasks to those that wait for one, as long as there are some; if no step is left, let them end."""
        while self._parked and self._tasks.has_more:
            self._give(self._parked.pop(0))

    def _end_if_all_know(self) -> None:
        has_ended = self._members.processes[_SERVER].state.has_ended
        if self._tasks.is_ending and self._dismissed >= self._workers.keys() and not has_ended:
            self._members.end_run(_SERVER)
