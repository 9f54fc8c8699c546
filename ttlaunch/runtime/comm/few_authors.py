"""The code of a few ranks, run to its end although most ranks with which it exchanges messages run no code.

Numbers that decide what code does, such as counts of tokens, travel between ranks too. What a rank without code sends is read off from those
with code in its group: the nth message with values that each of them sends to the same receiver under a tag. It must be the same from each, or as
long as the receiver expects and of one number throughout, such as the sums of squares of a share, which are 0.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ttlaunch.runtime.comm.programs import Author, Post
from ttlaunch.runtime.comm.protocol import same_bytes
from ttlaunch.runtime.comm.virtual_world import NotAlikeError
from ttlaunch.runtime.world import Rank

_Line = tuple[Rank, Rank, int]
"""Sender, receiver and tag."""


@dataclass
class _Told:
    """What an author has done that matters to others, as far as it has been read.

    Attributes:
        read: How many of its deeds.
        posts: How many transfers are among them.
        received: How many messages with values it has begun to receive on each line.
        open: Those whose values it does not have: by number, the line and the place on it.
    """

    read: int = 0
    posts: int = 0
    received: dict[_Line, int] = field(default_factory=lambda: defaultdict(int))
    open: dict[int, tuple[_Line, int]] = field(default_factory=dict)


class FewAuthors:
    """Ranks whose code runs, or has run."""

    def __init__(self, groups: Sequence[Sequence[Rank]]) -> None:
        """Run nothing yet.

        Args:
            groups: All ranks, in groups with the same code.
        """
        self._left = set[Rank]()  # those that have not come to their end
        self._authors: dict[Rank, Author] = {}
        self._told: dict[Rank, _Told] = {}
        self._sent: dict[_Line, list[Tensor]] = defaultdict(list)
        self._given: dict[tuple[int, Rank, int, int], Tensor] = {}  # by group, receiver, tag and place on the line
        self._waits: dict[Rank, int] = {}
        self._group_of = {rank: place for place, ranks in enumerate(groups) for rank in ranks}
        self._known: list[list[Rank]] = [[] for _ in groups]

    def run(self, authors: Mapping[Rank, Author]) -> None:
        """Run the code of some ranks to its end.

        Args:
            authors: By rank; one rank or more of each group has an author here, or had one in an earlier call.

        Raises:
            NotAlikeError: Code has failed, or waits for values that cannot be read off.

        Cost: that of the code, with the threads of all authors at once, of which one runs at any time.
        """
        self._left |= authors.keys()
        self._authors |= authors
        for rank in authors:
            self._told[rank] = _Told()
            self._known[self._group_of[rank]].append(rank)
        while self._left:
            if not sum(self._go_on(rank) for rank in sorted(self._left)):  # all of them, not only the first that can
                raise NotAlikeError("ranks wait for values that no rank sends whose code runs")
        self._check()

    def _go_on(self, rank: Rank) -> bool:
        """Hand over what an author waits for, and run it on; False if that is not there."""
        author, told = self._authors[rank], self._told[rank]
        found = {number: self._values(*told.open[number], author.expected(number)) for number in told.open}
        arrived = {number: values for number, values in found.items() if values is not None}
        author.receive_all(arrived.items())
        told.open = {number: line for number, line in told.open.items() if number not in arrived}
        if self._waits.get(rank) in told.open:
            return False
        waits_for = author.go_on()
        self._read(author, told)
        if waits_for is None:
            self._left.discard(rank)
        else:
            self._waits[rank] = waits_for
        return True

    def _check(self) -> None:
        """Raise `NotAlikeError` if ranks of a group have sent different values where those of one were taken for all."""
        for (group, receiver, tag, place), values in self._given.items():
            for rank in self._known[group]:
                sent = self._sent.get((rank, receiver, tag), ())
                if place < len(sent) and self._fitting(sent[place], values) is None:
                    raise NotAlikeError(f"rank {rank} sends other values than ranks with the same code")

    def _read(self, author: Author, told: _Told) -> None:
        for deed in author.deeds[told.read :]:
            if not isinstance(deed, Post):
                continue
            if deed.has_values and deed.is_send and deed.values is not None:
                self._sent[author.rank, deed.peer, deed.tag].append(deed.values)
            elif deed.has_values:
                line = deed.peer, author.rank, deed.tag
                told.open[told.posts] = line, told.received[line]
                told.received[line] += 1
            told.posts += 1
        told.read = len(author.deeds)

    def _values(self, line: _Line, place: int, expected: Tensor) -> Tensor | None:
        """Return what arrives as the nth message on a line; None: that is not known yet."""
        source, receiver, tag = line
        if source in self._authors:
            sent = self._sent.get(line, ())
            return sent[place] if place < len(sent) else None
        group = self._group_of[source]
        for rank in self._known[group]:
            sent = self._sent.get((rank, receiver, tag), ())
            if place < len(sent):
                values = self._fitting(sent[place], expected, has_values=False)
                if values is None:
                    raise NotAlikeError(f"what rank {source} sends to rank {receiver} cannot be read off")
                self._given.setdefault((group, receiver, tag, place), values)
                return values
        return None

    @staticmethod
    def _fitting(values: Tensor, like: Tensor, *, has_values: bool = True) -> Tensor | None:
        """Return values in the shape of others; None if that cannot be, or if those are known and differ."""
        if values.shape != like.shape:
            first = values.reshape(-1)[:1]
            if not len(first) or not bool((values == first).all()):
                return None
            values = torch.full(like.shape, first.item(), dtype=values.dtype)
        return None if has_values and not same_bytes(values, like) else values
