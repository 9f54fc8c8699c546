"""The links between one rank and its peers: a gRPC call and a lane for each direction in which messages flow.

The sender makes the call, which says who it is, and opens the lane, by which the frames of both go; see `lanes.py`. One thread runs
all calls and lanes of a rank, and sleeps while nothing moves. The rank's own thread hands it transfers and waits under one
condition. Links belong to workers and not to ranks, so they stay when an epoch begins in which the same workers have other ranks.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio

from ttlaunch.contract import peer_name
from ttlaunch.runtime.comm.grpc.channel_state import Channel
from ttlaunch.runtime.comm.grpc.channels import INLINE_BYTES, Fence, Incoming, Outgoing, Transfer
from ttlaunch.runtime.comm.grpc.directory import Directory, Peer
from ttlaunch.runtime.comm.grpc.doors import (
    LANE,
    LANE_PORT,
    OPEN_S,
    Door,
    door_of,
    open_lane,
    open_lane_over_network,
)
from ttlaunch.runtime.comm.grpc.frames import BadFrameError, Parts, parse
from ttlaunch.runtime.comm.grpc.lanes import Lane
from ttlaunch.runtime.comm.grpc.peers import (
    SERVER_OPTIONS,
    SERVICE,
    WORKER,
    Route,
    StrangerError,
    host_of,
    is_encrypted,
    metadata_of,
    recognise,
    route_between,
    target_of,
    words_of,
)
from ttlaunch.runtime.comm.grpc.services import Context, Position, Services
from ttlaunch.runtime.comm.grpc.wires import Tls, Wire
from ttlaunch.runtime.comm.protocol import CommunicationError, EpochOverError, PeerLostError
from ttlaunch.runtime.world import Rank
from ttlaunch.system_reason import system_reason

_LINK = f"/{SERVICE}/Link"
_REACH_S = 300.0  # from the opening of the transport on; other ranks may take as long to import torch
_LOOK_S = 0.01
_FLUSH_S = _STATUS_S = 2.0
_ARRIVE_S = 60.0  # a sender may be busy when it has been accepted
_LAST_PORT = 65_535
_NOT_YET = frozenset((grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS))
"""What a peer answers that begins the same epoch a moment later, or has not noticed yet that an earlier call ended."""
_OPEN_PORTS = "open ports 1024 to 65535 between the hosts in their firewalls"
_LONGEST_S = 400 * 86_400.0  # as long as the certificates of a run hold


class Links:
    """The links of one rank.

    Attributes:
        changed: Guards every transfer and channel; notified when a transfer is done.
        services: The other calls that the rank answers.
    """

    def __init__(self, directory: Directory, *, rank: Rank, inline_bytes: int = INLINE_BYTES) -> None:
        """Begin to listen; `inline_bytes` is that of `Outgoing`.

        Raises:
            CommunicationError: The rank cannot listen where it should.
        """
        self.changed = threading.Condition()
        self._directory = directory
        self._members = directory.members
        self._rank = rank
        self._inline_bytes = inline_bytes
        self._outgoing: dict[Peer, Channel[Outgoing]] = {}
        self._incoming: dict[Peer, Channel[Incoming]] = {}
        self._dropped = 0  # by ends that are no more
        self._over: EpochOverError | None = None
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: list[Any] = []
        # The certificates are those of the worker, and the same in all epochs.
        self._tls = None if directory.certificates is None else Tls(directory.certificates)
        self.services = Services(self._identify, self._position)
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
        """Begin to send; fails the transfer if the peer is lost or the epoch is over."""
        with self.changed:
            channel = self._outgoing_to(self._directory.peer(dest))
            reason = self._over or channel.lost
            if reason is not None:
                transfer.fail(reason)
                return
            channel.fence.end.post(transfer, tag=tag)
            self._wake(channel)

    def receive(self, transfer: Transfer, *, source: Rank, tag: int) -> None:
        """Begin to receive; fails the transfer if the epoch is over, or the peer is lost and its message has not come."""
        with self.changed:
            if self._over is not None:
                transfer.fail(self._over)
                return
            channel = self._incoming_from(self._directory.peer(source))
            channel.fence.end.post(transfer, tag=tag)
            if channel.lost is not None:
                channel.fail(channel.lost)
            self._wake(channel)

    @property
    def dropped(self) -> int:
        """How many frames and calls of other epochs and of earlier lives were dropped."""
        with self.changed:
            return self._dropped + self.services.dropped + sum(channel.fence.dropped for channel in self._channels())

    def leave(self) -> None:
        """Fail all transfers, and those that begin, until the next epoch begins."""
        with self.changed:
            self._over = EpochOverError(f"epoch {self._directory.epoch} is over: the members of the run change")
            for channel in self._channels():
                channel.abandon(self._over)
            self.changed.notify_all()

    def begin(self, directory: Directory, *, rank: Rank) -> None:
        """Begin another epoch.

        Raises:
            ValueError: It is not later than this one.
        """
        with self.changed:
            before, self_before = self._directory, self._directory.peer(self._rank)
            if directory.epoch <= before.epoch:
                raise ValueError(f"epoch {directory.epoch} cannot follow epoch {before.epoch}")
            self.leave()
            self._directory, self._members, self._rank = directory, directory.members, rank
            is_reborn = directory.peer(rank) != self_before  # the calls that it made say who it was
            for peer, outgoing in list(self._outgoing.items()):
                if is_reborn or outgoing.lost is not None or peer not in self._members:
                    self._drop(self._outgoing.pop(peer))
                else:
                    outgoing.begin(directory.epoch)
            for peer, incoming in list(self._incoming.items()):
                if peer not in self._members:
                    self._drop(self._incoming.pop(peer))
                else:
                    incoming.begin(directory.epoch)
            self._over = None
            self._loop.call_soon_threadsafe(self.services.begin_epoch)

    def close(self) -> None:
        """Send what is left, and end all links; call it when all ranks have received what they wait for."""
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

    def _start(self, work: Coroutine[Any, Any, None], channel: "Channel[Any]") -> None:
        channel.task = self._loop.create_task(work)
        self._tasks.add(channel.task)
        channel.task.add_done_callback(self._tasks.discard)

    def _wake(self, channel: "Channel[Any]") -> None:
        """Let the lane of a channel look for frames; called under `changed`, from any thread."""
        if not channel.is_awake:
            channel.is_awake = True
            self._loop.call_soon_threadsafe(channel.wake)

    def _position(self) -> Position:
        with self.changed:
            return Position(self._directory.epoch, self._directory.peer(self._rank), self._members)

    def _channels(self) -> "list[Channel[Any]]":
        return [*self._outgoing.values(), *self._incoming.values()]

    def _outgoing_to(self, peer: Peer) -> "Channel[Outgoing]":
        if peer not in self._outgoing:
            route = route_between(self._directory, self._rank, self._members[peer])
            incarnation = route.own.incarnation

            def make(epoch: int) -> Outgoing:
                return Outgoing(epoch=epoch, incarnation=incarnation, inline_bytes=self._inline_bytes)

            channel = Channel(Fence(make, epoch=self._directory.epoch, incarnation=incarnation))
            self._outgoing[peer] = channel
            self._loop.call_soon_threadsafe(self._start, self._connect(route, channel), channel)
        return self._outgoing[peer]

    def _incoming_from(self, peer: Peer) -> "Channel[Incoming]":
        if peer not in self._incoming:

            def make(epoch: int) -> Incoming:
                return Incoming(self._name(peer), epoch=epoch, incarnation=peer.incarnation)

            self._incoming[peer] = Channel(Fence(make, epoch=self._directory.epoch, incarnation=peer.incarnation))
        return self._incoming[peer]

    def _name(self, peer: Peer) -> str:
        rank = self._members.get(peer)
        return f"worker {peer.worker}" if rank is None else self._directory.names[rank]

    def _drop(self, channel: "Channel[Any]") -> None:
        self._dropped += channel.fence.dropped
        self._loop.call_soon_threadsafe(channel.cancel)

    # In the thread of the calls and lanes

    async def _listen(self) -> None:
        directory, own = self._directory, self._directory.addresses[self._rank]
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handlers = self.services.handlers(link=self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            address = None if own.network is None else host_of(own.network)
            self._door = Door(door_of(own.socket), address=address, tls=self._tls)
            self._server.add_insecure_port(f"unix:{own.socket}")
            if own.network is not None and directory.certificates is not None:
                found = directory.certificates
                credentials = grpc.ssl_server_credentials(
                    [(found.key, found.own)], root_certificates=found.authority, require_client_auth=True
                )
                self._server.add_secure_port(own.network, credentials)
            await self._server.start()
        except (RuntimeError, OSError) as error:
            raise CommunicationError(f"{directory.names[self._rank]} cannot listen: {error}") from error

    async def _connect(self, route: Route, channel: "Channel[Outgoing]") -> None:
        """Call a peer, and send to it until the call ends."""
        try:
            async with await self._reach(route) as connection:
                call = await self._open(connection, route.own)
                self._calls.append(call)
                try:
                    broken = await self._exchange(route, call, channel)
                    self._lose(route.peer, channel, await _why_over(call, broken))
                finally:
                    self._calls.remove(call)
        except PeerLostError as error:
            self._fail(channel, error)
        except Exception as error:  # noqa: BLE001 - whatever it is: a transfer must not wait for a task that is no more
            self._lose(route.peer, channel, _words(error))

    async def _open(self, connection: grpc.aio.Channel, own: Peer) -> Any:
        """Return a call that the peer has accepted, or has refused for good."""
        metadata = metadata_of(own, self._directory.world)
        while True:
            call = connection.stream_stream(_LINK)(metadata=metadata, timeout=_LONGEST_S)
            if await _is_accepted(call):
                return call
            status = await call.code()
            if status not in _NOT_YET:
                return call
            await asyncio.sleep(_LOOK_S)

    async def _exchange(self, route: Route, call: Any, channel: "Channel[Outgoing]") -> Exception | None:
        """Send and receive by a lane until it ends; return what went wrong, None if the call says it or nothing did."""
        if not await _is_accepted(call):
            return None
        try:
            wire = await self._open_lane(route, dict(await call.initial_metadata()))
        except (OSError, ValueError) as error:
            return None if call.done() else _NotOpenedError(f"its lane cannot be opened: {system_reason(error)}")
        if call.done():  # the callback below would be called now, before there is a lane
            wire.close()
            return None
        call.add_done_callback(lambda _: channel.close_lane())  # a child of a dead peer may keep the other end open
        return await self._use_lane(route.peer, channel, wire)

    async def _open_lane(self, route: Route, told: Mapping[str, Any]) -> Wire:
        """Connect to the door of a peer, with what it has told on the accepted call.

        Raises:
            OSError: It does not let this worker in.
            ValueError: It has not told what a rank tells.
        """
        secret = str(told.get(LANE, ""))
        network = route.address.network
        if self._tls is None or network is None or not is_encrypted(route, self._directory):
            return await open_lane(door_of(route.address.socket), secret)
        port = str(told.get(LANE_PORT))
        if not (
            port.isascii() and port.isdecimal() and len(port) <= len(str(_LAST_PORT)) and 0 < int(port) <= _LAST_PORT
        ):
            raise ValueError("it tells no port")
        address = host_of(network), int(port)
        try:
            return await open_lane_over_network(address, secret, self._tls, peer=peer_name(route.peer.worker))
        except (TimeoutError, ConnectionRefusedError) as error:
            reason = f"no answer within {OPEN_S:g} s" if isinstance(error, TimeoutError) else "connection refused"
            raise OSError(
                f"{reason} at port {address[1]} of {address[0]}, though {network} answers; {_OPEN_PORTS}"
            ) from error

    async def _use_lane(self, peer: Peer, channel: "Channel[Any]", wire: Wire) -> Exception | None:
        """Exchange frames by a lane until it ends; return what went wrong."""
        channel.lane = lane = Lane(
            wire,
            guard=self.changed,
            take=lambda: self._next_frame(channel),
            feed=lambda data: self._feed(channel, data),
        )
        lane.pump()
        try:
            error = await lane.ended
        finally:
            channel.lane = None
            lane.close()
        if isinstance(error, BadFrameError):
            self._fail(channel, CommunicationError(f"{self._name(peer)} sent {error}"))
        return error

    async def _reach(self, route: Route) -> grpc.aio.Channel:
        """Return a connection to a peer as soon as it listens.

        Raises:
            PeerLostError: It does not listen, or is another one.
        """
        target = target_of(route, self._directory)
        if target.credentials is None:
            connection = grpc.aio.insecure_channel(target.address, options=target.options)
        else:
            connection = grpc.aio.secure_channel(target.address, target.credentials, options=target.options)
        try:
            async with asyncio.timeout(_REACH_S):
                # Another process makes it, and gRPC would wait longer before it tries again.
                while target.credentials is None and not route.address.socket.exists():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
                await connection.channel_ready()
        except TimeoutError:
            await connection.close()
            raise PeerLostError(f"{route.name} did not answer at {target.address} within {_REACH_S:g} s") from None
        return connection

    def _next_frame(self, channel: "Channel[Any]") -> Parts | None:
        """Return the next frame to send, None if there is none now; the one before it has been handed over.

        Its payload may only be read while `changed` is held all the time.
        """
        with self.changed:
            if channel.writing is not None:
                channel.writing.done = True
                self.changed.notify_all()
            taken = channel.fence.end.take()
            channel.is_awake = taken is not None
            channel.writing = taken[1] if taken is not None else None
        return taken[0] if taken is not None else None

    def _feed(self, channel: "Channel[Any]", data: bytes | memoryview) -> None:
        frame = parse(data)
        with self.changed:
            if channel.fence.feed(frame):
                self.changed.notify_all()
        channel.wake()

    async def _serve(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        """Receive from one peer."""
        peer = await self.services.identify_member(context)
        with self.changed:
            channel = self._incoming_from(peer)
            is_taken = channel.task is not None
            if not is_taken:
                channel.task = self._loop.create_task(self._receive(peer, channel, context))
        if is_taken:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{self._name(peer)} is connected already")
        assert channel.task is not None  # noqa: S101 - only this function ends it
        try:
            await asyncio.wait([channel.task])
        except BaseException:  # cancelled, or the connection broke before the peer knew that it is accepted
            channel.task.cancel()
            self._lose(peer, channel, "its connection broke")
            raise
        finally:
            reading, channel.task = channel.task, None
        if reading.cancelled():  # by another epoch; the cancellation of this function would not tell the peer
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"worker {peer.worker} is no member any more")
        self._lose(peer, channel, "it has ended" if reading.exception() is None else "its connection broke")

    async def _receive(self, peer: Peer, channel: "Channel[Incoming]", context: Context) -> None:
        """Tell a peer that it is accepted, and take its frames until it ends."""
        is_here = context.peer().startswith("unix:")
        with self._door.expect(None if is_here else peer_name(peer.worker)) as (secret, arriving):
            told = [(WORKER, str(peer.worker)), (LANE, secret)]
            if not is_here:
                told.append((LANE_PORT, str(self._door.port)))
            await context.send_initial_metadata(tuple(told))
            # Not `wait_for`: that of Python 3.11 forgets a cancellation that comes with the result.
            async with asyncio.timeout(_ARRIVE_S):
                wire = await arriving
        error = await self._use_lane(peer, channel, wire)
        if isinstance(error, OSError):
            raise error

    async def _identify(self, context: Context) -> Peer:
        """Return which worker of the run makes a call; refuse anybody else."""
        names: Mapping[str, Any] = context.auth_context()
        proven = names.get("x509_subject_alternative_name")
        try:
            with self.changed:
                found, members = self._directory, self._members
            return recognise(context.invocation_metadata() or (), proven, world=found.world, members=members)
        except StrangerError as error:
            status, words = error.args
            if status == grpc.StatusCode.FAILED_PRECONDITION:
                with self.changed:
                    self._dropped += 1
            await context.abort(status, words)
            raise

    async def _end(self) -> None:
        """End the links to other ranks when what was sent has arrived, then those from other ranks."""
        lanes = [channel.lane for channel in self._outgoing.values() if channel.lane]
        await _for_a_moment(lane.finish() for lane in lanes)
        await _for_a_moment(call.done_writing() for call in self._calls)
        await _for_a_moment(call.code() for call in self._calls)
        for task in self._tasks:
            task.cancel()
        await self._server.stop(_FLUSH_S)
        self._door.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # of gRPC's own, which would complain about a loop that ends before them
            await asyncio.wait(left, timeout=_FLUSH_S)

    def _lose(self, peer: Peer, channel: "Channel[Any]", why: str) -> None:
        """Fail the transfers of one direction; if the peer is gone, the link of the other direction ends by itself."""
        if not self._is_closing:
            self._fail(channel, PeerLostError(f"{self._name(peer)} is gone: {why}"))

    def _fail(self, channel: "Channel[Any]", error: CommunicationError) -> None:
        with self.changed:
            channel.fail(error)
            self.changed.notify_all()


class _NotOpenedError(Exception):
    """A lane could not be opened; the text says why."""


async def _for_a_moment(works: Iterable[Awaitable[object]]) -> None:
    """Wait for several things at the same time, but not for long, whatever becomes of them."""
    await asyncio.gather(*(asyncio.wait_for(work, _FLUSH_S) for work in works), return_exceptions=True)


async def _why_over(call: Any, broken: Exception | None) -> str:
    """Return why a peer is gone, whose lane has ended; ends the call where the peer still lives and the lane alone is broken."""
    try:
        status = await asyncio.wait_for(
            asyncio.shield(call.code()), 0 if isinstance(broken, BadFrameError) else _STATUS_S
        )
    except TimeoutError:
        status = None
        call.cancel()  # so that the peer, too, learns that nothing comes any more
    if status not in {None, grpc.StatusCode.OK}:
        return words_of(await call.details())
    if isinstance(broken, OSError):
        return f"its lane broke: {system_reason(broken)}"
    if broken is not None:
        return str(broken)
    return "it has ended" if status is not None else "it has closed its lane"


async def _is_accepted(call: Any) -> bool:
    return WORKER in dict(await call.initial_metadata() or ())


def _words(error: BaseException) -> str:
    details = getattr(error, "details", None)
    return words_of(details()) if callable(details) else str(error) or type(error).__name__
