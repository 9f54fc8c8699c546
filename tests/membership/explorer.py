"""Explore every order of events of a small system, and find those that break a rule or from which it cannot end.

The search goes breadth first, so that the events that lead to a mistake are the fewest that can. A system is a `System`: its
states are hashable, and it raises `Violation` where a rule is broken. It then looks for states from which no order of
events leads to an end.
"""

import time
from array import array
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


class Violation(Exception):  # noqa: N818 - it is what is looked for, and no error of this program
    """A rule is broken; the text says which."""


class System(Protocol[State]):
    """What is explored."""

    def first(self) -> State:
        """Return the state in which it begins."""

    def successors(self, state: State) -> Iterable[tuple[str, State]]:
        """Yield each event that is possible in a state, and the state after it.

        Raises:
            Violation: An event breaks a rule; its text begins with the event.
        """

    def has_ended(self, state: State) -> bool:
        """Whether all is done."""

    def should_end(self, state: State) -> bool:
        """Whether there must be a way from this state to one that has ended."""


@dataclass(frozen=True)
class Findings:
    """What the search found.

    Attributes:
        mistake: The rule that is broken; empty if none is.
        trace: The events that lead to it, the fewest that do.
        states: How many states were visited.
        ended: In how many of them all is done.
        stuck: From how many the end cannot be reached although it should be.
        excused: From how many it cannot, and need not.
        is_complete: Whether all states were visited.
    """

    mistake: str
    trace: tuple[str, ...]
    states: int
    ended: int = 0
    stuck: int = 0
    excused: int = 0
    seconds: float = 0.0
    is_complete: bool = True


class _Search(Generic[State]):
    """The states in the order in which they were found, with the event that led to each first."""

    def __init__(self, first: State) -> None:
        self.order: list[State] = [first]
        self.number: dict[State, int] = {first: 0}
        self.came_from: list[tuple[int, str]] = [(0, "")]
        self.before: list[array[int]] = [array("l")]  # of each state, those from which an event leads to it

    def note(self, origin: int, event: str, state: State) -> bool:
        """Take a state that an event has led to; returns whether it is new."""
        number = self.number.setdefault(state, len(self.order))
        is_new = number == len(self.order)
        if is_new:
            self.order.append(state)
            self.came_from.append((origin, event))
            self.before.append(array("l"))
        self.before[number].append(origin)
        return is_new

    def trace(self, number: int) -> list[str]:
        events = []
        while number:
            number, event = self.came_from[number]
            events.append(event)
        return events[::-1]


def explore(system: System[State], *, most_states: int = 1_000_000, most_s: float = 600.0) -> Findings:
    """Visit all states of a system, until a rule is broken.

    Args:
        system: What is explored.
        most_states: The search ends, incomplete, after so many.
        most_s: And after so many seconds.

    Cost: memory of about 1 KB a state.
    """
    began = time.monotonic()
    search = _Search(system.first())
    waiting = deque([0])
    while waiting:
        number = waiting.popleft()
        try:
            for event, state in system.successors(search.order[number]):
                if search.note(number, event, state):
                    waiting.append(len(search.order) - 1)
        except Violation as violation:
            event, _, rule = str(violation).partition(": ")
            trace = (*search.trace(number), event)
            return Findings(rule, trace, len(search.order), seconds=time.monotonic() - began)
        if len(search.order) > most_states or time.monotonic() - began > most_s:
            return Findings("", (), len(search.order), seconds=time.monotonic() - began, is_complete=False)
    return _look_for_the_stuck(system, search, began)


def _look_for_the_stuck(system: System[State], search: _Search[State], began: float) -> Findings:
    ended = [number for number, state in enumerate(search.order) if system.has_ended(state)]
    can_end = bytearray(len(search.order))
    waiting = deque(ended)
    for number in ended:
        can_end[number] = 1
    while waiting:
        for number in search.before[waiting.popleft()]:
            if not can_end[number]:
                can_end[number] = 1
                waiting.append(number)
    others = [number for number in range(len(search.order)) if not can_end[number]]
    stuck = [number for number in others if system.should_end(search.order[number])]
    return Findings(
        mistake="the run can no longer finish" if stuck else "",
        trace=tuple(search.trace(stuck[0])) if stuck else (),
        states=len(search.order),
        ended=len(ended),
        stuck=len(stuck),
        excused=len(others) - len(stuck),
        seconds=time.monotonic() - began,
    )
