"""The two ends of each message between classes of ranks: the nth that is sent under a tag is the nth that is received.

Shapes: C = classes, K = ends that are entered at once, D = messages of which only one end has begun, at most, for any two classes and a tag.
"""

from dataclasses import dataclass, field

import numpy as np

from ttlaunch.runtime.comm.class_flows import Ints
from ttlaunch.runtime.comm.virtual_world import NotAlikeError

Where = tuple[int, Ints] | tuple[Ints, int]
"""Which classes send and receive."""


class ClassPairs:
    """Finds for each end of a message the other one."""

    def __init__(self, count: int) -> None:
        """Begin without messages between so many classes."""
        self._count = count
        self._ends: dict[tuple[int, bool], _Ends] = {}

    @property
    def is_complete(self) -> bool:
        """Whether each end has its other one."""
        return all(
            np.array_equal(ends.begun, self._of(tag, is_send=not is_send).begun)
            for (tag, is_send), ends in [*self._ends.items()]
        )

    def pair(self, where: Where, group: int, sizes: Ints, *, tag: int, is_send: bool) -> tuple[Ints, Ints]:
        """Enter ends of messages, and find the other ends of those that have begun.

        Args:
            where: The classes that send, and those that receive.
            group: What all of these ends belong to.
            sizes: The bytes of each message, shape (K,).
            tag: The tag of all of them.
            is_send: Whether these are their sending ends.

        Returns:
            The places among these ends of those that are paired, and what their other ends belong to.

        Raises:
            NotAlikeError: The other end of one has another size.

        Cost: some operations on arrays of shape (K,), and memory for D * C^2 ends of each tag.
        """
        mine, theirs = self._of(tag, is_send=is_send), self._of(tag, is_send=not is_send)
        number, others = mine.begun[where], theirs.begun[where]
        while (number - others).max(initial=0) >= mine.depth:
            mine.deepen()
        mine.enter(where, number, group=group, sizes=sizes)
        found = np.flatnonzero(others > number)
        at = tuple(one if isinstance(one, int) else one[found] for one in where)
        groups, expected = theirs.at(at, number[found])
        if not np.array_equal(expected, sizes[found]):
            raise NotAlikeError(f"messages under tag {tag} have other sizes at their two ends")
        return found, groups

    def _of(self, tag: int, *, is_send: bool) -> "_Ends":
        found = self._ends.get((tag, is_send))
        if found is None:
            found = self._ends[tag, is_send] = _Ends(self._count)
        return found


@dataclass
class _Ends:
    """The sending or the receiving ends of all messages under a tag, of which the newest are known.

    Attributes:
        count: C.
        depth: How many of the newest are known for any two classes, D.
        begun: How many have begun, shape (C, C), senders first.
        groups, sizes: What each belongs to and its bytes, shape (D, C, C): number n is at place n modulo D.
    """

    count: int
    depth: int = 1
    begun: Ints = field(init=False)
    groups: Ints = field(init=False)
    sizes: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.begun = np.zeros((self.count, self.count), dtype=np.intp)
        self.groups, self.sizes = (np.zeros((1, self.count, self.count), dtype=np.intp) for _ in range(2))

    def enter(self, where: Where, number: Ints, *, group: int, sizes: Ints) -> None:
        """Enter the ends with these numbers, the newest ones."""
        at = (number % self.depth, *where)
        self.groups[at], self.sizes[at] = group, sizes
        self.begun[where] += 1

    def at(self, where: tuple[int | Ints, ...], number: Ints) -> tuple[Ints, Ints]:
        """Return the groups and sizes of the ends with these numbers."""
        at = (number % self.depth, *where)
        return self.groups[at], self.sizes[at]

    def deepen(self) -> None:
        """Have room for twice as many ends whose other ends have not begun."""
        rows, columns = np.indices(self.begun.shape)
        for name in ("groups", "sizes"):
            known = getattr(self, name)
            made = np.zeros((2 * self.depth, self.count, self.count), dtype=np.intp)
            for back in range(1, self.depth + 1):
                number = self.begun - back  # below 0 where there are not so many: these places are empty
                made[number % (2 * self.depth), rows, columns] = known[number % self.depth, rows, columns]
            setattr(self, name, made)
        self.depth *= 2
