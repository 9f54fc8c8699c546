"""The calls that a rank answers beside the streams of tensors; `PeerClient` makes them.

All run in the thread of the streams, so no answer may wait for the rank itself.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import grpc
import grpc.aio
from torch import Tensor

from ttlaunch.runtime.comm.grpc.directory import Peer
from ttlaunch.runtime.comm.grpc.frames import BadFrameError
from ttlaunch.runtime.comm.grpc.node_sums import Assembly, NodeSums, StoreFullError
from ttlaunch.runtime.comm.grpc.pieces import MOST_UNARY_BYTES, Piece, PieceKind, pack_piece, parse_piece, pieces_of
from ttlaunch.runtime.comm.grpc.shared_state import NotHeldError, StateSource
from ttlaunch.runtime.comm.grpc.vectors import Key, bytes_of

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


@dataclass(frozen=True)
class Position:
    """Where a worker is: its epoch, who it is, and the members of that epoch."""

    epoch: int
    own: Peer
    members: Collection[Peer]


class Services:
    """What one rank answers.

    Attributes:
        source: Where its vectors are read from; None if it gives none away.
        dropped: How many sums of other epochs were refused.
    """

    def __init__(self, identify: Callable[[Context], Awaitable[Peer]], position: Callable[[], Position]) -> None:
        """Answer calls of those that `identify` lets in; `position` returns where this worker is now."""
        self.source: StateSource | None = None
        self.dropped = 0
        self._identify = identify
        self._position = position
        self._sums = NodeSums()
        self._news = asyncio.Event()  # replaced when it is set: whatever others wait for may have come

    def handlers(self, *, link: Callable[..., Awaitable[None]]) -> "dict[str, grpc.RpcMethodHandler[bytes, bytes]]":
        """Return what answers each call of `docs/reference/peer.proto`; `link` answers the stream of tensors."""
        return {
            "Link": grpc.stream_stream_rpc_method_handler(link),
            "Ping": grpc.unary_unary_rpc_method_handler(self._ping),
            "GetParameters": grpc.unary_unary_rpc_method_handler(self._get),
            "StreamParameters": grpc.unary_stream_rpc_method_handler(self._stream),
            "SendGradients": grpc.stream_unary_rpc_method_handler(self._receive_sum),
            "ReduceScatter": grpc.stream_stream_rpc_method_handler(self._exchange),
            "AllGather": grpc.stream_stream_rpc_method_handler(self._exchange),
        }

    async def _ping(self, request: bytes, context: Context) -> bytes:
        asked = await self._parsed(request, context)
        position = self._position()
        step = self.source.newest(asked.key.name) if self.source is not None else None
        return pack_piece(
            Piece(PieceKind.BEAT, Key(asked.key.name, step or 0, 0, 0, epoch=position.epoch), position.own.incarnation)
        )

    async def _get(self, request: bytes, context: Context) -> bytes:
        key, content = await self._read(request, context)
        if len(content) > MOST_UNARY_BYTES:
            words = f"{len(content)} bytes are more than {MOST_UNARY_BYTES}; call StreamParameters"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        return pack_piece(Piece(PieceKind.PIECE, key, self._position().own.incarnation, 0, len(content), content))

    async def _stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        key, content = await self._read(request, context)
        for data in pieces_of(key, [content], incarnation=self._position().own.incarnation):
            yield data

    async def identify_member(self, context: Context) -> Peer:
        """Return which member of this epoch makes a call; refuse anybody else."""
        caller, position = await self._identify(context), self._position()
        if caller not in position.members:
            words = f"worker {caller.worker} is no member of epoch {position.epoch}"
            await context.abort(grpc.StatusCode.NOT_FOUND, words)
        return caller

    def begin_epoch(self) -> None:
        """Drop the sums of the epoch before, and let everybody know who waits for their total."""
        self._sums.clear()
        self._announce()

    async def _receive_sum(self, _requests: AsyncIterator[bytes], context: Context) -> bytes:
        await self.identify_member(context)
        kind, key, total = PieceKind.RECEIVED, Key("", 0, 0, 0), 0
        async for key, sum_N in self._received(context):
            kind = PieceKind.RECEIVED if await self._kept(key, sum_N, context) else PieceKind.DUPLICATE
            total = sum_N.nbytes
        return pack_piece(Piece(kind, key, self._position().own.incarnation, total=total))

    async def _exchange(self, _requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Take sums, and answer with the values of the total that the first message asks for, as soon as all have come."""
        taker = await self.identify_member(context)
        wanted = (await self._parsed(await context.read(), context)).key
        await self._check_epoch(wanted, context)
        async for key, sum_N in self._received(context):
            await self._kept(key, sum_N, context)
        while (parts := self._sums.total(wanted)) is None:
            await self._news.wait()
            await self._check_epoch(wanted, context)
        position = self._position()
        contents = [bytes_of(part) for part in parts]
        for data in pieces_of(wanted, contents, incarnation=position.own.incarnation):
            yield data
        self._sums.take(wanted, taker, members=len(position.members))

    async def _received(self, context: Context) -> AsyncIterator[tuple[Key, Tensor]]:
        """Return the sums that a caller sends, until its stream ends."""
        assembly = Assembly()
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                whole = assembly.feed(parse_piece(data))
                if whole is not None:
                    yield whole
            assembly.check_ended()
        except BadFrameError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _kept(self, key: Key, sum_N: Tensor, context: Context) -> bool:
        """Keep a sum; return whether it is new."""
        await self._check_epoch(key, context)
        try:
            is_new = self._sums.put(key, sum_N)
        except StoreFullError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            raise
        self._announce()
        return is_new

    async def _check_epoch(self, key: Key, context: Context) -> None:
        epoch = self._position().epoch
        if key.epoch != epoch:
            self.dropped += 1
            await context.abort(grpc.StatusCode.ABORTED, f"this rank is in epoch {epoch}, not in {key.epoch}")

    def _announce(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _read(self, request: bytes, context: Context) -> tuple[Key, memoryview]:
        """Return the vector that a request asks for, with its real step."""
        asked = await self._parsed(request, context)
        try:
            return _found(self.source, asked)
        except NotHeldError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise

    async def _parsed(self, request: bytes, context: Context) -> Piece:
        await self._identify(context)
        try:
            return parse_piece(request)
        except BadFrameError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise


def _found(source: StateSource | None, asked: Piece) -> tuple[Key, memoryview]:
    if source is None:
        raise NotHeldError("this rank gives no state away")
    key = asked.key
    if asked.kind == PieceKind.NEWEST:
        newest = source.newest(key.name)
        if newest is None or newest < key.step:
            raise NotHeldError(f"`{key.name}` of step {key.step} or later is not held; newest step: {newest}")
        key = key._replace(step=newest)
    return key, source.read(key)
