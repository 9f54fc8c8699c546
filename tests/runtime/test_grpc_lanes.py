"""Lanes carry frames of any size both ways, in order, however little the kernel takes at a time; and only who shows the secret gets one."""

import asyncio
import os
import random
import socket
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from ttlaunch.runtime.comm.grpc import doors, lanes, wires
from ttlaunch.runtime.comm.grpc.channel_state import Channel
from ttlaunch.runtime.comm.grpc.channels import Fence, Outgoing
from ttlaunch.runtime.comm.grpc.directory import Peer
from ttlaunch.runtime.comm.grpc.doors import LANE, Door, door_of, open_lane
from ttlaunch.runtime.comm.grpc.frames import MOST_BYTES, BadFrameError
from ttlaunch.runtime.comm.grpc.lanes import Lane
from ttlaunch.runtime.comm.grpc.links import Links
from ttlaunch.runtime.comm.grpc.peers import WORKER
from ttlaunch.runtime.comm.grpc.wires import PlainWire

SIZES = (1, 112, 5_000, 20_000, 300_000, MOST_BYTES)


class End:
    """One end of a lane: the frames that it sends, in order, and those that came."""

    def __init__(self, wire, to_send=()):
        self.to_send, self.came = list(to_send), []
        self.lane = Lane(wire, guard=nullcontext(), take=self.take, feed=self.feed)

    def take(self):
        if not self.to_send:
            return None
        data = self.to_send.pop(0)
        return data[:112], memoryview(data)[112:]

    def feed(self, data):
        self.came.append(bytes(data))


def plain_wires():
    return map(PlainWire, socket.socketpair())


def within(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def exchange_both_ways(ends, there, back):
    """Send frames both ways between two ends, and look that they come whole and in order, with a goodbye of the first end."""
    first, second = (End(*pair) for pair in zip(ends, (there, back), strict=True))
    first.lane.pump()
    second.lane.pump()
    while len(second.came) < len(there) or len(first.came) < len(back):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await first.lane.finish()
    assert (await second.lane.ended, there, back) == (None, second.came, first.came)
    assert isinstance(await first.lane.ended, ConnectionError)  # the second one did not say goodbye


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel_bytes", [2_000, 2**20])
def test_frames_of_any_size_come_whole_and_in_order_both_ways(monkeypatch, seed, kernel_bytes):
    monkeypatch.setattr(wires, "_SOCKET_BYTES", kernel_bytes)
    rng = random.Random(seed)  # noqa: S311 - no secret
    there, back = ([rng.randbytes(rng.choice(SIZES)) for _ in range(20)] for _ in range(2))

    async def exchange():
        await exchange_both_ways(plain_wires(), there, back)

    within(exchange())


def test_what_is_left_comes_before_the_goodbye_though_the_reader_is_slow():
    frames = [bytes([number]) * MOST_BYTES for number in range(5)]

    async def exchange():
        ours, theirs = plain_wires()
        sender = End(ours, frames)
        finishing = asyncio.create_task(sender.lane.finish())
        await asyncio.sleep(0.05)
        assert not finishing.done()  # the kernel does not hold that much
        receiver = End(theirs)
        await finishing
        assert (await receiver.lane.ended, frames) == (None, receiver.came)
        sender.lane.close()

    within(exchange())


def test_a_lane_whose_peer_is_gone_ends_in_both_directions():
    async def lose():
        ours, theirs = plain_wires()
        sender = End(ours, [bytes(MOST_BYTES)] * 3)
        sender.lane.pump()
        theirs.close()
        assert isinstance(await sender.lane.ended, ConnectionError)
        sender.lane.pump()  # a wake that comes late does nothing
        await sender.lane.finish()

    within(lose())


def test_a_frame_that_is_refused_ends_the_lane_and_what_follows_is_not_looked_at():
    came = []

    def feed(data):
        came.append(bytes(data))
        raise BadFrameError("a frame")

    async def refuse():
        ours, theirs = socket.socketpair()
        lane = Lane(PlainWire(ours), guard=nullcontext(), take=lambda: None, feed=feed)
        theirs.send(b"\x01\0\0\0a\x01\0\0\0b")
        assert isinstance(await lane.ended, BadFrameError)
        assert theirs.recv(1) == b""
        theirs.close()

    within(refuse())
    assert came == [b"a"]


def test_a_door_lets_in_who_shows_the_secret_once_and_nobody_else(tmp_path, monkeypatch):
    place = door_of(tmp_path / "rank-3.sock")

    async def knock():
        door = Door(place)
        with door.expect() as (secret, arriving):
            for wrong in (os.urandom(16).hex(), secret[:30], secret[2:] + "00"):
                stranger = (await open_lane(place, wrong)).connection
                assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
                stranger.close()
            assert not arriving.done()
            ours = (await open_lane(place, secret)).connection
            theirs = (await arriving).connection
            again = (await open_lane(place, secret)).connection
            assert await asyncio.get_running_loop().sock_recv(again, 1) == b""
            await asyncio.get_running_loop().sock_sendall(ours, b"frame")
            assert await asyncio.get_running_loop().sock_recv(theirs, 10) == b"frame"
            for one in (ours, theirs, again):
                one.close()
        door.close()
        assert not place.exists()

    within(knock())


def test_a_connection_that_comes_as_its_call_is_cancelled_is_closed(tmp_path):
    place = tmp_path / "rank-3.lane"

    async def cancel():
        door = Door(place)
        with suppress(asyncio.CancelledError), door.expect() as (secret, arriving):
            friend = (await open_lane(place, secret)).connection
            await asyncio.wait([arriving])
            raise asyncio.CancelledError
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(friend, 1), 1) == b""
        assert arriving.result().connection.fileno() < 0
        friend.close()
        door.close()

    within(cancel())


def test_a_call_that_is_cancelled_in_the_moment_in_which_its_lane_comes_leaves_no_lane(tmp_path):
    async def cancel():
        told = asyncio.Event()

        class Context:
            def peer(self):
                return "unix:"

            async def send_initial_metadata(self, _words):
                told.set()

        links = Links.__new__(Links)
        links.changed, links._door = threading.Condition(), Door(tmp_path / "rank-3.lane")
        channel = Channel(Fence(lambda _: Outgoing(), epoch=0, incarnation=0))
        receiving = asyncio.create_task(links._receive(Peer(3, 0), channel, Context()))
        await told.wait()
        [guest] = links._door._expected.values()
        ours, friend = socket.socketpair()
        friend.settimeout(0)
        guest.arriving.set_result(PlainWire(ours))
        receiving.cancel()
        try:
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(friend, 1), 2) == b""
            assert receiving.cancelled()
        finally:
            receiving.cancel()
            friend.close()
            links._door.close()

    within(cancel())


def test_a_call_that_ended_before_its_lane_was_opened_leaves_no_lane_to_wait_for(tmp_path):
    """A child of the dead peer still has its listening socket, so the kernel takes the connection, and nobody ever answers."""

    class EndedCall:
        async def initial_metadata(self):
            return ((WORKER, "3"), (LANE, "00" * 16))

        def done(self):
            return True

        def add_done_callback(self, call):
            call(self)

    async def exchange():
        path = tmp_path / "rank-3.sock"
        with socket.socket(socket.AF_UNIX) as of_child:
            of_child.bind(str(door_of(path)))
            of_child.listen()
            links = Links.__new__(Links)
            links.changed, links._tls = threading.Condition(), None
            channel = Channel(Fence(lambda _: Outgoing(), epoch=0, incarnation=0))
            route = SimpleNamespace(peer=None, address=SimpleNamespace(socket=path, network=None))
            assert await asyncio.wait_for(links._exchange(route, EndedCall(), channel), 2) is None

    within(exchange())


def test_who_shows_nothing_is_sent_away_and_a_friend_behind_too_many_of_them_is_let_in(tmp_path, monkeypatch):
    """The friend would never come again: the call that told it the secret goes on."""
    monkeypatch.setattr(doors, "_KNOCK_S", 0.1)
    monkeypatch.setattr(doors, "_MOST_KNOCKING", 2)
    place = tmp_path / "rank-3.lane"

    async def knock():
        door, loop = Door(place), asyncio.get_running_loop()
        silent = [(await open_lane(place, "")).connection for _ in range(5)]
        with door.expect() as (secret, arriving):
            friend = (await open_lane(place, secret)).connection
            (await asyncio.wait_for(arriving, 5)).close()
            friend.close()
        with suppress(ConnectionError):
            assert [await loop.sock_recv(one, 1) for one in silent] == [b""] * 5
        for one in silent:
            one.close()
        door.close()

    within(knock())


def test_a_door_stands_where_that_of_an_earlier_life_was_left(tmp_path):
    async def twice():
        place = tmp_path / "rank-3.lane"
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(place))
        left.close()
        door = Door(place)
        with door.expect() as (secret, arriving):
            friend = (await open_lane(place, secret)).connection
            (await arriving).close()
            friend.close()
        door.close()

    within(twice())


def test_a_tensor_that_changes_after_its_transfer_was_abandoned_leaves_as_it_was():
    tensor = bytearray(b"a" * MOST_BYTES)

    async def abandon():
        ours, theirs = plain_wires()
        sender = End(ours, [memoryview(tensor)])
        sender.lane.pump()
        sender.lane.keep_left()
        tensor[:] = b"b" * MOST_BYTES
        receiver = End(theirs)
        await sender.lane.finish()
        await receiver.lane.ended
        assert receiver.came == [b"a" * MOST_BYTES]
        sender.lane.close()

    within(abandon())


def test_a_peer_that_closes_one_direction_only_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(lanes, "_READ_LEFT_S", 0.1)

    async def send():
        ours, theirs = plain_wires()
        theirs.connection.shutdown(socket.SHUT_RD)
        sender = End(ours, [bytes(2_000)] * 20)
        sender.lane.pump()
        assert isinstance(await sender.lane.ended, BrokenPipeError)
        theirs.close()

    within(send())
