"""The micro-batches that members of an elastic run compute on a virtual clock, each one at a time, for work that stops after any of them."""

from collections.abc import Callable
from dataclasses import dataclass

from ttlaunch.lab.virtual_members import VirtualMembers


@dataclass
class _Pass:
    """A micro-batch that a member computes: when it is done, what follows then, and whether that still holds."""

    until_s: float
    then: Callable[[], None]
    is_open: bool = True


class Passes:
    """The micro-batch that each member computes, if it computes one."""

    def __init__(self, members: VirtualMembers) -> None:
        self._members = members
        self._passes: dict[int, _Pass] = {}
        self._stopped_s: dict[int, float] = {}  # by number: when the one is done after which a member stops

    def is_computing(self, number: int) -> bool:
        """Whether a member computes a micro-batch and has not been told to stop after it."""
        return number in self._passes

    def compute(self, number: int, then: Callable[[], None]) -> None:
        """Let a member compute a micro-batch; `then` is called when it is done, unless the member stops or ends before."""
        self._plan(number, self._members.now + self._members.costs.leaf_s(number), then)

    def stop(self, number: int) -> tuple[float, bool]:
        """Let a member stop for a change; returns when it has, and whether it has done another micro-batch until then."""
        found, now = self._passes.pop(number, None), self._members.now
        if found is not None:
            found.is_open, self._stopped_s[number] = False, found.until_s
        return max(now, self._stopped_s.get(number, now)), found is not None

    def go_on(self, number: int, since_s: float) -> None:
        """Let a process that was stopped since a time compute the rest of its micro-batch."""
        found = self._passes.get(number)
        if found is not None:
            found.is_open = False
            self._plan(number, self._members.now + max(0.0, found.until_s - since_s), found.then)

    def _plan(self, number: int, until_s: float, then: Callable[[], None]) -> None:
        made = self._passes[number] = _Pass(until_s, then)

        def end() -> None:
            if made.is_open and self._members.processes[number].acts:
                del self._passes[number]
                then()

        self._members.at(until_s, end)
