"""The gRPC streams between one rank and its peers: one for each direction in which messages flow.

The sender opens the stream; the receiver's answers come back on it. One thread runs all streams of a rank, and sleeps while
nothing moves. The rank's own thread hands it transfers and waits under one condition.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

# Python's child processes of a rank must not run gRPC's fork handlers, which wait for its threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio

from ttlaunch import contract
from ttlaunch.runtime.comm.grpc.channels import INLINE_BYTES, Incoming, Outgoing, Transfer
from ttlaunch.runtime.comm.grpc.directory import Directory
from ttlaunch.runtime.comm.grpc.frames import MOST_BYTES, BadFrameError, parse
from ttlaunch.runtime.comm.protocol import CommunicationError, PeerLostError
from ttlaunch.runtime.world import Rank

SERVICE = "ttlaunch.v1.Peer"
_LINK = f"/{SERVICE}/Link"
_RANK, _WORLD = "ttlaunch-rank", "ttlaunch-world"  # metadata of a stream
_REACH_S = 300.0  # from the opening of the transport on; other ranks may take as long to import torch
_LOOK_S = 0.01
_FLUSH_S = 2.0
_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server closes connections that send pings more often than this; its own default is 300 s.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.enable_retries", 0),
    # A fixed window: gRPC's own estimate of a fast network's makes it receive tens of megabytes ahead.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 * 2**20),
    ("grpc.so_reuseport", 0),  # another process must not be able to listen on the same port
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),  # a user's proxy is no way to a peer
)


_End = TypeVar("_End", Outgoing, Incoming)


@dataclass(eq=False)
class _Channel(Generic[_End]):
    """One end of the messages between two ranks, and the state of its stream.

    Attributes:
        woken: Set when there may be frames to send.
        is_awake: Whether `woken` is set, or frames are being sent.
        is_open: Whether there is a stream.
        writing: The transfer whose last frame is being sent.
        lost: Why no more messages pass.
    """

    end: _End
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    is_awake: bool = False
    is_open: bool = False
    writing: Transfer | None = None
    lost: CommunicationError | None = None

    def fail(self, error: CommunicationError) -> None:
        """Fail all transfers, and those that will begin."""
        self.lost = self.lost or error
        for transfer in [*self.end.unfinished(), *([self.writing] if self.writing else [])]:
            transfer.fail(self.lost)


class Links:
    """The streams of one rank.

    Attributes:
        changed: Guards every transfer and channel; notified when a transfer is done.
    """

    def __init__(self, directory: Directory, *, rank: Rank, inline_bytes: int = INLINE_BYTES) -> None:
        """Begin to listen; `inline_bytes` is that of `Outgoing`.

        Raises:
            CommunicationError: The rank cannot listen where it should.
        """
        self.changed = threading.Condition()
        self._directory = directory
        self._rank = rank
        self._inline_bytes = inline_bytes
        self._outgoing: dict[Rank, _Channel[Outgoing]] = {}
        self._incoming: dict[Rank, _Channel[Incoming]] = {}
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: list[Any] = []
        self._connections: list[grpc.aio.Channel] = []
        self._server: grpc.aio.Server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gRPC", daemon=True)
        self._thread.start()
        try:
            self._await(self._listen())
        except BaseException:
            self._end_thread()
            raise

    def send(self, transfer: Transfer, *, dest: Rank, tag: int) -> None:
        """Begin to send; fails the transfer if the peer is lost."""
        with self.changed:
            channel = self._outgoing.get(dest)
            if channel is None:
                channel = self._outgoing[dest] = _Channel(Outgoing(inline_bytes=self._inline_bytes))
                self._loop.call_soon_threadsafe(self._start, self._connect(dest, channel))
            channel.end.post(transfer, tag=tag)
            if channel.lost is not None:
                transfer.fail(channel.lost)
            self._wake(channel)

    def receive(self, transfer: Transfer, *, source: Rank, tag: int) -> None:
        """Begin to receive; fails the transfer if the peer is lost and its message has not come."""
        with self.changed:
            channel = self._incoming_from(source)
            channel.end.post(transfer, tag=tag)
            if channel.lost is not None and not transfer.done:
                transfer.fail(channel.lost)
            self._wake(channel)

    def close(self) -> None:
        """Send what is left, and end all streams; call it when all ranks have received what they wait for."""
        if not self._is_closing:
            self._is_closing = True
            self._await(self._end())
            self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wake(self, channel: "_Channel[Any]") -> None:
        """Let the stream of a channel look for frames; called under `changed`, from any thread."""
        if not channel.is_awake:
            channel.is_awake = True
            self._loop.call_soon_threadsafe(channel.woken.set)

    def _incoming_from(self, source: Rank) -> "_Channel[Incoming]":
        if source not in self._incoming:
            self._incoming[source] = _Channel(Incoming(self._directory.names[source]))
        return self._incoming[source]

    # In the thread of the streams

    async def _listen(self) -> None:
        directory, own = self._directory, self._directory.addresses[self._rank]
        self._server = grpc.aio.server(options=_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Link": handler}),))
        try:
            self._server.add_insecure_port(f"unix:{own.socket}")
            if own.network is not None and directory.certificates is not None:
                found = directory.certificates
                credentials = grpc.ssl_server_credentials(
                    [(found.key, found.own)], root_certificates=found.authority, require_client_auth=True
                )
                self._server.add_secure_port(own.network, credentials)
            await self._server.start()
        except RuntimeError as error:
            raise CommunicationError(f"{directory.names[self._rank]} cannot listen: {error}") from error

    async def _connect(self, peer: Rank, channel: "_Channel[Outgoing]") -> None:
        """Open the stream to a peer, and send on it until it ends."""
        try:
            connection = await self._reach(peer)
            self._connections.append(connection)
            metadata = ((_RANK, str(self._rank)), (_WORLD, self._directory.world))
            call = connection.stream_stream(_LINK)(metadata=metadata)
            self._calls.append(call)
            # A write to a stream that was refused would replace the words of the refusal by gRPC's own.
            if _RANK in dict(await call.initial_metadata()):
                self._start(self._send_frames(channel, call.write))
                await self._read(peer, call.read, channel)
            status = await call.code()
            if status != grpc.StatusCode.OK:
                self._lose(peer, channel, str(await call.details()))
        except PeerLostError as error:
            self._fail(channel, error)
        except grpc.RpcError as error:
            self._lose(peer, channel, _words(error))

    async def _reach(self, peer: Rank) -> grpc.aio.Channel:
        """Return a connection to a peer as soon as it listens.

        Raises:
            PeerLostError: It does not listen, or is another one.
        """
        address, certificates = self._directory.addresses[peer], self._directory.certificates
        is_same_host = self._directory.hosts[peer] == self._directory.hosts[self._rank]
        if is_same_host or address.network is None or certificates is None:
            # Another process makes it, and gRPC would wait longer before it tries again.
            while not address.socket.exists():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            connection = grpc.aio.insecure_channel(f"unix:{address.socket}", options=_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(certificates.authority, certificates.key, certificates.own)
            name = ("grpc.ssl_target_name_override", contract.peer_name(peer))
            connection = grpc.aio.secure_channel(address.network, credentials, options=[*_OPTIONS, name])
        try:
            await asyncio.wait_for(connection.channel_ready(), _REACH_S)
        except TimeoutError:
            await connection.close()
            where = address.network or address.socket
            raise PeerLostError(
                f"{self._directory.names[peer]} did not answer at {where} within {_REACH_S:g} s"
            ) from None
        return connection

    async def _send_frames(self, channel: "_Channel[Outgoing]", write: Callable[[bytes], Awaitable[None]]) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # whoever reads the answers learns why
            while True:
                with self.changed:
                    taken = channel.end.take()
                    channel.is_awake = taken is not None
                if taken is None:
                    await channel.woken.wait()
                    channel.woken.clear()
                    continue
                data, channel.writing = taken
                await write(data)
                if channel.writing is not None:
                    with self.changed:
                        channel.writing.done, channel.writing = True, None
                        self.changed.notify_all()

    async def _read(self, peer: Rank, read: Callable[[], Awaitable[Any]], channel: "_Channel[Any]") -> None:
        """Feed a channel with what comes until the stream ends, or until a frame comes that no rank sends."""
        while (data := await read()) is not grpc.aio.EOF:
            try:
                with self.changed:
                    channel.end.feed(parse(data))
                    self._wake(channel)
                    self.changed.notify_all()
            except BadFrameError as error:
                self._fail(channel, CommunicationError(f"{self._directory.names[peer]} sent {error}"))
                return

    async def _serve(self, _requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        """Receive from one peer."""
        peer = await self._identify(context)
        with self.changed:
            channel = self._incoming_from(peer)
            if channel.is_open:
                refusal = f"{self._directory.names[peer]} is connected already"
            else:
                channel.is_open, refusal = True, ""
        if refusal:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, refusal)
        await context.send_initial_metadata(((_RANK, str(self._rank)),))
        answering = self._loop.create_task(self._answer(channel, context))
        try:
            await self._read(peer, context.read, channel)
            self._lose(peer, channel, "it has ended")
        except (asyncio.CancelledError, grpc.RpcError):
            self._lose(peer, channel, "its connection broke")
            raise
        finally:
            answering.cancel()

    async def _identify(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> Rank:
        """Return which rank has opened a stream; refuse it if it proves not to be that rank."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        text = metadata.get(_RANK, "")
        if metadata.get(_WORLD) != self._directory.world or not text.isdecimal() or len(text) > 9:  # noqa: PLR2004
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this is another run")
        rank = int(text)
        names: Mapping[str, Any] = context.auth_context()
        proven = names.get("x509_subject_alternative_name")
        is_other = proven is not None and contract.peer_name(rank).encode() not in proven
        if rank >= len(self._directory.names) or is_other:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"this is not rank {rank}")
        return Rank(rank)

    async def _answer(self, channel: "_Channel[Incoming]", context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # whoever reads notices the same
            while True:
                with self.changed:
                    data = channel.end.take()
                    channel.is_awake = data is not None
                if data is None:
                    await channel.woken.wait()
                    channel.woken.clear()
                else:
                    await context.write(data)

    async def _end(self) -> None:
        """End the streams to other ranks when what was sent has arrived, then those from other ranks."""
        for call in self._calls:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
                await asyncio.wait_for(call.done_writing(), _FLUSH_S)
        for call in self._calls:
            with contextlib.suppress(grpc.RpcError, asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(call.code(), _FLUSH_S)
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            await connection.close()
        await self._server.stop(_FLUSH_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # of gRPC's own, which would complain about a loop that ends before them
            await asyncio.wait(left, timeout=_FLUSH_S)

    def _lose(self, peer: Rank, channel: "_Channel[Any]", why: str) -> None:
        """Fail the transfers of one direction; if the peer is gone, the stream of the other direction ends by itself."""
        if not self._is_closing:
            self._fail(channel, PeerLostError(f"{self._directory.names[peer]} is gone: {why}"))

    def _fail(self, channel: "_Channel[Any]", error: CommunicationError) -> None:
        with self.changed:
            channel.fail(error)
            self.changed.notify_all()


def _words(error: BaseException) -> str:
    details = getattr(error, "details", None)
    return str(details()) if callable(details) else str(error) or type(error).__name__
