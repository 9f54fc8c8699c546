"""Tensors between the ranks of a world over gRPC; see `Communicator`."""

import os
import time
from collections.abc import Sequence

from torch import Tensor

from ttlaunch.runtime.comm.collectives import barrier
from ttlaunch.runtime.comm.grpc.channels import INLINE_BYTES, Transfer
from ttlaunch.runtime.comm.grpc.directory import Directory
from ttlaunch.runtime.comm.grpc.frames import Layout
from ttlaunch.runtime.comm.grpc.links import Links
from ttlaunch.runtime.comm.grpc.shared_state import StateSource
from ttlaunch.runtime.comm.grpc.vectors import bytes_of
from ttlaunch.runtime.comm.protocol import DTYPES, ENV_SYNCHRONOUS_SENDS, Pending, check_sendable
from ttlaunch.runtime.comm.staging import Arriving, Leaving, Staging, staging_for
from ttlaunch.runtime.world import Rank

_MOST_TAG = 2**32 - 1


class GrpcCommunicator:
    """Tensors between the ranks of a world. Waiting ranks sleep. CUDA tensors travel through pinned host memory.

    A send of a CUDA tensor returns when the tensor has been copied there.

    Cost: for each `CHUNK_BYTES` of a tensor, or part of it, one frame of those bytes and a header of 112 bytes. A tensor above
        `INLINE_BYTES` is sent when its receive has begun, so a sender that comes first waits for a round trip.
    """

    def __init__(self, directory: Directory, *, rank: Rank, staging: Staging | None = None) -> None:
        """Begin to listen; links are opened when they are first used.

        Args:
            staging: None: that of CUDA devices, once a tensor of one is sent or received.

        Raises:
            CommunicationError: The rank cannot listen where the directory says.
        """
        self.rank = rank
        self._among = [Rank(peer) for peer in range(len(directory.names))]
        self._staging = staging
        synchronous = os.environ.get(ENV_SYNCHRONOUS_SENDS) == "1"
        self._links = Links(directory, rank=rank, inline_bytes=-1 if synchronous else INLINE_BYTES)

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send and wait."""
        self.isend(tensor, dest=dest, tag=tag).wait()

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait.

        Raises:
            CommunicationError: The message has another dtype or shape, or the peer is gone.
        """
        self.irecv(tensor, source=source, tag=tag).wait()

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        self._check(tensor, dest, tag)
        staging = self._staging = staging_for(tensor, self._staging)
        leaving = None if staging is None else staging.leave(tensor, dest=dest, tag=tag)
        if leaving is not None:
            leaving.wait()  # the thread of the links may send at once
        message = _Message(tensor if leaving is None else leaving.host, self._links, staged=leaving)
        self._links.send(message.transfer, dest=dest, tag=tag)
        return message

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        self._check(tensor, source, tag)
        staging = self._staging = staging_for(tensor, self._staging)
        arriving = None if staging is None else staging.arrive(tensor, source=source, tag=tag)
        message = _Message(tensor if arriving is None else arriving.host, self._links, staged=arriving)
        self._links.receive(message.transfer, source=source, tag=tag)
        return message

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._links.changed:
            while True:
                for place, message in enumerate(pending):
                    if message.test():
                        return place
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._links.changed.wait(left)

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        barrier(self, among=self._among)

    @property
    def dropped_frames(self) -> int:
        """How many frames came from another epoch than this rank's, or from an earlier life of a worker, and were dropped."""
        return self._links.dropped

    def share_state(self, source: StateSource | None) -> None:
        """Let other workers of the run pull vectors of this rank, with `PeerClient`; None ends it.

        `Snapshots` is a source that copies. Another one may hold its vectors in another way, as long as the bytes that its
        `read` returns never change.
        """
        self._links.services.source = source

    def leave_epoch(self) -> None:
        """Fail all transfers with `EpochOverError`, those under way and those that begin, until `begin_epoch`; for any thread.

        When it returns, tensors of transfers that had not ended are neither read nor written any more.
        """
        self._links.leave()

    def begin_epoch(self, directory: Directory, *, rank: Rank) -> None:
        """Go on among other members; call it in every member, in any order and at any time.

        Streams to workers that stay go on, so the first message of the new epoch waits for no connection among them. Messages of
        the epoch before that are still on their way are dropped; those of a member that has begun sooner are kept for their receives.

        Args:
            directory: The members of the new epoch.
            rank: This worker's rank among them.

        Raises:
            ValueError: The epoch is not later than the one before.
        """
        self._links.begin(directory, rank=rank)
        self.rank = rank
        self._among = [Rank(peer) for peer in range(len(directory.names))]

    def close(self) -> None:
        """End all links. Collective: call it after a barrier."""
        self._links.close()

    def _check(self, tensor: Tensor, peer: Rank, tag: int) -> None:
        check_sendable(tensor)
        if not 0 <= peer < len(self._among):
            raise ValueError(f"there is no rank {peer} in a world of {len(self._among)}")
        if not 0 <= tag <= _MOST_TAG:
            raise ValueError(f"tag {tag} is not between 0 and {_MOST_TAG}")


class _Message:
    """A transfer, and the tensor in host memory whose bytes it reads or writes, which lives as long as the transfer."""

    __slots__ = ("_links", "_staged", "transfer")

    def __init__(self, host: Tensor, links: Links, *, staged: Leaving | Arriving | None) -> None:
        layout = Layout(DTYPES.index(host.dtype), tuple(host.shape), host.nbytes)
        self.transfer = Transfer(layout, bytes_of(host))
        self._links = links
        self._staged = staged

    def wait(self) -> None:
        with self._links.changed:
            while not self.transfer.done:
                self._links.changed.wait()
        if self.transfer.error is not None:
            raise self.transfer.error
        if self._staged is not None:
            self._staged.end()
            self._staged = None

    def test(self) -> bool:
        return self.transfer.done
