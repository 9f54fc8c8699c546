"""Lanes between hosts: frames come whole through TLS, and the door on the network opens for nobody but the worker that is expected."""

import asyncio
import errno
import os
import random
import re
import socket
import ssl
import struct
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from itertools import islice

import grpc
import pytest
import torch

from tests.security.listeners import addresses_of
from ttlaunch.contract import peer_name
from ttlaunch.running.agents.certificates import make_certificates
from ttlaunch.runtime.comm.grpc import doors, links
from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator
from ttlaunch.runtime.comm.grpc.directory import Certificates, Peer
from ttlaunch.runtime.comm.grpc.doors import LANE, LANE_PORT, Door, open_lane, open_lane_over_network
from ttlaunch.runtime.comm.grpc.frames import MOST_BYTES
from ttlaunch.runtime.comm.grpc.peers import WORKER
from ttlaunch.runtime.comm.grpc.wires import PlainWire, Tls, TlsWire
from ttlaunch.runtime.comm.protocol import PeerLostError

from .grpc_worlds import directory_of, in_threads, opened
from .grpc_worlds import hosts as hosts  # noqa: PLC0414 - a fixture
from .test_grpc_lanes import SIZES, End, exchange_both_ways, within


def of_one_run(ranks=3):
    """The certificates of the ranks of a run, each on a host of its own."""
    made = make_certificates({str(rank): [peer_name(rank)] for rank in range(ranks)})
    return [Certificates(one.authority.encode(), one.own.encode(), one.key.encode()) for one in made.values()]


async def wires_between(opening, accepting, kernel_bytes=None):
    """Both ends of a connection after their handshake."""
    pair = socket.socketpair()
    for one in pair:
        if kernel_bytes:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel_bytes)
    first = TlsWire(pair[0], Tls(opening), peer=peer_name(1))
    second = TlsWire(pair[1], Tls(accepting), peer=None)
    await asyncio.gather(first.shake_hands(), second.shake_hands())
    return first, second


@pytest.mark.parametrize(("kernel_bytes", "seed"), [(2_000, 0), (None, 1)])
def test_frames_of_any_size_come_whole_and_in_order_both_ways(kernel_bytes, seed):
    rng = random.Random(seed)  # noqa: S311 - no secret
    there, back = ([rng.randbytes(size) for size in rng.choices(SIZES[:-1], k=12)] for _ in range(2))
    there.append(bytes(MOST_BYTES))
    certificates = of_one_run()

    async def exchange():
        await exchange_both_ways(await wires_between(*certificates[:2], kernel_bytes), there, back)

    within(exchange())


def test_a_tensor_that_changes_after_its_transfer_was_abandoned_leaves_as_it_was():
    tensor, certificates = bytearray(b"a" * MOST_BYTES), of_one_run()

    async def abandon():
        first, second = await wires_between(*certificates[:2], 2_000)
        sender = End(first, [memoryview(tensor)])
        sender.lane.pump()
        sender.lane.keep_left()
        tensor[:] = b"b" * MOST_BYTES
        receiver = End(second)
        await sender.lane.finish()
        await receiver.lane.ended
        assert receiver.came == [b"a" * MOST_BYTES]
        sender.lane.close()

    within(abandon())


@pytest.mark.parametrize("at", [3, 100, 20_000])
def test_a_byte_that_is_changed_on_its_way_ends_the_lane(at):
    certificates = of_one_run()

    async def change():
        first, second = await wires_between(*certificates[:2])
        first.send((memoryview(struct.pack("<I", 40_000) + bytes(30_000)),))
        records = bytearray(first._out.read())
        records[at] ^= 1
        first.connection.send(records)
        receiver = End(second)
        assert isinstance(await receiver.lane.ended, ssl.SSLError)
        first.close()

    within(change())


@asynccontextmanager
async def door_of_rank_0(folder, certificates):
    door = Door(folder / "rank-0.lane", address="127.0.0.1", tls=Tls(certificates))
    with closing(door):
        yield door, ("127.0.0.1", door.port)


async def is_let_in(address, secret, certificates, *, peer=0):
    try:
        wire = await open_lane_over_network(address, secret, Tls(certificates), peer=peer_name(peer))
    except OSError:
        return False
    wire.close()
    return True


def test_the_door_opens_for_the_worker_that_is_expected_and_for_no_other(tmp_path, monkeypatch):
    """Neither for another worker of the run that shows the right secret, nor for another run, nor for somebody on this host."""
    own, friend, other = of_one_run()
    stranger = of_one_run()[1]

    async def knock():
        async with door_of_rank_0(tmp_path, own) as (door, address):
            with door.expect(peer_name(1)) as (secret, arriving), door.expect() as (inside, unused):
                monkeypatch.setattr(doors, "OPEN_S", 0.2)  # whoever is sent away tries again
                assert not await is_let_in(address, secret, other)
                assert not await is_let_in(address, secret, stranger)
                assert not await is_let_in(address, secret, replace(stranger, authority=own.authority))
                with pytest.raises(ConnectionResetError, match=r"^it sends this worker away$"):
                    await open_lane_over_network(address, os.urandom(16).hex(), Tls(friend), peer=peer_name(0))
                assert not await is_let_in(address, inside, friend)
                monkeypatch.undo()
                (await open_lane(tmp_path / "rank-0.lane", secret)).close()
                await asyncio.sleep(0.05)
                assert not arriving.done()
                assert not unused.done()
                assert await is_let_in(address, secret, friend)
                (await arriving).close()
                monkeypatch.setattr(doors, "OPEN_S", 0.2)
                assert not await is_let_in(address, secret, friend)

    within(knock())


def test_a_peer_that_proves_another_name_than_the_opener_looks_for_learns_no_secret(tmp_path):
    own, friend, _ = of_one_run()

    async def knock():
        async with door_of_rank_0(tmp_path, own) as (door, address):
            with door.expect(peer_name(1)) as (secret, arriving):
                for certificates, peer in ((friend, 2), (of_one_run()[1], 0)):
                    with pytest.raises(ssl.SSLCertVerificationError):
                        await open_lane_over_network(address, secret, Tls(certificates), peer=peer_name(peer))
                assert not arriving.done()

    within(knock())


def test_strangers_who_are_silent_or_speak_something_else_do_not_hold_up_a_peer(tmp_path, monkeypatch):
    """With room for three at the door, a newcomer makes the door close one connection drawn by lot: of nine strangers, at least seven lose theirs."""
    monkeypatch.setattr(doors, "_MOST_KNOCKING", 3)
    own, friend, _ = of_one_run()

    async def end_of(stranger):
        with suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(stranger, 100):
                pass

    async def knock(strangers):
        async with door_of_rank_0(tmp_path, own) as (door, address):
            with door.expect(peer_name(1)) as (secret, arriving):
                for one in strangers:
                    one.connect(address)
                    one.settimeout(0)
                for one, words in zip(strangers, (bytes.fromhex(secret), b"GET / HTTP/1.1\r\n\r\n"), strict=False):
                    with suppress(OSError):  # it was sent away before
                        one.send(words)
                assert await is_let_in(address, secret, friend)
                (await arriving).close()
                assert len(door._listeners[1]._knocking) < 3
                ends = [asyncio.create_task(end_of(one)) for one in strangers]
                await asyncio.wait_for(asyncio.gather(*ends[:2]), 5)  # both that were not silent
                for end in islice(asyncio.as_completed(ends, timeout=5), 7):
                    await end
                [end.cancel() for end in ends]
                await asyncio.gather(*ends, return_exceptions=True)

    with ExitStack() as stack:
        within(knock([stack.enter_context(socket.socket()) for _ in range(9)]))


def test_who_says_nothing_is_sent_away_after_a_while_and_so_is_an_older_tls(tmp_path, monkeypatch):
    monkeypatch.setattr(doors, "_KNOCK_S", 0.1)
    own, friend, _ = of_one_run()

    async def knock():
        loop = asyncio.get_running_loop()
        async with door_of_rank_0(tmp_path, own) as (_, address):
            silent = socket.create_connection(address)
            silent.settimeout(0)
            assert await loop.sock_recv(silent, 1) == b""
            silent.close()
            monkeypatch.undo()
            tls = Tls(friend)
            tls.opening.minimum_version = tls.opening.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
                await open_lane_over_network(address, "00" * 16, tls, peer=peer_name(0))

    within(knock())


def test_a_peer_that_was_sent_away_in_a_crowd_comes_again(tmp_path, monkeypatch):
    own, friend, _ = of_one_run()

    async def knock():
        async with door_of_rank_0(tmp_path, own) as (door, address):
            with door.expect(peer_name(1)) as (secret, arriving):
                coming = asyncio.create_task(is_let_in(address, secret, friend))
                while not door._listeners[1]._knocking:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                next(iter(door._listeners[1]._knocking)).cancel()
                assert await coming
                (await arriving).close()

    within(knock())


@asynccontextmanager
async def lane_of_stranger(directory):
    """The lane of whoever has the certificate of rank 1, to rank 0 on another host, and its call."""
    found, network = directory.certificates, directory.addresses[0].network
    credentials = grpc.ssl_channel_credentials(found.authority, found.key, found.own)
    options = [("grpc.ssl_target_name_override", peer_name(0))]
    async with grpc.aio.secure_channel(network, credentials, options=options) as channel:
        metadata = (("ttlaunch-worker", "1"), ("ttlaunch-incarnation", "0"), ("ttlaunch-world", "run 1"))
        call = channel.stream_stream("/ttlaunch.v1.Peer/Link")(metadata=metadata, timeout=20)
        told = dict(await call.initial_metadata())
        address = "127.0.0.1", int(told["ttlaunch-lane-port"])
        yield (await open_lane_over_network(address, told["ttlaunch-lane"], Tls(found), peer=peer_name(0))), call


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (struct.pack("<I", 200) + bytes(100), "its connection broke"),
        (struct.pack("<I", 0), "it has ended"),
    ],
    ids=["half a frame", "a goodbye"],
)
def test_a_peer_that_is_gone_in_the_middle_of_a_frame_is_lost_and_one_that_says_goodbye_has_ended(hosts, sent, why):
    first, second = hosts(2)
    with opened([first]) as (comm,):
        waiting = comm.irecv(torch.empty(100_000), source=1)

        async def end():
            async with lane_of_stranger(second) as (wire, call):
                await wire.say(sent)
                wire.close()
                await call.code()

        within(end())
        with pytest.raises(PeerLostError, match=rf"^rank 1 \(peer\) is gone: {why}$"):
            waiting.wait()


def exchange(communicators):
    """A large and a small tensor both ways, with many small ones."""

    def one(comm):
        boxes = [torch.empty(size) for size in (1_000_000, 3, *[1] * 100)]
        pending = [comm.irecv(box, source=1 - comm.rank) for box in boxes]
        pending += [comm.isend(torch.full_like(box, comm.rank), dest=1 - comm.rank) for box in boxes]
        for message in pending:
            message.wait()
        assert all(torch.equal(torch.full_like(box, 1 - comm.rank), box) for box in boxes)

    in_threads([one] * 2, communicators)


def test_a_lane_that_breaks_between_hosts_is_a_loss_for_both(hosts):
    with opened(hosts(2)) as (first, second):
        exchange([first, second])
        waiting = first.irecv(torch.empty(4), source=1)
        [channel] = second._links._outgoing.values()
        channel.lane._wire.connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLostError, match=r"^rank 1 \(peer\) is gone: its connection broke$"):
            waiting.wait()
        with pytest.raises(
            PeerLostError, match=r"^rank 0 \(peer\) is gone: its lane broke: (it ended without a goodbye|broken pipe)$"
        ):
            second.isend(torch.empty(100_000), dest=0).wait()


@pytest.mark.parametrize(("listens", "words"), [(True, "no answer within 0.2 s"), (False, "connection refused")])
def test_a_firewall_that_lets_through_the_call_but_not_the_lane_is_an_error_that_names_both(
    hosts, monkeypatch, listens, words
):
    monkeypatch.setattr(doors, "OPEN_S", 0.2)
    monkeypatch.setattr(links, "OPEN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as wall, opened(hosts(2)) as (first, second):
        port = first._links._door.port = wall.getsockname()[1]
        if not listens:
            wall.close()
        sending = second.isend(torch.ones(100_000), dest=0)
        at = re.escape(f"{words} at port {port} of 127.0.0.1, though 127.0.0.1:")
        with pytest.raises(
            PeerLostError, match=rf"^rank 0 \(peer\) is gone: its lane cannot be opened: {at}\d+ answers; open"
        ):
            sending.wait()


def test_a_peer_on_this_host_that_never_listens_is_lost_after_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "_REACH_S", 0.1)
    with opened([directory_of(tmp_path, 2)]) as (comm,):
        sending = comm.isend(torch.ones(3), dest=1)
        with pytest.raises(PeerLostError, match=r"^rank 1 \(peer\) did not answer at unix:.*rank-1.sock within 0.1 s$"):
            sending.wait()


def test_a_worker_that_starts_again_on_another_host_takes_the_place_of_its_earlier_life(hosts):
    first, second, place = hosts(3)
    found = {"hosts": first.hosts[:2], "names": first.names[:2]}
    before = [replace(one, addresses=first.addresses[:2], **found) for one in (first, second)]
    again = {"epoch": 1, "peers": [Peer(0), Peer(1, 1)], "addresses": [first.addresses[0], place.addresses[2]]}
    with opened(before) as (staying, gone):
        exchange([staying, gone])
        reborn = GrpcCommunicator(replace(before[1], **again), rank=1)
        with closing(reborn):
            staying.begin_epoch(replace(before[0], **again), rank=0)
            exchange([staying, reborn])
            with pytest.raises(PeerLostError, match=r"^rank 0 \(peer\) is gone: "):
                gone.isend(torch.ones(50_000), dest=0).wait()


def test_each_rank_listens_at_two_ports_of_its_address_and_nowhere_else(hosts):
    before = Counter(addresses_of([os.getpid()]))
    with opened(hosts(2)):
        found = Counter(addresses_of([os.getpid()])) - before
        assert ["127.0.0.1"] * 4 == [str(getattr(one, "ipv4_mapped", None) or one) for one in found.elements()]
    assert before == Counter(addresses_of([os.getpid()]))


def fails(sending, words):
    """Wait for a transfer that has to fail, for 10 s at most."""
    threads = ThreadPoolExecutor(1)
    with pytest.raises(PeerLostError, match=words):
        threads.submit(sending.wait).result(10)
    threads.shutdown()


def test_a_peer_that_tells_a_port_that_is_none_is_lost(hosts):
    with opened(hosts(2)) as (hostile, honest):
        hostile._links._door.port = 99_999
        fails(
            honest.isend(torch.ones(100_000), dest=0), "rank 0 .* is gone: its lane cannot be opened: it tells no port"
        )


@pytest.mark.parametrize("way", ["ends its call", "says goodbye", "closes its lane"])
def test_who_is_left_by_the_receiver_alone_does_not_wait_for_it(hosts, monkeypatch, way):
    """No honest receiver does that; the sender cannot know, and all of its transfers would wait without end."""
    monkeypatch.setattr(links, "_STATUS_S", 0.2)
    with opened(hosts(2)) as (hostile, honest):
        theirs, kept = hostile._links, []

        async def receive(peer, _channel, context):
            with theirs._door.expect(peer_name(peer.worker)) as (secret, arriving):
                told = ((WORKER, str(peer.worker)), (LANE, secret), (LANE_PORT, str(theirs._door.port)))
                await context.send_initial_metadata(told)
                wire = await arriving
            if way == "ends its call":
                kept.append(wire)
                return
            if way == "says goodbye":
                wire.send((memoryview(bytes(4)),))
                wire.flush()
                kept.append(wire)
            else:
                wire.close()
            await asyncio.sleep(30)

        theirs._receive = receive
        fails(honest.isend(torch.ones(100_000), dest=0), "rank 0 .* is gone: (it has|its lane)")
        fails(honest.isend(torch.ones(1), dest=0), "rank 0 .* is gone: (it has|its lane)")
        [one.close() for one in kept]


def test_a_lane_that_something_between_the_hosts_resets_towards_the_sender_alone_is_lost_on_both_sides(
    hosts, monkeypatch
):
    monkeypatch.setattr(links, "_STATUS_S", 0.2)
    with opened(hosts(2)) as (receiver, sender), relayed(receiver._links._door) as ends:
        receiving = receiver.irecv(torch.zeros(4), source=1)
        sender.isend(torch.ones(4), dest=0).wait()
        receiving.wait()
        receiving = receiver.irecv(torch.zeros(100_000), source=1)
        [caller, _] = ends  # the receiver's side stays
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.shutdown(socket.SHUT_RDWR)
        caller.close()
        fails(sender.isend(torch.ones(100_000), dest=0), "rank 0 .* is gone: its lane broke")
        fails(receiving, "rank 1 .* is gone")


@contextmanager
def relayed(door):
    """Stand between a door and whoever comes; yields both ends, once somebody has come."""
    ends = []
    with socket.create_server(("127.0.0.1", 0)) as between:
        port, door.port = door.port, between.getsockname()[1]

        def relay():
            caller, server = between.accept()[0], socket.create_connection(("127.0.0.1", port))
            ends.extend((caller, server))
            threading.Thread(target=carry, args=(caller, server), daemon=True).start()
            threading.Thread(target=carry, args=(server, caller), daemon=True).start()

        threading.Thread(target=relay, daemon=True).start()
        yield ends
        for end in ends:
            end.close()


def carry(source, target):
    with suppress(OSError):
        for data in iter(lambda: source.recv(2**16), b""):
            target.sendall(data)


def test_keys_that_are_asked_for_again_and_again_end_a_lane():
    certificates = of_one_run()

    async def ask():
        first, second = await wires_between(*certificates[:2])
        second._out.write(bytes(2**21))  # answers of TLS that nobody sends
        first.send((memoryview(b"x"),))
        first.flush()
        with pytest.raises(ConnectionResetError, match="again and again"):
            second.recv_into(memoryview(bytearray(100)))
        first.close()
        second.close()

    within(ask())


def test_a_welcome_that_does_not_get_out_spends_no_secret(tmp_path, monkeypatch):
    certificates = of_one_run()
    flush, tries = TlsWire.flush, []

    def flush_later(self):
        tries.append(self)
        if len(tries) == 1:
            raise ConnectionResetError
        flush(self)

    monkeypatch.setattr(TlsWire, "flush", flush_later)

    async def knock():
        door = Door(tmp_path / "lane", address="127.0.0.1", tls=Tls(certificates[0]))
        with door.expect(peer_name(1)) as (secret, arriving):
            friend = await open_lane_over_network(
                ("127.0.0.1", door.port), secret, Tls(certificates[1]), peer=peer_name(0)
            )
            (await arriving).close()
            friend.close()
        door.close()

    within(knock())
    assert len(tries) == 2


def test_what_came_before_a_peer_closed_is_read_though_nothing_can_be_sent_to_it_any_more():
    """A receiver that is late answers the first frame when its sender has long said goodbye."""

    class Answers(End):
        def feed(self, data):
            super().feed(data)
            self.to_send.append(bytes(200))
            self.lane.pump()

    async def be_late():
        ours, theirs = socket.socketpair()
        sender = End(PlainWire(ours), [bytes(2_000)] * 20)
        await sender.lane.finish()
        sender.lane.close()
        receiver = Answers(PlainWire(theirs))
        assert await receiver.lane.ended is None
        assert len(receiver.came) == 20

    within(be_late())


def test_a_door_waits_when_there_are_no_descriptors_left(tmp_path, monkeypatch):
    calls = []

    class Full:
        def accept(self):
            calls.append(self)
            raise OSError(errno.EMFILE, "")

    async def look():
        door = Door(tmp_path / "lane")
        [listener] = door._listeners
        real, listener._listening = listener._listening, Full()
        asyncio.get_running_loop().remove_reader(real)
        monkeypatch.setattr(listener, "_loop", FakeLoop())
        listener._accept()
        assert listener._loop.said == ["remove_reader", "call_later"]
        listener._listening = real
        monkeypatch.undo()
        door.close()

    class FakeLoop:
        def __init__(self):
            self.said = []

        def __getattr__(self, name):
            return lambda *_: self.said.append(name)

    within(look())
