"""Scripts for one rank of each class of ranks with equal shares: each row of messages goes to, and comes from, whole classes.

Shapes: n = ranks, C = classes.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ttlaunch.runtime.comm.class_world import ClassWorld, Messages
from ttlaunch.runtime.comm.programs import Compute, End, Note, Shares, Step, Stretch, Update
from ttlaunch.runtime.comm.share_rules import Code, Forms, Key, Numbers, Row, Waits, Work
from ttlaunch.runtime.comm.turns import Script
from ttlaunch.runtime.comm.virtual_world import Classes, NotAlikeError
from ttlaunch.runtime.work import UPDATE_S
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin all messages of a row under one key."""

    row: int
    key: Key
    messages: Messages


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait for all messages of some rows and keys."""

    keys: tuple[tuple[int, Key], ...]


_SENT = "messages", "bytes", "step_bytes"

ClassDeed = Stretch | Begin | Finish | Step | Note | End


def classes_of_shares(codes: Iterable[Code], differences: Mapping[Rank, Hashable]) -> Classes:
    """Divide ranks by their code, their shares, and what else distinguishes each."""
    found: dict[Hashable, list[Rank]] = defaultdict(list)
    for number, code in enumerate(codes):
        for rank, row in zip(code.ranks, code.signatures().tolist(), strict=True):
            found[number, tuple(row), differences[rank]].append(rank)
    return tuple(sorted(map(tuple, found.values())))


class ClassPrograms:
    """What one rank of each class does."""

    def __init__(self, codes: Iterable[Code], classes: Classes, forms: Forms) -> None:
        """Note who is in which class; nothing else is computed yet."""
        self._code_of = {rank: code for code in codes for rank in code.ranks}
        self._classes = classes
        self._bytes_of = np.array([form.size for form in forms.known], dtype=np.intp)  # by number of the form
        self._order = np.array([rank for ranks in classes for rank in ranks])
        self._sizes = np.array([len(ranks) for ranks in classes])
        self._starts = np.cumsum(self._sizes) - self._sizes
        # What each rank of a class sends to each rank of another one, shape (C, C); of programs that were asked for.
        self._sent = {name: np.zeros((len(classes), len(classes)), dtype=np.int64) for name in _SENT}

    def edges(self) -> list[dict[str, int]]:
        """Return what each rank of a class sends to each of how many ranks of another one, as `VirtualEdge` has it."""
        return [
            {
                "source": source,
                "dest": dest,
                "peers": int(self._sizes[dest]) - (source == dest),
                **{name: int(sent[source, dest]) for name, sent in self._sent.items()},
            }
            for source, dest in np.argwhere(self._sent["messages"]).tolist()
        ]

    def of(self, place: int) -> list[ClassDeed]:
        """Return what the first rank of the class at a place does.

        Raises:
            NotAlikeError: It exchanges messages with some ranks of a class, and other ones or none with the rest.

        Cost: for each row and tag, one pass through n ranks.
        """
        rank, in_step = self._classes[place][0], False
        code, found = self._code_of[rank], list[ClassDeed]()
        for section in code.of(rank):
            match section:
                case Row():
                    for key in code.keys(section):
                        messages = self._messages(code, section, key, place=place)
                        if key.is_send:
                            self._count(messages, place, in_step=in_step)
                        found.append(Begin(section.number, key, messages))
                case Waits(keys):
                    found.append(Finish(tuple(keys)))
                case Work():
                    each = self._seconds(section, code, rank)
                    found += [Stretch(each)] if each else []
                case Shares(_, facts):
                    found.append(Note(tuple((name, code.share(name, rank)) for name, _ in facts)))
                case Step(_, begins):
                    in_step = begins
                    found.append(section)
                case _:
                    found.append(section)
        return found

    @staticmethod
    def _seconds(work: Work, code: Code, rank: Rank) -> tuple[float, ...]:
        """Return how long a rank computes, and then updates."""
        updates = [one.values for one in work.each if isinstance(one, Update)]
        if updates and not code.is_whole:
            updates = code.updates(rank)
        computed = [one.seconds for one in work.each if isinstance(one, Compute)]
        return (*computed, *(values * UPDATE_S for values in updates))

    def _messages(self, code: Code, row: Row, key: Key, *, place: int) -> Messages:
        """Return the messages of a row under one key."""
        forms = self._of_classes(code.forms(self._classes[place][0], row, key), place)
        others = np.flatnonzero(forms >= 0)
        return Messages(others, self._bytes_of[forms[others]])

    def _of_classes(self, forms: Numbers, place: int) -> Numbers:
        """Return the form of a rank's message with each rank of each class, without the rank itself.

        Raises:
            NotAlikeError: Those with ranks of one class differ.
        """
        ranks = self._classes[place]
        forms[ranks[0]] = forms[ranks[1]] if len(ranks) > 1 else -1
        ordered = forms[self._order]
        least, most = np.minimum.reduceat(ordered, self._starts), np.maximum.reduceat(ordered, self._starts)
        if (least != most).any():
            raise NotAlikeError(f"rank {ranks[0]} exchanges other messages with some ranks of a class than with others")
        return least

    def _count(self, messages: Messages, place: int, *, in_step: bool) -> None:
        others, sizes = messages
        self._sent["messages"][place, others] += 1
        self._sent["bytes"][place, others] += sizes
        self._sent["step_bytes"][place, others] += sizes * in_step


def follow(
    deeds: Sequence[ClassDeed],
    place: int,
    rank: Rank,
    *,
    world: ClassWorld,
    step: Callable[[Step], object],
    note: Callable[[Mapping[str, int]], object],
) -> Script:
    """Do what a program says for the first rank of the class at a place; yield where the rank has to wait.

    Cost: the messages of the program's code, with the same bytes.
    Order: that of the code; sums are not made again.
    """
    begun: dict[tuple[int, Key], int] = {}
    for deed in deeds:
        match deed:
            case Stretch(each_s):
                world.compute_each(rank, each_s)
            case Begin(row, key, messages):
                begun[row, key] = world.begin(place, messages, tag=key.tag, is_send=key.is_send)
            case Finish(keys):
                yield from world.pauses(rank, [begun.pop(key) for key in keys])
            case Step():
                step(deed)
            case Note(facts):
                note(dict(facts))
            case End():
                return
