"""What the code of ranks does, found by running it for three of them, and repeated by all of them at times of their own.

Where a server serves one rank after the other, no two ranks have the same times, so none can stand for another. But what their code does
is the same: it computes so long, begins such a message, waits for it. A `Program` is that list. It is found while the ranks repeat it: the code
of the first, the middle and the last of them runs in threads in which no time passes. It stops only where it waits for a message that
carries values, until some rank has received them.

What ranks do may differ in two ways that follow from their places: the partner of a message is the same rank, or one at the same distance; and the values
that a rank sends, such as the number of its first micro-batch, grow evenly from rank to rank. Both are read off from the first and the last rank, and
the middle one must do what is read off for it. All ranks must receive the same values: the same code does the same after it. Code that asks what has
arrived by now is not repeated, since the answer depends on the time. Whatever else differs raises `NotAlikeError`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ttlaunch.runtime.comm.posted import PostedCommunicator
from ttlaunch.runtime.comm.protocol import Communicator, Pending, same_bytes
from ttlaunch.runtime.comm.turns import WorldEndedError
from ttlaunch.runtime.comm.virtual_world import NotAlikeError
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute what takes so long on a rank that is not slow."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Post:
    """Begin a transfer.

    Attributes:
        like: A tensor of the message's type and shape.
        values: What is sent, if values matter.
        has_values: Whether they do.
    """

    peer: Rank
    tag: int
    is_send: bool
    like: Tensor
    values: Tensor | None
    has_values: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a transfer, by its place among all that were begun."""

    number: int


@dataclass(frozen=True, slots=True)
class Step:
    """Begin or end a step."""

    step: int
    begins: bool


@dataclass(frozen=True, slots=True)
class Note:
    """Note numbers for the formula of the traffic."""

    facts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class End:
    """Return."""


Deed = Compute | Post | Wait | Step | Note | End


class Author:
    """Runs the code of one rank in a thread of its own, and writes down what it does; stands where a rank has its world.

    The thread runs only while somebody waits for its next deed, so one thread runs at any time.
    """

    def __init__(self, rank: Rank, live: Callable[["Author"], None], *, carries: Callable[[Tensor], bool]) -> None:
        """Begin nothing yet.

        Args:
            rank: The rank.
            live: Runs its code; is given this author.
            carries: Whether the values of a tensor matter.
        """
        self.rank, self._carries = rank, carries
        self.deeds: list[Deed] = []
        self._tensors: list[Tensor] = []  # those of all transfers
        self._known = set[int]()  # the receives whose values are there
        self._error: BaseException | None = None
        self._has_begun = self._is_over = False
        self._goes_on, self._stands = threading.Lock(), threading.Lock()
        self._goes_on.acquire()
        self._stands.acquire()
        self._thread = threading.Thread(target=self._run, args=(live,), name=f"code of rank {rank}", daemon=True)

    @property
    def communicator(self) -> PostedCommunicator["Written"]:
        """What the code takes for its communicator."""
        return PostedCommunicator(self, self.rank)

    def deed(self, place: int) -> Deed:
        """Return what the code does at this place, and run it until that is known.

        Raises:
            NotAlikeError: The code has failed, or what it does depends on the time.
        """
        while place >= len(self.deeds):
            if not self._has_begun:
                self._has_begun = True
                self._thread.start()
            if self._error is None:
                self._goes_on.release()
                self._stands.acquire()
            if self._error is not None:
                raise self._error if isinstance(self._error, NotAlikeError) else NotAlikeError(_reason(self._error))
        return self.deeds[place]

    def receive(self, number: int, values: Tensor) -> None:
        """Hand over the values of a message for which the code waits."""
        with _disable_current_modes():
            self._tensors[number].copy_(values)
        self._known.add(number)

    def close(self) -> None:
        """End the thread if the code has not come to its end."""
        self._is_over = True
        if self._thread.is_alive():
            self._goes_on.release()
            self._thread.join()

    def _run(self, live: Callable[["Author"], None]) -> None:
        self._goes_on.acquire()
        try:
            if not self._is_over:
                live(self)
                self.deeds.append(End())
        except WorldEndedError:
            pass
        except BaseException as error:  # noqa: BLE001  whatever a recipe raises: the ranks that run all show it
            self._error = error
        self._stands.release()

    # What the code calls

    def post(self, tensor: Tensor, *, rank: Rank, peer: Rank, tag: int, is_send: bool) -> "Written":
        """Write down that a transfer begins."""
        del rank
        has_values = self._carries(tensor)
        with _disable_current_modes():
            own = tensor.detach()
            like = torch.empty(tensor.shape, dtype=tensor.dtype)  # memory that nobody touches takes no pages
            values = own.clone() if is_send and has_values else None
        self.deeds.append(Post(peer, tag, is_send, like, values, has_values))
        self._tensors.append(own)
        return Written(self, len(self._tensors) - 1, needs_values=has_values and not is_send)

    def wait_any(self, transfers: Sequence["Written"], *, timeout_s: float | None) -> int | None:
        """Refuse code that asks what has arrived."""
        del transfers, timeout_s
        self.refuse()

    def refuse(self) -> NoReturn:
        """Refuse code that depends on the time."""
        raise NotAlikeError(f"what rank {self.rank} does depends on the order in which messages arrive")

    def wait(self, number: int, *, needs_values: bool) -> None:
        """Write down that the code waits for a transfer, and wait for its values."""
        self.deeds.append(Wait(number))
        while needs_values and number not in self._known:
            self._stands.release()
            self._goes_on.acquire()
            if self._is_over:
                raise WorldEndedError


@dataclass
class Written:
    """A transfer that an author has written down."""

    author: Author
    number: int
    needs_values: bool

    def wait(self) -> None:
        self.author.wait(self.number, needs_values=self.needs_values)

    def test(self) -> bool:
        self.author.refuse()


class Program:
    """What the code of some ranks does."""

    def __init__(
        self, ranks: Sequence[Rank], live: Callable[[Author], None], *, carries: Callable[[Tensor], bool]
    ) -> None:
        """Run nothing yet.

        Args:
            ranks: In order; at least three.
            live: Runs the code of the rank of an author.
            carries: Whether the values of a tensor matter.
        """
        chosen = ranks[0], ranks[len(ranks) // 2], ranks[-1]
        self._first, self._middle, self._last = self._authors = [Author(one, live, carries=carries) for one in chosen]
        self._place_of = {rank: place for place, rank in enumerate(ranks)}
        self._is_checked = 0  # so many deeds of the three agree
        self._received: dict[int, Tensor] = {}

    def deed(self, place: int, rank: Rank) -> Deed:
        """Return what a rank does at this place.

        Raises:
            NotAlikeError: The three ranks whose code runs do not do the same there.
        """
        first, last = self._first.deed(place), self._last.deed(place)
        if place >= self._is_checked:
            read_off, middle = self._between(first, last, self._middle.rank), self._middle.deed(place)
            if read_off is None or not _is_same(read_off, middle):
                self._refuse(place)
            self._is_checked = place + 1
        found = self._between(first, last, rank)
        if found is None:
            self._refuse(place)
        return found

    def receive(self, number: int, values: Tensor, rank: Rank) -> None:
        """Hand over the values of a message that a rank has received, to whose code waits for them.

        Raises:
            NotAlikeError: Another rank has received other ones.
        """
        known = self._received.get(number)
        if known is None:
            self._received[number] = values
            for author in self._authors:
                author.receive(number, values)
        elif not same_bytes(known, values):
            raise NotAlikeError(f"rank {rank} receives other values than ranks with the same code")

    def close(self) -> None:
        """End the threads of code that has not come to its end."""
        for author in self._authors:
            author.close()

    def _between(self, first: Deed, last: Deed, rank: Rank) -> Deed | None:
        """Read off what a rank does; None if the first and the last one do not do the same."""
        if not isinstance(first, Post) or not isinstance(last, Post):
            return first if first == last else None
        one, other = first.peer - self._first.rank, last.peer - self._last.rank
        if not _is_like(first, last) or not (first.peer == last.peer or one == other):
            return None
        peer = first.peer if first.peer == last.peer else Rank(rank + one)
        if first.values is None or last.values is None or not _differ(first.values, last.values):
            return first if peer == first.peer else replace(first, peer=peer)
        place, count = self._place_of[rank], len(self._place_of) - 1
        grown = (last.values - first.values) * place
        return replace(first, peer=peer, values=(first.values + grown / count).to(first.like.dtype))

    def _refuse(self, place: int) -> NoReturn:
        ranks = ", ".join(str(one.rank) for one in self._authors)
        raise NotAlikeError(f"the code of ranks {ranks} does not do the same from its operation {place} on")


def _is_like(one: Post, other: Post) -> bool:
    return (one.tag, one.is_send, one.has_values, one.like.dtype, one.like.shape) == (
        other.tag,
        other.is_send,
        other.has_values,
        other.like.dtype,
        other.like.shape,
    )


def _is_same(one: Deed, other: Deed) -> bool:
    if not isinstance(one, Post) or not isinstance(other, Post):
        return one == other
    if not _is_like(one, other) or one.peer != other.peer:
        return False
    return one.values is None or other.values is None or not _differ(one.values, other.values)


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether what is sent may decide what its receiver does; bytes are packed numbers that have no values."""
    return one.dtype is not torch.uint8 and not same_bytes(one, other)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def repeat(
    program: Program,
    rank: Rank,
    communicator: Communicator,
    *,
    compute: Callable[[float], object],
    step: Callable[[Step], object],
    note: Callable[[Mapping[str, int]], object],
) -> None:
    """Do what a program says for a rank, which waits where it has to.

    Cost: the messages of the program's code, with the same bytes.
    Order: that of the code; sums are not made again.

    Raises:
        NotAlikeError: The rank does not do the same as others with its code.
    """
    begun: list[tuple[Pending, Tensor | None]] = []
    place = 0
    while True:
        deed = program.deed(place, rank)
        place += 1
        match deed:
            case Compute(seconds):
                compute(seconds)
            case Post(peer, tag, is_send=True):
                sent = deed.like if deed.values is None else deed.values
                begun.append((communicator.isend(sent, dest=peer, tag=tag), None))
            case Post(peer, tag):
                box = torch.empty_like(deed.like) if deed.has_values else deed.like
                received = box if deed.has_values else None
                begun.append((communicator.irecv(box, source=peer, tag=tag), received))
            case Wait(number):
                transfer, received = begun[number]
                transfer.wait()
                if received is not None:
                    program.receive(number, received, rank)
            case Step():
                step(deed)
            case Note(facts):
                note(dict(facts))
            case End():
                return
