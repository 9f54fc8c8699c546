"""What a worker that joins gets from the memory of the others: weights, optimizer state and what else a step depends on.

    worker 0 -- bytes 0 .. S/2 --> joiner <-- bytes S/2 .. S -- worker 1        each member gives an equal part

A member copies its part when the epoch begins and then trains on, so what it gives is of one step, and the pause is that of a copy
of S/n bytes.

Shapes: S = bytes of the state, n = members that give.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ttlaunch.runtime.checkpoint.checkpoints import HasParameters, HasState, held_tensors
from ttlaunch.runtime.comm.grpc.directory import Directory
from ttlaunch.runtime.comm.grpc.shared_state import NotHeldError
from ttlaunch.runtime.comm.grpc.vectors import Key, bytes_of
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.early_stop import EarlyStop
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.blocks import contiguous_blocks

if TYPE_CHECKING:  # ranks of every recipe import this file, also where gRPC is not installed
    from ttlaunch.runtime.comm.grpc.client import PeerClient

_CALL_S = 3600.0  # a change of the members ends calls sooner
_MOST_CALLS = 8  # at a time


class ReplicaState:
    """All that a worker's next step depends on, as one row of S bytes.

    Attributes:
        size: S.
    """

    def __init__(
        self,
        model: HasParameters,
        optimizer: HasState,
        early_stop: EarlyStop,
        *,
        only: Sequence[Tensor] | None = None,
    ) -> None:
        """Refer to the tensors; nothing is copied.

        Args:
            model: The weights.
            optimizer: Its state, and that of its loss scaler.
            early_stop: Its numbers.
            only: The tensors that others get, where these are not all of the weights and the optimizer's state.

        Raises:
            ValueError: A tensor is not contiguous.
        """
        self._optimizer, self._early_stop = optimizer, early_stop
        self._scaler_names = list(optimizer.scaler_state() or {})
        self._numbers = torch.zeros(len(self.numbers()), dtype=torch.float64)
        held = [tensor for _, tensor in held_tensors(model, optimizer)] if only is None else only
        tensors = [*held, self._numbers]
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("an elastic run needs weights and optimizer state in contiguous tensors")
        self._rows = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        self.size = sum(len(row) for row in self._rows)

    def parts(self, count: int) -> list[range]:
        """Cut the row into equal parts; the numbers of the last one stay together, since members may differ in them."""
        tail = len(self._rows[-1])
        parts = contiguous_blocks(self.size - tail, count)
        return [*parts[:-1], range(parts[-1].start, self.size)]

    def copy(self, part: range) -> Tensor:
        """Return a copy of some bytes, uint8, on the CPU."""
        self._numbers.copy_(torch.tensor(self.numbers(), dtype=torch.float64))
        content = torch.empty(len(part), dtype=torch.uint8)
        for row, inside, at in self._overlaps(part):
            content[at.start : at.stop].copy_(row[inside.start : inside.stop])
        return content

    def fill(self, part: range, content: Tensor) -> None:
        """Overwrite some bytes; call `accept` after the last ones."""
        for row, inside, at in self._overlaps(part):
            row[inside.start : inside.stop].copy_(content[at.start : at.stop])

    def accept(self) -> None:
        """Use the numbers that have been filled in."""
        self.take_numbers(self._numbers.tolist())

    def numbers(self) -> list[float]:
        """Return the numbers that belong to the state: those of the early stop and of the loss scaler."""
        scaler = self._optimizer.scaler_state() or {}
        return [*self._early_stop.values(), *(float(scaler[name]) for name in self._scaler_names)]

    def take_numbers(self, values: Sequence[float]) -> None:
        """Use the numbers of another worker, from its `numbers`."""
        count = len(self._early_stop.values())
        self._early_stop.take(values[:count])
        if self._scaler_names:
            self._optimizer.restore_scaler(dict(zip(self._scaler_names, values[count:], strict=True)))

    def _overlaps(self, part: range) -> list[tuple[Tensor, range, range]]:
        """Return the rows that a part touches: each with its bytes in it, and where these are in the part."""
        found, begin = [], 0
        for row in self._rows:
            first, last = max(begin, part.start), min(begin + len(row), part.stop)
            if first < last:
                found.append((row, range(first - begin, last - begin), range(first - part.start, last - part.start)))
            begin += len(row)
        return found


class LaterState:
    """Takes a state from others, and puts it in place only when `put` is called: until then the present one is in use.

    Memory: S bytes.
    """

    def __init__(self, replica: ReplicaState) -> None:
        """Hold nothing yet."""
        self._replica = replica
        self._contents: list[tuple[range, Tensor]] = []

    def parts(self, count: int) -> list[range]:
        """Cut the row as `ReplicaState` does."""
        return self._replica.parts(count)

    def fill(self, part: range, content: Tensor) -> None:
        """Keep some bytes; the tensor must not change any more."""
        self._contents.append((part, content))

    def accept(self) -> None:
        """Change nothing yet."""

    def put(self) -> None:
        """Overwrite the present state."""
        for part, content in self._contents:
            self._replica.fill(part, content)
        self._replica.accept()


class SharedParts:
    """Copies that a worker gives away in one epoch; a `StateSource`. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int, int], tuple[int, Tensor]] = {}

    def hold(self, key: Key, content: Tensor) -> None:
        """Give away values `key.first` to `key.last` of a vector; the tensor must not change any more."""
        with self._lock:
            self._held[key.name, key.step, key.epoch] = key.first, content

    def forget(self) -> None:
        """Give nothing away any more."""
        with self._lock:
            self._held.clear()

    def newest(self, name: str) -> int | None:
        with self._lock:
            return max((step for held, step, _ in self._held if held == name), default=None)

    def read(self, key: Key) -> memoryview:
        with self._lock:
            first, content = self._held.get((key.name, key.step, key.epoch), (0, None))
        if content is None or key.start or key.size or not first <= key.first <= key.last <= first + len(content):
            raise NotHeldError(f"`{key.name}` of step {key.step} is not held in epoch {key.epoch}, or not these values")
        return bytes_of(content[key.first - first : key.last - first])


class OpenClients:
    """Clients that are closed when an epoch ends, so that no call outlives it. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[PeerClient] = set()

    @contextmanager
    def closed_at_end(self, client: "PeerClient") -> "Iterator[PeerClient]":
        """Close a client when the block or the epoch ends, whatever comes first."""
        with self._lock:
            self._open.add(client)
        try:
            yield client
        finally:
            with self._lock:
                self._open.discard(client)
            client.close()

    def close(self) -> None:
        """Close all clients; their calls fail."""
        with self._lock:
            for client in self._open:
                client.close()


class Puller:
    """Calls to the members of an epoch that give what this worker lacks."""

    def __init__(
        self,
        directory: Directory,
        *,
        own: Rank,
        check: Callable[[], object],
        pause: Callable[[], object],
        closed_at_end: "Callable[[PeerClient], AbstractContextManager[PeerClient]]",
    ) -> None:
        """Make no call yet.

        Args:
            directory: The members.
            own: This worker's rank among them.
            check: Raises `EpochOverError` when the epoch is over.
            pause: Sleeps a moment, before a member is asked again that does not have what it shall give yet.
            closed_at_end: Closes a client when the block or the epoch ends, whatever comes first.
        """
        self._directory, self._own = directory, own
        self._check, self._pause, self._closed_at_end = check, pause, closed_at_end

    def pull(self, key: Key, into: Tensor, *, source: Rank) -> None:
        """Fill a tensor with values of a vector, as soon as the member holds them.

        Raises:
            EpochOverError: The members change meanwhile.
            CommunicationError: The member is gone, or answers as no member does.
        """
        from ttlaunch.runtime.comm.grpc.client import PeerClient  # noqa: PLC0415  as above

        client = PeerClient(self._directory, own=self._own, rank=source, timeout_s=_CALL_S)
        with self._closed_at_end(client):
            while True:
                self._check()
                try:
                    client.pull(key, into)
                except NotHeldError:
                    self._pause()
                except (CommunicationError, ValueError):  # gRPC raises `ValueError` for a call on a closed channel
                    self._check()
                    raise
                else:
                    return

    def pull_parts(self, key: Key, state: ReplicaState | LaterState, *, sources: Sequence[Rank]) -> list[int]:
        """Fill a state with equal parts from several members, and return how many bytes each has given.

        Raises:
            EpochOverError, CommunicationError: As for `pull`; the state is then undefined.

        Memory: S bytes.
        """
        parts = state.parts(len(sources))
        contents = [torch.empty(len(part), dtype=torch.uint8) for part in parts]
        self._pull_together(key, parts, contents, sources=sources)
        for part, content in zip(parts, contents, strict=True):
            state.fill(part, content)
        state.accept()
        return [len(part) for part in parts]

    def pull_vector(self, key: Key, into: Tensor, *, sources: Sequence[Rank]) -> list[int]:
        """Fill a vector with equal parts from several members that have all of it; return how many bytes each has given.

        Raises:
            EpochOverError, CommunicationError: As for `pull`; the vector is then undefined.
        """
        parts = contiguous_blocks(len(into), len(sources))
        contents = [into[part.start : part.stop] for part in parts]
        self._pull_together(key, parts, contents, sources=sources)
        return [content.nbytes for content in contents]

    def _pull_together(
        self, key: Key, parts: Sequence[range], contents: Sequence[Tensor], *, sources: Sequence[Rank]
    ) -> None:
        def pull_part(source: Rank, part: range, content: Tensor) -> None:
            self.pull(key._replace(first=part.start, last=part.stop), content, source=source)

        with ThreadPoolExecutor(min(_MOST_CALLS, len(sources)), thread_name_prefix="pull") as pool:
            list(pool.map(pull_part, sources, parts, contents))
