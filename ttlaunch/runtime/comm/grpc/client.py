"""Calls to one rank of a run that talks over gRPC, for a worker that joins and for whoever watches; see `PeerClient`."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from torch import Tensor

from ttlaunch.runtime.comm.grpc.directory import Directory
from ttlaunch.runtime.comm.grpc.frames import BadFrameError
from ttlaunch.runtime.comm.grpc.peers import SERVICE, metadata_of, route_between, target_of, words_of
from ttlaunch.runtime.comm.grpc.pieces import MOST_UNARY_BYTES, Piece, PieceKind, pack_piece, parse_piece, pieces_of
from ttlaunch.runtime.comm.grpc.shared_state import NotHeldError
from ttlaunch.runtime.comm.grpc.vectors import Key, bytes_of
from ttlaunch.runtime.comm.protocol import CommunicationError, EpochOverError, PeerLostError, check_sendable
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        epoch: The epoch that it is in.
        incarnation: Its life.
        step: The newest step of which it holds the vector that was asked about; 0 if it holds none.
        seconds: How long the answer took.
    """

    epoch: int
    incarnation: int
    step: int
    seconds: float


class PeerClient:
    """Calls to one rank; every call ends within its time limit. Any thread may make them.

    A connection is opened by the first call. Use it in a `with` statement, or call `close`.
    """

    def __init__(self, directory: Directory, *, own: Rank, rank: Rank, timeout_s: float = 60.0) -> None:
        """Prepare calls to a rank.

        Args:
            directory: The ranks of the run.
            own: Which of them makes the calls.
            rank: Which of them answers.
            timeout_s: After how long a call gives up.
        """
        route = route_between(directory, own, rank)
        target = target_of(route, directory)
        self._name = route.name
        self._incarnation = route.own.incarnation
        self._limits = {"timeout": timeout_s, "metadata": metadata_of(route.own, directory.world)}
        if target.credentials is None:
            self._channel = grpc.insecure_channel(target.address, options=target.options)
        else:
            self._channel = grpc.secure_channel(target.address, target.credentials, options=target.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def ping(self, name: str = "parameters") -> Beat:
        """Ask whether the rank lives, and up to which step it holds a vector."""
        begin = time.monotonic()
        answer = self._ask("Ping", PieceKind.BEAT, Key(name, 0, 0, 0))
        return Beat(answer.key.epoch, answer.incarnation, answer.key.step, time.monotonic() - begin)

    def get(self, key: Key, *, or_newer: bool = False) -> tuple[int, bytes]:
        """Return the step and the bytes of a short range of a vector.

        Raises:
            NotHeldError: The rank does not hold this vector of this step or, with `or_newer`, of a later one.
            CommunicationError: These are more than `MOST_UNARY_BYTES`, the rank did not answer, or not as a rank does.
        """
        answer = self._ask("GetParameters", PieceKind.NEWEST if or_newer else PieceKind.WHICH, key)
        self._check(answer, key, or_newer=or_newer)
        return answer.key.step, bytes(answer.payload)

    def pull(self, key: Key, into: Tensor, *, or_newer: bool = False) -> int:
        """Fill a tensor with a range of a vector, of any length, and return its step.

        Args:
            key: The vector, its step, and the range of values.
            into: Contiguous, on the CPU, with as many bytes as these values; undefined after an error.
            or_newer: Whether a later step will do.

        Memory: about two pieces of 1 MiB beside the tensor.

        Raises:
            NotHeldError: The rank does not hold this vector of this step or, with `or_newer`, of a later one.
            CommunicationError: It has another length, the rank did not answer in time, or not as a rank does.
        """
        check_sendable(into)
        request = self._request(PieceKind.NEWEST if or_newer else PieceKind.WHICH, key)
        with self._errors():
            method = self._channel.unary_stream(f"/{SERVICE}/StreamParameters")
            return self._fill(method(request, **self._limits), key, into, or_newer=or_newer)

    def send_gradients(self, key: Key, sum_N: Tensor) -> bool:
        """Give a sum over a node of the tree to the rank; return False if it had it already.

        Args:
            key: The node, and the values of it that these are.
            sum_N: Float32, contiguous, on the CPU.

        Raises:
            EpochOverError: The rank is in another epoch.
            CommunicationError: It did not answer in time, has no room, or the key is no node of the tree.
        """
        check_sendable(sum_N)
        pieces = _Requests(pieces_of(key, [bytes_of(sum_N)], incarnation=self._incarnation))
        with self._errors():
            call = self._channel.stream_unary(f"/{SERVICE}/SendGradients")
            answer = parse_piece(pieces.checked(call(pieces, **self._limits)))
        self._check(answer, key)
        return answer.kind == PieceKind.RECEIVED

    def reduce_scatter(self, wanted: Key, nodes: Mapping[Key, Tensor], into: Tensor) -> None:
        """Give sums over nodes to the rank, and wait for values of the total over all leaves.

        The bits are those of the tree over the leaves, whoever sends which nodes, and in whichever ranges of values.

        Args:
            wanted: The values to return of the sum of leaves 0 to `wanted.size`.
            nodes: The caller's nodes, as for `send_gradients`; together with those of others they cover the leaves.
            into: Gets these values; float32, contiguous, on the CPU.

        Raises:
            EpochOverError: The rank is in another epoch, or begins one meanwhile.
            CommunicationError: Not all sums came in time, or as for `send_gradients`.
        """
        self._exchange("ReduceScatter", wanted, nodes, into=into)

    def all_gather(self, wanted: Key, own: Key, shard: Tensor, *, into: Tensor) -> None:
        """Give a shard of a vector to the rank, and wait for the shards of the others.

        Args:
            wanted: The values to return; its `size` is 1.
            own: The values of the shard.
            shard: The shard itself.
            into: Gets the wanted values; the tensors are float32, contiguous, on the CPU.

        Raises:
            EpochOverError: The rank is in another epoch, or begins one meanwhile.
            CommunicationError: Not all shards came in time, or as for `send_gradients`.
        """
        self._exchange("AllGather", wanted, {own: shard}, into=into)

    def _exchange(self, method: str, wanted: Key, nodes: Mapping[Key, Tensor], *, into: Tensor) -> None:
        for tensor in (into, *nodes.values()):
            check_sendable(tensor)
        messages = [[self._request(PieceKind.WHICH, wanted)]] + [
            pieces_of(key, [bytes_of(sum_N)], incarnation=self._incarnation) for key, sum_N in nodes.items()
        ]
        pieces = _Requests(chain.from_iterable(messages))
        with self._errors():
            call = self._channel.stream_stream(f"/{SERVICE}/{method}")(pieces, **self._limits)
            self._fill(call, wanted, into)
            pieces.checked(None)

    def _fill(self, call: Any, key: Key, into: Tensor, *, or_newer: bool = False) -> int:
        """Fill a tensor with the pieces that come; return their step."""
        view, moved = bytes_of(into), 0
        try:
            for data in call:
                piece = parse_piece(data)
                self._check(piece, key, or_newer=or_newer)
                if (piece.total, piece.offset) != (len(view), moved):
                    words = (
                        f"{piece.total} bytes of `{key.name}` from {piece.offset}, expected {len(view)} from {moved}"
                    )
                    raise BadFrameError(words)
                view[moved : moved + len(piece.payload)] = piece.payload
                moved, key, or_newer = moved + len(piece.payload), piece.key, False
        finally:
            call.cancel()
        if moved != len(view):
            raise BadFrameError(f"{moved} of {len(view)} bytes of `{key.name}`")
        return key.step

    def _ask(self, method: str, kind: PieceKind, key: Key) -> Piece:
        request = self._request(kind, key)
        with self._errors():
            call = self._channel.unary_unary(f"/{SERVICE}/{method}")
            return parse_piece(call(request, **self._limits), most_bytes=MOST_UNARY_BYTES)

    def _request(self, kind: PieceKind, key: Key) -> bytes:
        return pack_piece(Piece(kind, key, self._incarnation))

    def _check(self, piece: Piece, key: Key, *, or_newer: bool = False) -> None:
        """Refuse an answer to another question, above all one of an earlier step."""
        is_late_enough = piece.key.step >= key.step if or_newer else piece.key.step == key.step
        if not is_late_enough or piece.key != key._replace(step=piece.key.step):
            raise CommunicationError(f"{self._name} answered {piece.key}, asked for {key}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Name the rank in every error."""
        try:
            yield
        except BadFrameError as error:
            raise CommunicationError(f"{self._name} sent {error}") from error
        except grpc.RpcError as error:
            status, words = error.code(), f"{self._name}: {words_of(error.details())}"
            if status == grpc.StatusCode.FAILED_PRECONDITION:
                raise NotHeldError(words) from error
            if status == grpc.StatusCode.ABORTED:
                raise EpochOverError(words) from error
            if status in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                raise PeerLostError(words) from error
            raise CommunicationError(words) from error


_Answer = TypeVar("_Answer")


class _Requests:
    """The messages of a call. If making one fails, the stream ends there: gRPC would let a call with an error in it wait for ever."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages = iter(messages)
        self._error: Exception | None = None

    def __iter__(self) -> "_Requests":
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise StopIteration from error

    def checked(self, answer: _Answer) -> _Answer:
        """Return the answer of the call if all messages were sent."""
        if self._error is not None:
            raise self._error
        return answer
