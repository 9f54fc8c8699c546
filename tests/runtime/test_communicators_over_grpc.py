"""The transport over gRPC keeps the promises of every transport, and names what a peer does wrong."""

import errno
import os
import queue
import socket
import struct
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
import torch

from ttlaunch.contract import peer_name
from ttlaunch.runtime.comm.grpc import links
from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator
from ttlaunch.runtime.comm.grpc.directory import Address, Peer
from ttlaunch.runtime.comm.grpc.frames import MOST_BYTES
from ttlaunch.runtime.comm.protocol import CommunicationError, EpochOverError, PeerLostError

from .communicator_contract import CONTRACT
from .grpc_worlds import directory_of, in_threads, opened, world
from .grpc_worlds import hosts as hosts  # noqa: PLC0414 - a fixture


@pytest.fixture(params=[2, 3, 5], scope="module")
def communicators(request, tmp_path_factory):
    with world(tmp_path_factory.mktemp("world"), request.param) as communicators:
        yield communicators


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_every_promise_of_a_transport_is_kept(communicators, promise):
    among = list(range(len(communicators)))
    in_threads([lambda comm: promise(comm, among)] * len(among), communicators)


def test_every_promise_is_kept_if_each_message_waits_for_its_receive(tmp_path, monkeypatch):
    monkeypatch.setenv("TTLAUNCH_SYNCHRONOUS_SENDS", "1")
    with world(tmp_path, 3) as communicators:
        for promise in CONTRACT:
            in_threads([lambda comm, p=promise: p(comm, [0, 1, 2])] * 3, communicators)


def test_a_rank_sends_to_itself(tmp_path):
    with world(tmp_path, 1) as (comm,):
        box = torch.empty(50_000)
        sending = comm.isend(torch.ones(50_000), dest=0)
        comm.recv(box, source=0)
        sending.wait()
        assert torch.equal(torch.ones(50_000), box)


def test_a_receive_that_was_there_before_its_stream_gets_its_message(tmp_path):
    """Its grant is ready when the stream opens, and must not overtake the answer that the stream is accepted."""
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with world(folder, 2) as (first, second):
            box = torch.empty(50_000)
            waiting = first.irecv(box, source=1)
            sending = second.isend(torch.ones(50_000), dest=0)
            assert 0 == first.wait_any([waiting], timeout_s=60)
            sending.wait()


def test_a_peer_that_ends_is_named_by_whoever_waits_for_it(tmp_path):
    with world(tmp_path, 2) as (first, second):
        second.send(torch.ones(3), dest=0)
        box = torch.empty(3)
        first.recv(box, source=1)
        waiting, timed = first.irecv(box, source=1), first.irecv(box, source=1, tag=9)
        second.close()
        with pytest.raises(PeerLostError, match=r"^rank 1 \(peer\) is gone: "):
            waiting.wait()
        assert 0 == first.wait_any([timed])
        with pytest.raises(PeerLostError, match=r"^rank 1 \(peer\) is gone: "):
            first.recv(box, source=1)


def test_what_a_peer_sent_before_it_ended_is_received(tmp_path):
    with world(tmp_path, 2) as (first, second):
        second.send(torch.full((3,), 7.0), dest=0, tag=4)
        second.close()
        box = torch.empty(3)
        first.recv(box, source=1, tag=4)
        assert [7.0] * 3 == box.tolist()


def test_a_rank_or_tag_that_does_not_exist_is_refused_before_anything_is_sent(tmp_path):
    with world(tmp_path, 1) as (comm,):
        for options in ({"dest": 1}, {"dest": -1}, {"dest": 0, "tag": -1}, {"dest": 0, "tag": 2**32}):
            with pytest.raises(ValueError, match=r"rank|tag"):
                comm.isend(torch.zeros(1), **options)


def test_a_place_where_a_rank_cannot_listen_is_an_error(tmp_path):
    with pytest.raises(CommunicationError, match=r"^rank 0 \(peer\) cannot listen: "):
        GrpcCommunicator(directory_of(tmp_path / "missing", 1), rank=0)


def test_every_promise_is_kept_between_hosts(hosts):
    with opened(hosts(3)) as communicators:
        for promise in CONTRACT:
            in_threads([lambda comm, p=promise: p(comm, [0, 1, 2])] * 3, communicators)


def test_a_host_that_sends_as_a_rank_of_another_host_is_refused(hosts):
    """The certificate of the second host is for rank 7."""
    with opened(hosts(2, names=lambda rank: peer_name(7 * rank))) as (_first, second):
        sending = second.isend(torch.ones(100_000), dest=0)
        with pytest.raises(PeerLostError, match=r"^rank 0 \(peer\) is gone: this is not rank 1$"):
            sending.wait()


def test_a_host_with_a_certificate_of_another_run_is_refused(hosts, monkeypatch):
    monkeypatch.setattr(links, "_REACH_S", 1.0)
    first, second = hosts(2)
    stranger = replace(second, certificates=hosts(2)[1].certificates)
    with opened([first, stranger]) as (_, comm):
        sending = comm.isend(torch.ones(100_000), dest=0)
        with pytest.raises(PeerLostError, match=r"^rank 0 \(peer\) did not answer at 127.0.0.1:\d+ within 1 s$"):
            sending.wait()


def test_a_rank_of_another_run_is_refused(tmp_path):
    mine, other = directory_of(tmp_path, 2), directory_of(tmp_path, 2, world="run 2")
    with opened([mine, other]) as (_, comm):
        sending = comm.isend(torch.ones(100_000), dest=0)
        with pytest.raises(PeerLostError, match=r"^rank 0 \(peer\) is gone: this is another run$"):
            sending.wait()


@contextmanager
def stranger(folder, **who):
    """A stream to rank 0 on the same host that writes what it is told."""
    with grpc.insecure_channel(f"unix:{folder}/rank-0.sock") as channel, stream_on(channel, **who) as stream:
        yield stream


@contextmanager
def stream_on(channel, *, rank="1", incarnation="0", world="run 1"):
    frames = queue.Queue()
    call = channel.stream_stream("/ttlaunch.v1.Peer/Link")(
        iter(frames.get, None),
        metadata=(("ttlaunch-worker", rank), ("ttlaunch-incarnation", incarnation), ("ttlaunch-world", world)),
        timeout=20,
    )
    yield frames, call
    frames.put(None)


@pytest.mark.parametrize("text", ["-1", "1e3", "", "9" * 400, "x"])
def test_a_number_that_is_no_rank_is_refused(tmp_path, text):
    with world(tmp_path, 2) as (_comm, _), stranger(tmp_path, rank=text) as (_frames, call):
        assert grpc.StatusCode.PERMISSION_DENIED == call.code()


@contextmanager
def lane_of_stranger(folder, **who):
    """The lane of a stranger that is taken for a member, and its call."""
    with stranger(folder, **who) as (_frames, call), socket.socket(socket.AF_UNIX) as lane:
        lane.connect(f"{folder}/rank-0.lane")
        lane.sendall(bytes.fromhex(dict(call.initial_metadata())["ttlaunch-lane"]))
        yield lane, call


def framed(data):
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (framed(bytes(200)), "a frame whose header"),
        (struct.pack("<I", MOST_BYTES + 1), f"a frame of {MOST_BYTES + 1} bytes"),
        (framed(b"x"), "a frame of 1 bytes"),
        (framed(bytes(MOST_BYTES)), "a frame whose header"),
    ],
)
def test_a_frame_that_no_rank_sends_is_an_error_that_names_the_sender(tmp_path, sent, words):
    with world(tmp_path, 2) as (comm, _), lane_of_stranger(tmp_path) as (lane, call):
        waiting = comm.irecv(torch.empty(3), source=1)
        lane.sendall(sent)
        with pytest.raises(CommunicationError, match=rf"^rank 1 \(peer\) sent {words}"):
            waiting.wait()
        call.code()  # the call ends as well


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "its connection broke"),
        (b"\0\0", "its connection broke"),
        (framed(bytes(200))[:100], "its connection broke"),
        (framed(b""), "it has ended"),
    ],
    ids=["nothing", "half a length", "half a frame", "a goodbye"],
)
def test_a_lost_peer_has_ended_if_it_has_said_goodbye_and_else_its_connection_broke(tmp_path, sent, why):
    with world(tmp_path, 2) as (comm, _), lane_of_stranger(tmp_path) as (lane, call):
        waiting = comm.irecv(torch.empty(3), source=1)
        lane.sendall(sent)
        lane.close()
        with pytest.raises(PeerLostError, match=rf"^rank 1 \(peer\) is gone: {why}$"):
            waiting.wait()
        call.code()


def test_a_call_that_ends_takes_its_lane_with_it(tmp_path):
    """A child process of a dead peer may keep the other end of the lane open, so its end alone would come too late."""
    with world(tmp_path, 2) as (comm, _), lane_of_stranger(tmp_path) as (lane, call):
        waiting = comm.irecv(torch.empty(3), source=1)
        call.cancel()
        with pytest.raises(PeerLostError, match=r"^rank 1 \(peer\) is gone: its connection broke$"):
            waiting.wait()
        lane.settimeout(10)
        assert lane.recv(1) == b""


def test_a_lane_that_breaks_between_two_ranks_that_live_is_a_loss_for_both(tmp_path):
    with world(tmp_path, 2) as (first, second):
        second.send(torch.ones(4), dest=0)
        first.recv(torch.empty(4), source=1)
        waiting = first.irecv(torch.empty(4), source=1)
        [channel] = second._links._outgoing.values()
        reason = OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        second._links._loop.call_soon_threadsafe(channel.lane._end, reason)
        assert first.wait_any([waiting], timeout_s=10) == 0
        sending = second.isend(torch.empty(100_000), dest=0)
        assert second.wait_any([sending], timeout_s=10) == 0
        with pytest.raises(PeerLostError, match=r"^rank 1 \(peer\) is gone: its connection broke$"):
            waiting.wait()
        with pytest.raises(
            PeerLostError, match=r"^rank 0 \(peer\) is gone: its lane broke: no buffer space available$"
        ):
            sending.wait()


def test_a_second_stream_of_a_rank_is_refused_and_the_first_goes_on(tmp_path):
    with world(tmp_path, 2) as (first, second):
        box = torch.empty(4)
        second.send(torch.ones(4), dest=0)
        first.recv(box, source=1)
        with stranger(tmp_path) as (_frames, call):
            assert grpc.StatusCode.ALREADY_EXISTS == call.code()
        second.send(torch.full((4,), 2.0), dest=0)
        first.recv(box, source=1)
        assert [2.0] * 4 == box.tolist()


def of_epoch(directory, epoch, *workers):
    """The directory of a later epoch, with these workers as ranks 0, 1, …; a worker that is a pair has an incarnation."""
    peers = [Peer(*(worker if isinstance(worker, tuple) else (worker,))) for worker in workers]
    folder = directory.addresses[0].socket.parent
    return replace(
        directory,
        epoch=epoch,
        peers=peers,
        names=[f"rank {rank} (peer)" for rank in range(len(peers))],
        hosts=[directory.hosts[0]] * len(peers),
        addresses=[Address(folder / f"rank-{one.worker}{'b' * one.incarnation}.sock") for one in peers],
    )


def exchange(communicators, content=1.0):
    """Every rank sends a large and a small tensor to every other one, and receives theirs."""

    def one(comm):
        pending, boxes = [], []
        for size in (3, 50_000):
            for peer in range(len(communicators)):
                boxes.append((torch.empty(size), content + peer))
                pending.append(comm.irecv(boxes[-1][0], source=peer))
                pending.append(comm.isend(torch.full((size,), content + comm.rank), dest=peer))
        for message in pending:
            message.wait()
        for box, expected in boxes:
            assert torch.equal(torch.full_like(box, expected), box)

    in_threads([one] * len(communicators), communicators)


def test_workers_that_stay_go_on_with_other_ranks_and_messages_under_way_are_forgotten(tmp_path):
    with world(tmp_path, 3) as (first, second, third):
        exchange([first, second, third])
        box, old = torch.zeros(3), torch.zeros(50_000)
        waiting, sending = first.irecv(box, source=2, tag=1), third.isend(torch.ones(50_000), dest=0)
        first.send(torch.ones(3), dest=2)  # that nobody has asked for
        for one in (first, third):
            one.leave_epoch()
        for message in (waiting, sending, first.isend(old, dest=2), first.irecv(old, source=1)):
            with pytest.raises(EpochOverError, match=r"^epoch 0 is over: the members of the run change$"):
                message.wait()
        later = of_epoch(directory_of(tmp_path, 3), 1, 0, 2)
        first.begin_epoch(later, rank=0)
        third.begin_epoch(later, rank=1)
        exchange([first, third], 5.0)
        assert (0, 1, 0.0, 0.0) == (first.rank, third.rank, float(box.sum()), float(old.sum()))
        second.close()  # which was removed, and has not been told
        exchange([first, third], 9.0)


def test_a_message_of_a_member_that_has_begun_sooner_is_kept_and_one_that_begins_later_drops_it_if_it_is_old(tmp_path):
    with world(tmp_path, 2) as (first, second):
        exchange([first, second])
        later = of_epoch(directory_of(tmp_path, 2), 4, 1, 0)
        second.begin_epoch(later, rank=0)
        early = second.isend(torch.full((3,), 4.0), dest=1)
        first.send(torch.full((3,), 1.0), dest=1)  # of epoch 0
        first.begin_epoch(later, rank=1)
        early.wait()
        box = torch.empty(3)
        first.recv(box, source=0)
        exchange([second, first])
        assert ([4.0] * 3, 1, 0) == (box.tolist(), second.dropped_frames, first.dropped_frames)


def test_an_epoch_that_is_not_later_is_refused(tmp_path):
    with world(tmp_path, 1) as (comm,), pytest.raises(ValueError, match=r"^epoch 0 cannot follow epoch 0$"):
        comm.begin_epoch(directory_of(tmp_path, 1), rank=0)


def test_a_worker_that_joins_waits_until_the_members_begin_its_epoch(tmp_path):
    with world(tmp_path, 2) as (first, second):
        exchange([first, second])
        later = of_epoch(directory_of(tmp_path, 2), 1, 0, 1, 2)
        joiner = GrpcCommunicator(later, rank=2)
        try:
            early = [joiner.isend(torch.full((50_000,), 7.0), dest=rank) for rank in (0, 1)]
            assert joiner.wait_any(early, timeout_s=0.2) is None
            for rank, member in enumerate((first, second)):
                member.begin_epoch(later, rank=rank)
                box = torch.empty(50_000)
                member.recv(box, source=2)
                assert torch.equal(torch.full((50_000,), 7.0), box)
            exchange([first, second, joiner])
        finally:
            joiner.close()


def test_an_earlier_life_of_a_worker_is_cut_off_and_counted_and_the_new_one_takes_its_place(tmp_path):
    with world(tmp_path, 2) as (first, second):
        exchange([first, second])
        later = of_epoch(directory_of(tmp_path, 2), 1, 0, (1, 1))
        reborn = GrpcCommunicator(later, rank=1)
        try:
            first.begin_epoch(later, rank=0)
            exchange([first, reborn])
            with pytest.raises(PeerLostError):
                second.isend(torch.ones(50_000), dest=0).wait()
            with stranger(tmp_path) as (_frames, call):
                assert grpc.StatusCode.FAILED_PRECONDITION == call.code()
            assert 1 == first.dropped_frames
            exchange([first, reborn])
        finally:
            reborn.close()


def test_a_worker_that_is_no_member_is_refused(tmp_path):
    with world(tmp_path, 2) as (_comm, _), stranger(tmp_path, rank="2") as (_frames, call):
        assert (grpc.StatusCode.NOT_FOUND, "worker 2 is no member of epoch 0") == (call.code(), call.details())
