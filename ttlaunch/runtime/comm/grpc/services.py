"""The calls that a rank answers beside the streams of tensors; `PeerClient` makes them.

All run in the thread of the streams, so no answer may wait for the rank itself.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import grpc
import grpc.aio

from ttlaunch.runtime.comm.grpc.directory import Peer
from ttlaunch.runtime.comm.grpc.frames import CHUNK_BYTES, BadFrameError
from ttlaunch.runtime.comm.grpc.pieces import MOST_UNARY_BYTES, Key, Piece, PieceKind, pack_piece, parse_piece
from ttlaunch.runtime.comm.grpc.shared_state import NotHeldError, StateSource

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class Services:
    """What one rank answers.

    Attributes:
        source: Where its vectors are read from; None if it gives none away.
    """

    def __init__(self, identify: Callable[[Context], Awaitable[Peer]], position: Callable[[], tuple[int, int]]) -> None:
        """Answer calls of those that `identify` lets in; `position` returns the epoch and this worker's incarnation."""
        self.source: StateSource | None = None
        self._identify = identify
        self._position = position

    def handlers(self) -> "dict[str, grpc.RpcMethodHandler[bytes, bytes]]":
        return {
            "Ping": grpc.unary_unary_rpc_method_handler(self._ping),
            "GetParameters": grpc.unary_unary_rpc_method_handler(self._get),
            "StreamParameters": grpc.unary_stream_rpc_method_handler(self._stream),
        }

    async def _ping(self, request: bytes, context: Context) -> bytes:
        asked = await self._parsed(request, context)
        epoch, incarnation = self._position()
        step = self.source.newest(asked.key.name) if self.source is not None else None
        return pack_piece(Piece(PieceKind.BEAT, Key(asked.key.name, step or 0, 0, 0, epoch=epoch), incarnation))

    async def _get(self, request: bytes, context: Context) -> bytes:
        key, content = await self._read(request, context)
        if len(content) > MOST_UNARY_BYTES:
            words = f"{len(content)} bytes are more than {MOST_UNARY_BYTES}; call StreamParameters"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        return pack_piece(Piece(PieceKind.PIECE, key, self._position()[1], 0, len(content), content))

    async def _stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        key, content = await self._read(request, context)
        incarnation = self._position()[1]
        for offset in range(0, len(content) or 1, CHUNK_BYTES):
            payload = content[offset : offset + CHUNK_BYTES]
            yield pack_piece(Piece(PieceKind.PIECE, key, incarnation, offset, len(content), payload))

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
