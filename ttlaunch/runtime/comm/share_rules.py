"""What ranks do that own shares of unequal size, found from the code of a few of them, for one rank of each class of equal shares.

Ranks that share a model in rows, as with ZeRO, have the same code, but own different numbers of values, so messages have different sizes and updates take
different times. No rank stands for all, and with a thousand of them each exchange is a million messages. But ranks with equal shares do the same
at the same times, whatever their places: they send each message to all others at once. So one rank of each such class is enough.

What it does is read off from ranks whose code has run (`few_authors.py`). Messages that are begun without anything between them are a row. Within
a row, the size of a message that one rank sends to another under a tag depends on the sender alone, as when a layer is gathered, or on the
receiver alone, as when gradients go to their owners. Both ends of every message of each author are known, so one of the two explains all of them, or
`NotAlikeError` is raised. Numbers that are in no message, such as how many values a rank updates, come from `TrafficCounter.note_shares`.

Shapes: n = ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ttlaunch.runtime.comm.programs import Author, Compute, Deed, End, Note, Post, Shares, Step, Update, Wait
from ttlaunch.runtime.comm.virtual_messages import Form
from ttlaunch.runtime.comm.virtual_world import NotAlikeError
from ttlaunch.runtime.world import Rank

UPDATED = ("updated_in_matrices", "updated_elsewhere")
"""The numbers of a share that say how many values its rank updates, in the order of the updates; one of no values is not made."""

Stack = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

_NO_MESSAGE, _ITSELF = -1, -2


class Key(NamedTuple):
    """Messages of a row with one purpose under one tag: of several between the same two ranks, the nth one.

    Attributes:
        operation, bucket: The purpose, and which part of it, such as a layer; -1: the whole. Without it, the first message of a rank that has no
            share of one layer would be taken for that layer's although it is the next one's.
    """

    tag: int
    operation: str
    bucket: int
    is_send: bool
    nth: int

    @property
    def other_end(self) -> "Key":
        return self._replace(is_send=not self.is_send)


@dataclass(frozen=True)
class Row:
    """Transfers that a rank begins one after the other: for each other rank the number of the message's form."""

    number: int
    posts: Mapping[Key, Mapping[Rank, int]]


@dataclass(frozen=True)
class Waits:
    """Transfers for which a rank waits one after the other: all of these keys of these rows."""

    keys: frozenset[tuple[int, Key]]


@dataclass(frozen=True)
class Work:
    """What a rank computes one after the other."""

    each: tuple[Compute | Update, ...]


Section = Row | Waits | Work | Step | Note | Shares | End


@dataclass
class Forms:
    """The forms of all messages, by number."""

    known: list[Form] = field(default_factory=list)
    number_of: dict[Form, int] = field(default_factory=dict)

    def number(self, form: Form) -> int:
        """Return the number of a form, which a new one gets."""
        number = self.number_of.setdefault(form, len(self.known))
        if number == len(self.known):
            self.known.append(form)
        return number


def sections_of(author: Author, forms: Forms) -> list[Section]:
    """Return what a rank whose code has run does, in rows.

    Raises:
        NotAlikeError: It waits for a part of a row's messages of one kind, then for others.
    """
    found: list[Section] = []
    transfers: list[tuple[int, Key, Rank]] = []
    rows: list[dict[Key, dict[Rank, int]]] = []
    waited = set[int]()
    for kind, deeds in _runs(author.deeds):
        if kind is Post:
            rows.append(_row(deeds, forms, transfers, number=len(rows)))
            found.append(Row(len(rows) - 1, rows[-1]))
        elif kind is Wait:
            numbers = {one.number for one in deeds if isinstance(one, Wait)} - waited
            waited |= numbers
            found.append(_waits([transfers[number] for number in sorted(numbers)], rows, rank=author.rank))
        elif kind is Compute:
            found.append(Work(tuple(one for one in deeds if isinstance(one, Compute | Update))))
        else:
            found += [one for one in deeds if isinstance(one, Step | Note | Shares | End)]
    return found


def _runs(deeds: Iterable[Deed]) -> Iterable[tuple[type, list[Deed]]]:
    """Yield deeds of one kind that follow each other; computing and updating are one kind."""
    kind, run = None, list[Deed]()
    for deed in deeds:
        its = Compute if isinstance(deed, Update) else type(deed)
        if its is not kind and run and kind is not None:
            yield kind, run
            run = []
        kind = its
        run.append(deed)
    if kind is not None:
        yield kind, run


def _row(
    deeds: Iterable[Deed], forms: Forms, transfers: list[tuple[int, Key, Rank]], *, number: int
) -> dict[Key, dict[Rank, int]]:
    row: dict[Key, dict[Rank, int]] = defaultdict(dict)
    counts: dict[tuple[int, str, int, bool, Rank], int] = defaultdict(int)
    for one in deeds:
        if isinstance(one, Post):
            name, bucket = one.operation or ("", None)
            pair = one.tag, name, -1 if bucket is None else bucket, one.is_send, one.peer
            key = Key(*pair[:4], counts[pair])
            counts[pair] += 1
            row[key][one.peer] = forms.number(one.form)
            transfers.append((number, key, one.peer))
    return dict(row)


def _waits(
    transfers: Iterable[tuple[int, Key, Rank]], rows: Sequence[Mapping[Key, Mapping[Rank, int]]], *, rank: Rank
) -> Waits:
    counts: dict[tuple[int, Key], int] = defaultdict(int)
    for row, key, _ in transfers:
        counts[row, key] += 1
    if any(count != len(rows[row][key]) for (row, key), count in counts.items()):
        raise NotAlikeError(f"rank {rank} waits for some of the messages that it has begun together")
    return Waits(frozenset(counts))


@dataclass(frozen=True)
class Rule:
    """What decides the form of a row's messages under one key.

    Attributes:
        forms: The number of a form for each rank.
        peers: Whose number counts: None: that of the rank at the other end. Else that of the rank itself, and it has such a message with each of
            these ranks.
    """

    forms: Numbers
    peers: Flags | None

    def of(self, rank: Rank) -> Numbers:
        """Return the form of a rank's message with each other rank."""
        found = self.forms.copy() if self.peers is None else np.where(self.peers, self.forms[rank], _NO_MESSAGE)
        found[rank] = _ITSELF
        return found


class Code:
    """What all ranks of a group do, which have the same code.

    Attributes:
        ranks: The group.
        sections: What each does, as an author does it.
        is_whole: Whether the code of all of them has run.
        shares: Numbers of the share of each rank of the group's role, by name and place.
    """

    def __init__(
        self, ranks: Sequence[Rank], written: Mapping[Rank, Sequence[Section]], *, role: Sequence[Rank], size: int
    ) -> None:
        """Find the rules.

        Args:
            ranks: The group.
            written: What the authors in it do; those of small groups are all of it.
            role: All ranks of its role.
            size: n.

        Raises:
            NotAlikeError: No rule explains what the authors do.
        """
        self.ranks, self._written, self._role, self._size = ranks, written, role, size
        self.sections: Sequence[Section] = next(iter(written.values()))
        self.is_whole = len(written) == len(ranks)
        self.shares: dict[str, Numbers] = {}
        self._place_of = {rank: place for place, rank in enumerate(role)}
        self.rules: dict[tuple[int, Key], Rule] = {}
        for rank, sections in written.items():
            self._check_shares(rank, sections)
        if self.is_whole:
            return
        if len({tuple(map(type, sections)) for sections in written.values()}) != 1:
            self._refuse()
        rows: dict[int, Sequence[Row]] = {}
        merged: list[Section] = []
        for together in zip(*written.values(), strict=True):
            merged.append(together[0])
            if isinstance(together[0], Row):
                rows[together[0].number] = [one for one in together if isinstance(one, Row)]
                self._find_rules(rows[together[0].number])
            elif isinstance(together[0], Waits):
                merged[-1] = self._merged([one for one in together if isinstance(one, Waits)], rows)
            elif isinstance(together[0], Work):
                self._check_work([one for one in together if isinstance(one, Work)])
            elif isinstance(together[0], Step | Note) and any(one != together[0] for one in together):
                self._refuse()
        self.sections = merged

    def _refuse(self) -> None:
        ranks = ", ".join(map(str, self._written))
        raise NotAlikeError(f"what ranks {ranks} do follows no rule that says what ranks between them do")

    def _check_shares(self, rank: Rank, sections: Iterable[Section]) -> None:
        """Note the numbers of shares, which have to be those that other authors have noted, for all ranks of the role."""
        for one in sections:
            if isinstance(one, Shares):
                for name, numbers in one.facts:
                    known = self.shares.setdefault(name, np.array(numbers, dtype=np.int64))
                    if one.place != self._place_of[rank] or tuple(known) != numbers or len(numbers) != len(self._role):
                        self._refuse()

    def _check_work(self, together: Sequence[Work]) -> None:
        """Check that all compute the same, and then update as many values as their shares have."""
        computes = [[one for one in work.each if isinstance(one, Compute)] for work in together]
        updates = [[one.values for one in work.each if isinstance(one, Update)] for work in together]
        is_last = all(
            [*some, *map(Update, values)] == [*work.each]
            for some, values, work in zip(computes, updates, together, strict=True)
        )
        if any(some != computes[0] for some in computes) or not is_last:
            self._refuse()
        if any(updates) and any(
            values != self.updates(rank) for rank, values in zip(self._written, updates, strict=True)
        ):
            self._refuse()

    def _merged(self, together: Sequence[Waits], rows: Mapping[int, Sequence[Row]]) -> Waits:
        """Return what any author waits for; one that does not wait for a part of it has begun nothing there."""
        keys = frozenset[tuple[int, Key]]().union(*(one.keys for one in together))
        for place, one in enumerate(together):
            if any(key in rows[number][place].posts for number, key in keys - one.keys):
                self._refuse()
        return Waits(keys)

    def _find_rules(self, together: Sequence[Row]) -> None:
        """Find the rule of each key of a row; of one at the other end too, which no author may have."""
        posted = {key for row in together for key in row.posts}
        for key in posted | {one.other_end for one in posted}:
            stack, other = self._stack(together, key), self._stack(together, key.other_end)
            rule = self._by_own(stack, other) or self._by_peer(stack, other)
            if rule is None:
                self._refuse()
            else:
                self.rules[together[0].number, key] = rule

    def _stack(self, together: Sequence[Row], key: Key) -> Stack:
        """Return the form of each author's message with each rank."""
        found = np.full((len(together), self._size), _NO_MESSAGE, dtype=np.int64)
        for line, rank, row in zip(found, self._written, together, strict=True):
            posts = row.posts.get(key, {})
            line[list(posts)] = list(posts.values())
            line[rank] = _ITSELF
        return found

    def _by_peer(self, stack: Stack, other: Stack) -> Rule | None:
        """Return the rule that the rank at the other end decides, if it explains both ends of the authors' messages."""
        forms = _agreed(stack)
        if forms is None:
            return None
        own = list(self.ranks)
        for line, rank in zip(other, self._written, strict=True):
            seen = line[own]
            if not ((seen == forms[rank]) | (seen == _ITSELF)).all():
                return None
        return Rule(forms, None)

    def _by_own(self, stack: Stack, other: Stack) -> Rule | None:
        """Return the rule that the rank itself decides, if it explains both ends of the authors' messages."""
        forms = _agreed(other)
        if forms is None:
            return None
        peers: Flags = np.asarray((stack >= 0).any(axis=0))
        own = list(self.ranks)
        for line, rank in zip(other, self._written, strict=True):
            peers[rank] |= bool((line[own] >= 0).any())
        if not (stack >= 0).any():
            # All authors have empty shares here, so nobody says who gets those of others; that both ends match is checked later.
            peers[list(self._role)] = True
        for line, rank in zip(stack, self._written, strict=True):
            expected = np.where(peers, forms[rank], _NO_MESSAGE)
            expected[rank] = _ITSELF
            if not (line == expected).all():
                return None
        return Rule(forms, peers)

    def not_covered(self) -> list[Rank]:
        """Return ranks, as few as possible, that together have all messages that a rank of the group has, and no author.

        When a rank waits for messages is read off from a rank that has some, so the code of these ranks has to run too.
        """
        own = [rank for rank in self.ranks if rank not in self._written]
        posted = {
            (section.number, key)
            for sections in self._written.values()
            for section in sections
            if isinstance(section, Row)
            for key in section.posts
        }
        left = np.array([rule.forms[own] >= 0 for place, rule in self.rules.items() if place not in posted])
        found: list[Rank] = []
        while left.any():
            best = int(left.sum(axis=0).argmax())
            found.append(own[best])
            left = left[~left[:, best]]
        return found

    def signatures(self) -> Stack:
        """Return for each rank of the group a row of numbers that is equal for ranks with equal shares."""
        own, places = list(self.ranks), [self._place_of[rank] for rank in self.ranks]
        if self.is_whole:
            return np.array(own, dtype=np.int64).reshape(-1, 1)
        columns = [rule.forms[own] for rule in self.rules.values()]
        return np.stack([*columns, *(numbers[places] for numbers in self.shares.values())], axis=1)

    def of(self, rank: Rank) -> Sequence[Section]:
        """Return the sections of a rank: its own, if its code has run."""
        return self._written[rank] if self.is_whole else self.sections

    def forms(self, rank: Rank, row: Row, key: Key) -> Numbers:
        """Return the form of a rank's message with each other rank."""
        if not self.is_whole:
            return self.rules[row.number, key].of(rank)
        found = np.full(self._size, _NO_MESSAGE, dtype=np.int64)
        posts = row.posts[key]
        found[list(posts)] = list(posts.values())
        found[rank] = _ITSELF
        return found

    def keys(self, row: Row) -> list[Key]:
        """Return the keys of a row, in order."""
        return sorted(row.posts) if self.is_whole else sorted(key for number, key in self.rules if number == row.number)

    def updates(self, rank: Rank) -> list[int]:
        """Return how many values a rank updates, one update after the other; nothing if nobody has noted that."""
        return [values for name in UPDATED if name in self.shares and (values := self.share(name, rank))]

    def share(self, name: str, rank: Rank) -> int:
        """Return a number of a rank's share."""
        return int(self.shares[name][self._place_of[rank]])


def _agreed(stack: Stack) -> Numbers | None:
    """Return for each rank the form that all authors see at the other end; None if they see different ones."""
    most = stack.max(axis=0)
    return np.maximum(most, _NO_MESSAGE) if ((stack == most) | (stack == _ITSELF)).all() else None
