"""What the code of ranks does, found by running it for three of them, and repeated by all of them at times of their own.

Where a server serves one rank after the other, no two ranks have the same times, so none can stand for another. But what their code does
is the same: it computes so long, begins such a message, waits for it. A `Program` is that list. It is found while the ranks repeat it: the code
of the first, the middle and the last of them runs in threads in which no time passes. It stops only where it waits for a message that
carries values, until some rank has received them. The ranks that repeat it have neither threads nor tensors: each is a script of the world (`repeat`).

What ranks do may differ in two ways that follow from their places: the partner of a message is the same rank, or one at the same distance; and the values
that a rank sends, such as the number of its first micro-batch, grow evenly from rank to rank. Both are read off from the first and the last rank, and
the middle one must do what is read off for it. All ranks must receive the same values: the same code does the same after it. Code that asks what has
arrived by now is not repeated, since the answer depends on the time. Whatever else differs raises `NotAlikeError`.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ttlaunch.runtime.comm.posted import PostedCommunicator
from ttlaunch.runtime.comm.protocol import CommunicationError, same_bytes
from ttlaunch.runtime.comm.turns import Script, WorldEndedError
from ttlaunch.runtime.comm.virtual_messages import Form, VirtualTransfer
from ttlaunch.runtime.comm.virtual_world import NotAlikeError, VirtualWorld
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute what takes so long on a rank that is not slow."""

    seconds: float


@dataclass(slots=True)  # not frozen, which would take longer than all else of an entry, of which there may be a million
class Post:
    """Begin a transfer.

    Attributes:
        form: The message's type and shape.
        values: What is sent, if values matter.
        has_values: Whether they do.
        operation: What the message is for, and which part of that, where the author's code says so.
    """

    peer: Rank
    tag: int
    is_send: bool
    form: Form
    values: Tensor | None
    has_values: bool
    operation: tuple[str, int | None] | None = None


@dataclass(slots=True)
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


@dataclass(frozen=True, slots=True)
class Update:
    """Update so many values: an update of a share, which takes each rank another time."""

    values: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Note numbers of the shares of all ranks of a role, of which the rank at a place has one; see `TrafficCounter.note_shares`."""

    place: int
    facts: tuple[tuple[str, tuple[int, ...]], ...]


Deed = Compute | Post | Wait | Step | Note | Update | Shares | End


class Author:
    """Runs the code of one rank in a thread of its own, and writes down what it does; stands where a rank has its world.

    The thread runs only while somebody waits for its next deed, so one thread runs at any time.

    Attributes:
        deeds: What the code has done so far.
        operation: Returns what a message is for that the code begins now; whoever runs the code may set it.
    """

    def __init__(self, rank: Rank, live: Callable[["Author"], None], *, carries: Callable[[Tensor], bool]) -> None:
        """Begin nothing yet.

        Args:
            rank: The rank.
            live: Runs its code; is given this author.
            carries: Whether the values of a tensor matter.
        """
        self.rank, self._carries = rank, carries
        self.operation: Callable[[], tuple[str, int | None] | None] = lambda: None
        self.deeds: list[Deed] = []
        self._count = 0  # of transfers
        self._tensors: dict[int, Tensor] = {}  # those of receives whose values matter, and are not there
        self._known = set[int]()  # the receives whose values are there
        self._forms: dict[tuple[torch.dtype, torch.Size], Form] = {}
        nothing = torch.empty(0)
        # What was sent last, its version, and its values.
        self._copy: tuple[Tensor, int | None, Tensor] = nothing, 0, nothing
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

    def go_on(self) -> int | None:
        """Run the code to its end, or to where it waits for values; these have to be handed over before it can go on.

        Returns:
            The number of the transfer that it waits for; None at its end.

        Raises:
            NotAlikeError: The code has failed, or what it does depends on the time.
        """
        self.deed(len(self.deeds))
        newest = self.deeds[-1]
        return newest.number if isinstance(newest, Wait) else None

    def expected(self, number: int) -> Tensor:
        """Return the tensor of a transfer that the code waits for; only its shape may be read."""
        return self._tensors[number]

    def receive(self, number: int, values: Tensor) -> None:
        """Hand over the values of a message for which the code waits."""
        with _disable_current_modes():
            self.receive_all([(number, values)])

    def receive_all(self, found: Iterable[tuple[int, Tensor]]) -> None:
        """Hand over the values of several messages, by their numbers; call this in a thread that computes as usual."""
        for number, values in found:
            tensor = self._tensors.pop(number, None)
            if tensor is not None:
                tensor.detach().copy_(values)
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
        has_values, number, values = self._carries(tensor), self._count, None
        if has_values and is_send:
            values = self._copied(tensor)
        elif has_values:
            self._tensors[number] = tensor
        key = tensor.dtype, tensor.shape
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = Form.of(tensor)
        self.deeds.append(Post(peer, tag, is_send, form, values, has_values, self.operation()))
        self._count += 1
        return Written(self, number, needs_values=has_values and not is_send)

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor: the same copy while it has not changed, since some tensors go to thousands of ranks."""
        sent, version, values = self._copy
        now = None if tensor.is_inference() else tensor._version  # noqa: SLF001  nothing else says whether a tensor has changed
        if sent is not tensor or version != now or now is None:
            with _disable_current_modes():
                values = tensor.detach().clone()
            self._copy = tensor, now, values
        return values

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


@dataclass(frozen=True, slots=True)
class Stretch:
    """Compute several things, one after the other."""

    each_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Posts:
    """Begin a transfer on each rank of a program.

    Attributes:
        first: What the first rank does.
        offset: How far the peer is from each rank; None: it is the same one for all.
        grown: By how much the values of the last rank are more than those of the first; None if they are the same.
    """

    first: Post
    offset: int | None
    grown: Tensor | None

    def peer(self, rank: Rank) -> Rank:
        return self.first.peer if self.offset is None else Rank(rank + self.offset)

    def values(self, place: int, count: int) -> Tensor | None:
        """Return what the rank at a place among so many ranks sends."""
        values = self.first.values
        if self.grown is None or values is None:
            return values
        with _disable_current_modes():
            return (values + self.grown * place / (count - 1)).to(values.dtype)


Shared = Stretch | Posts | Wait | Step | Note | End
"""What all ranks of a program do."""


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
        self._authors = [Author(one, live, carries=carries) for one in chosen]
        self._place_of = {rank: place for place, rank in enumerate(ranks)}
        self._found: dict[int, tuple[Shared, int]] = {}
        self._received: dict[int, Tensor] = {}

    def deed(self, place: int) -> tuple[Shared, int]:
        """Return what all ranks do at this place, and the place after that.

        Raises:
            NotAlikeError: The three ranks whose code runs do not do the same there.
        """
        found = self._found.get(place)
        if found is None:
            found = self._found[place] = self._find(place)
        return found

    def values(self, posts: Posts, rank: Rank) -> Tensor | None:
        """Return what a rank sends."""
        return posts.values(self._place_of[rank], len(self._place_of))

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
        elif known is not values:
            with _disable_current_modes():
                is_same = known.shape == values.shape and same_bytes(known, values)
            if not is_same:
                raise NotAlikeError(f"rank {rank} receives other values than ranks with the same code")

    def close(self) -> None:
        """End the threads of code that has not come to its end."""
        for author in self._authors:
            author.close()

    def _find(self, place: int) -> tuple[Shared, int]:
        each_s: list[float] = []
        with _disable_current_modes():  # the thread whose turn it is may be that of a rank without arithmetic
            while isinstance(deed := self._shared(place), Compute):
                each_s.append(deed.seconds)
                place += 1
        return (Stretch(tuple(each_s)), place) if each_s else (deed, place + 1)

    def _shared(self, place: int) -> Compute | Shared:
        """Read off what all ranks do from what the first and the last one do, and check it with the middle one."""
        first, middle, last = (author.deed(place) for author in self._authors)
        if isinstance(first, Update | Shares):
            self._refuse(place)
        if not isinstance(first, Post):
            return first if first == last == middle else self._refuse(place)
        if not isinstance(last, Post) or not isinstance(middle, Post):
            self._refuse(place)
        one, other = (deed.peer - author.rank for deed, author in ((first, self._authors[0]), (last, self._authors[2])))
        is_fixed = first.peer == last.peer
        if not _is_like(first, last) or not (is_fixed or one == other):
            self._refuse(place)
        grown = None
        if first.values is not None and last.values is not None and _differ(first.values, last.values):
            grown = last.values - first.values
        found = Posts(first, None if is_fixed else one, grown)
        rank = self._authors[1].rank
        values = self.values(found, rank)
        if (
            not _is_like(first, middle)
            or found.peer(rank) != middle.peer
            or (values is not None and middle.values is not None and _differ(values, middle.values))
        ):
            self._refuse(place)
        return found

    def _refuse(self, place: int) -> NoReturn:
        ranks = ", ".join(str(one.rank) for one in self._authors)
        raise NotAlikeError(f"the code of ranks {ranks} does not do the same from its operation {place} on")


def _is_like(one: Post, other: Post) -> bool:
    return (one.tag, one.is_send, one.has_values, one.form) == (other.tag, other.is_send, other.has_values, other.form)


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether what is sent may decide what its receiver does; bytes are packed numbers that have no values."""
    return one.dtype is not torch.uint8 and not same_bytes(one, other)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def repeat(
    program: Program,
    rank: Rank,
    world: VirtualWorld,
    *,
    step: Callable[[Step], object],
    note: Callable[[Mapping[str, int]], object],
) -> Script:
    """Do what a program says for a rank; yield where the rank has to wait.

    Cost: the messages of the program's code, with the same bytes.
    Order: that of the code; sums are not made again.

    Raises:
        NotAlikeError: The rank does not do the same as others with its code.
    """
    begun: list[tuple[VirtualTransfer | None, bool]] = []  # and whether received values matter; None: it is done
    place = 0
    while True:
        deed, place = program.deed(place)
        match deed:
            case Stretch(each_s):
                yield from world.compute_each(rank, each_s)
            case Posts(first):
                yield from world.living(rank)
                values, peer, tag, is_send = program.values(deed, rank), deed.peer(rank), first.tag, first.is_send
                transfer = world.begin(first.form, values, rank=rank, peer=peer, tag=tag, is_send=is_send)
                begun.append((transfer, first.has_values and not is_send))
            case Wait(number):
                waited, needs_values = begun[number]
                begun[number] = None, False
                if waited is not None:
                    yield from world.pauses((waited,))
                    values = _values_of(waited)
                    if needs_values and values is not None:
                        program.receive(number, values, rank)
            case Step():
                step(deed)
            case Note(facts):
                note(dict(facts))
            case End():
                return


def _values_of(transfer: VirtualTransfer) -> Tensor | None:
    """Return what a transfer, which is done, has brought, if values matter.

    Raises:
        CommunicationError: The other end does not match.
    """
    if transfer.batch.error is not None:
        raise CommunicationError(transfer.batch.error)
    return transfer.batch.values
