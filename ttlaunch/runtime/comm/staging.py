"""Host memory through which tensors of a device travel, and the copies there and back, which run beside the computation.

A send copies the tensor to host memory on a stream of its own, as soon as the device has computed the tensor; the rank goes on
meanwhile, and the transport sends when the copy is complete. A receive copies back when `wait()` is called, and the device's
work that is queued later waits for that copy. Host memory is pinned, since only then do copies not stop the rank, and is kept
for the next messages of the same peer, tag and size, so that the transport finds its requests again.

The copies themselves are behind `Copier`: that of CUDA is in `cuda_copier.py`.
"""

from typing import Protocol

from torch import Tensor

from ttlaunch.runtime.comm.protocol import check_sendable

MOST_IDLE_BYTES = 2**30
"""The most host memory that is kept for later messages, of all sizes together; the oldest is freed first."""

_LEAST_ROOM = 4096
_STEPS = 8  # sizes of rooms between two powers of 2, so at most an eighth of a room is unused

Key = tuple[int, int, bool]
"""What a room is kept for: the peer, the tag, and whether messages leave."""


class Copied(Protocol):
    """A copy under way."""

    def is_done(self) -> bool:
        """Return whether the copy is complete."""

    def wait(self) -> None:
        """Return when it is."""


class Copier(Protocol):
    """Copies between the memory of a device and the host's."""

    def takes(self, tensor: Tensor) -> bool:
        """Return whether messages of this tensor travel through host memory of its own."""

    def allocate(self, size: int) -> Tensor:
        """Return host memory of `size` bytes: shape `(size,)`, uint8; it is freed with the last tensor that refers to it."""

    def now(self, tensor: Tensor) -> object:
        """Return a mark of what has been queued up to now for the tensor's device, for `fill`."""

    def fetch(self, tensor: Tensor, host: Tensor) -> Copied:
        """Begin to copy a tensor to the host, after what has been queued for its device up to now."""

    def fill(self, tensor: Tensor, host: Tensor, *, since: object) -> Copied:
        """Begin to copy from the host, after what had been queued at the mark; what is queued later comes after the copy."""


class Room:
    """Host memory for one message at a time.

    Attributes:
        memory: Its bytes, shape `(size,)`.
        reading: The copy that still reads the memory; None if there is none.
        number: How many rooms were given back before this one; the lowest was used longest ago.
    """

    __slots__ = ("key", "memory", "number", "reading")

    def __init__(self, memory: Tensor, key: Key) -> None:
        self.memory = memory
        self.key = key
        self.reading: Copied | None = None
        self.number = 0

    def is_free(self) -> bool:
        """Return whether no copy reads the memory any more."""
        if self.reading is not None and self.reading.is_done():
            self.reading = None
        return self.reading is None


class Rooms:
    """Rooms that wait for the next message of their peer, tag and size.

    Memory: that of the messages under way, and at most `most_idle_bytes`.
    """

    def __init__(self, copier: Copier, *, most_idle_bytes: int = MOST_IDLE_BYTES) -> None:
        self._copier = copier
        self._most_idle_bytes = most_idle_bytes
        self._idle: dict[tuple[int, Key], list[Room]] = {}
        self._given = 0
        self.idle_bytes = 0

    def take(self, size: int, key: Key) -> Room:
        """Return a room of at least `size` bytes, the one that was used longest ago if there is one."""
        size = room_bytes(size)
        rooms = self._idle.get((size, key), [])
        for place, room in enumerate(rooms):
            if room.is_free():
                self.idle_bytes -= size
                return rooms.pop(place)
        return Room(self._copier.allocate(size), key)

    def give_back(self, room: Room, *, reading: Copied | None = None) -> None:
        """Keep a room for the next message; a copy may still read it."""
        room.reading, room.number = reading, self._given
        self._given += 1
        self._idle.setdefault((room.memory.nbytes, room.key), []).append(room)
        self.idle_bytes += room.memory.nbytes
        while self.idle_bytes > self._most_idle_bytes:
            self._free_oldest()

    def _free_oldest(self) -> None:
        rooms = min((rooms for rooms in self._idle.values() if rooms), key=lambda rooms: rooms[0].number)
        room = rooms.pop(0)
        self.idle_bytes -= room.memory.nbytes
        if room.reading is not None:
            room.reading.wait()


def room_bytes(size: int) -> int:
    """Return the size of the room that a message of `size` bytes gets."""
    step = max(_LEAST_ROOM, 1 << max(0, size.bit_length() - 1)) // _STEPS
    return max(_LEAST_ROOM, -(-size // step) * step)


class Staging:
    """Gives messages their rooms, and begins the copies."""

    def __init__(self, copier: Copier, *, most_idle_bytes: int = MOST_IDLE_BYTES) -> None:
        self._copier = copier
        self.rooms = Rooms(copier, most_idle_bytes=most_idle_bytes)

    def leave(self, tensor: Tensor, *, dest: int, tag: int) -> "Leaving | None":
        """Begin to copy a tensor that is to be sent; None for one that travels from where it is."""
        if not self._copier.takes(tensor):
            return None
        check_sendable(tensor)
        room = self.rooms.take(tensor.nbytes, (dest, tag, True))
        host = _as(room, tensor)
        return Leaving(self.rooms, room, host, tensor=tensor, copied=self._copier.fetch(tensor, host))

    def arrive(self, tensor: Tensor, *, source: int, tag: int) -> "Arriving | None":
        """Make room for a tensor that is to be received; None for one whose values arrive where it is."""
        if not self._copier.takes(tensor):
            return None
        check_sendable(tensor)
        room = self.rooms.take(tensor.nbytes, (source, tag, False))
        return Arriving(self.rooms, room, _as(room, tensor), tensor=tensor, copier=self._copier)


def staging_for(tensor: Tensor, known: Staging | None) -> Staging | None:
    """Return the staging of all messages from this tensor on: the known one, else that of CUDA devices for the first tensor of a device."""
    if known is not None or tensor.is_cpu:
        return known
    from ttlaunch.runtime.comm.cuda_copier import CudaCopier  # noqa: PLC0415  only ranks with such tensors

    return Staging(CudaCopier())


class Leaving:
    """A tensor on its way to host memory.

    Attributes:
        host: The tensor's values, once `is_copied`.
    """

    def __init__(self, rooms: Rooms, room: Room, host: Tensor, *, tensor: Tensor, copied: Copied) -> None:
        self.host = host
        self._rooms = rooms
        self._room: Room | None = room
        self._copied: Copied | None = copied
        self._tensor: Tensor | None = tensor  # its memory must not be used otherwise while it is copied

    def is_copied(self) -> bool:
        """Return whether `host` has the tensor's values, and the tensor may change."""
        if self._copied is not None and self._copied.is_done():
            self._copied = self._tensor = None
        return self._copied is None

    def wait(self) -> None:
        """Return when it has."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = self._tensor = None

    def end(self) -> None:
        """Note that the message has been sent: nothing reads `host` any more."""
        if self._room is not None:
            room, self._room = self._room, None
            self._rooms.give_back(room)


class Arriving:
    """Room for a tensor that is received.

    Attributes:
        host: Where the transport puts the values.
    """

    def __init__(self, rooms: Rooms, room: Room, host: Tensor, *, tensor: Tensor, copier: Copier) -> None:
        self.host = host
        self._rooms = rooms
        self._room: Room | None = room
        self._tensor = tensor
        self._copier = copier
        self._since = copier.now(tensor)

    def end(self) -> None:
        """Copy the values, which have arrived, to the tensor; what is queued for the device from now on finds them there."""
        if self._room is not None:
            room, self._room = self._room, None
            reading = self._copier.fill(self._tensor, self.host, since=self._since)
            self._rooms.give_back(room, reading=reading)


def _as(room: Room, tensor: Tensor) -> Tensor:
    """Return the room's memory as a tensor of the same dtype and shape as another one."""
    return room.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
