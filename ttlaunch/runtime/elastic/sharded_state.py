"""How a worker of an elastic run gets its slots of a state that is cut, from the members that have had them.

At the begin of an epoch a member copies, for each other one, what that one needs of its slots; the other pulls it. So there is one
call for each pair of members that share something, and what is given is of one step although the giver trains on.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.comm.grpc.vectors import Key
from ttlaunch.runtime.elastic.state_transfer import Puller, SharedParts
from ttlaunch.runtime.world import Rank

_MOST_CALLS = 8  # at a time


class SlotExchange:
    """What members give each other at the begin of one epoch.

    Attributes:
        begin: The order with which it begins.
        place: This member's place.
        received: How many bytes of state each other member has given, by number.
    """

    def __init__(self, begin: Begin, place: int, *, puller: Puller, parts: SharedParts) -> None:
        """Give and get nothing yet."""
        self.begin, self.place = begin, place
        self.received: dict[int, int] = {}
        self._puller, self._parts = puller, parts

    def offer(self, name: str, content: Tensor, *, to: int | None = None) -> None:
        """Give a vector to the member at a place, or to all; it must not change any more."""
        self._parts.hold(self._key(name, len(content), to=to), content)

    def pull(self, name: str, into: Tensor, *, source: int) -> None:
        """Get a vector that the member at a place gives to all, as soon as it does.

        Raises:
            EpochOverError, CommunicationError: As for `Puller.pull`.
        """
        self._puller.pull(self._key(name, len(into)), into, source=Rank(source))

    def pull_own(self, name: str, into: Mapping[int, Tensor]) -> None:
        """Get the vectors that members give to this one, by their places.

        Raises:
            EpochOverError, CommunicationError: As for `Puller.pull`; the vectors are then undefined.
        """

        def pull(source: int) -> None:
            key = self._key(name, len(into[source]), to=self.place)
            self._puller.pull(key, into[source], source=Rank(source))

        if not into:
            return
        with ThreadPoolExecutor(min(_MOST_CALLS, len(into)), thread_name_prefix="pull") as pool:
            list(pool.map(pull, into))
        for source, content in into.items():
            number = self.begin.numbers[source]
            self.received[number] = self.received.get(number, 0) + content.nbytes

    def _key(self, name: str, count: int, *, to: int | None = None) -> Key:
        whole = name if to is None else f"{name} for {to}"
        return Key(whole, self.begin.applied, 0, count, epoch=self.begin.epoch)
