"""The calls of a rank over gRPC: what is pulled is of the step that was asked for, whole, and of a member of this run."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import grpc
import pytest
import torch

from ttlaunch.contract import peer_name
from ttlaunch.runtime.comm.grpc.client import PeerClient
from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator
from ttlaunch.runtime.comm.grpc.directory import Peer
from ttlaunch.runtime.comm.grpc.frames import CHUNK_BYTES
from ttlaunch.runtime.comm.grpc.pieces import MOST_UNARY_BYTES, Piece, PieceKind, pack_piece
from ttlaunch.runtime.comm.grpc.shared_state import NotHeldError, Snapshots
from ttlaunch.runtime.comm.grpc.vectors import Key, bytes_of
from ttlaunch.runtime.comm.protocol import CommunicationError, EpochOverError, PeerLostError
from ttlaunch.runtime.comm.reduction import GradientTree, contiguous_blocks

from .grpc_worlds import directory_of, world
from .grpc_worlds import hosts as hosts  # noqa: PLC0414 - a fixture

LONG = 3 * CHUNK_BYTES // 4 + 1  # float32 values: four pieces, the last with one value
VECTOR = torch.arange(LONG, dtype=torch.float32)


def whole(step, name="parameters"):
    return Key(name, step, 0, LONG)


@contextmanager
def sharing(folder, *, ranks=2, held=None):
    """A world whose rank 0 holds a vector of step 5; yields its source and a client of rank 1."""
    with world(folder, ranks) as communicators, PeerClient(directory_of(folder, ranks), own=1, rank=0) as client:
        source = Snapshots()
        for step, vector in (held or {5: VECTOR}).items():
            source.hold(step, "parameters", vector)
        communicators[0].share_state(source)
        yield source, client


def test_a_rank_says_its_epoch_and_the_newest_step_that_it_holds(tmp_path):
    with sharing(tmp_path, held={5: VECTOR, 7: VECTOR}) as (_, client):
        beat = client.ping()
        assert (0, 0, 7) == (beat.epoch, beat.incarnation, beat.step)
        assert 0 == client.ping("other").step


@pytest.mark.parametrize(("first", "last"), [(0, LONG), (7, 8), (3, 3), (LONG // 2, LONG)])
def test_a_range_of_a_vector_is_pulled_whole(tmp_path, first, last):
    with sharing(tmp_path) as (_, client):
        box = torch.empty(last - first)
        assert 5 == client.pull(Key("parameters", 5, first, last), box)
        assert torch.equal(VECTOR[first:last], box)


def resident_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    [size] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(size)


def test_a_long_vector_needs_at_most_16_mib_beside_itself_at_either_end(tmp_path):
    """Both ends are in this process, so a copy of the vector at one of them alone would be too much."""
    vector, box = torch.ones(25 * 2**20), torch.zeros(25 * 2**20)  # 100 MiB each
    with sharing(tmp_path, held={5: vector}) as (_, client):
        client.pull(Key("parameters", 5, 0, 100), box[:100])  # opens the connection
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the largest size counts anew
        client.pull(Key("parameters", 5, 0, len(vector)), box)
        assert resident_bytes("VmHWM") - before <= 2 * 16 * 2**20
    assert torch.equal(vector, box)


def test_a_joiner_pulls_a_share_from_each_member_at_once(tmp_path):
    with ExitStack() as opened, world(tmp_path, 4) as communicators:
        box, shares = torch.empty(LONG), [range(LONG * n // 3, LONG * (n + 1) // 3) for n in range(3)]
        for comm in communicators[:3]:
            source = Snapshots()
            source.hold(9, "parameters", VECTOR)
            comm.share_state(source)
        directory = directory_of(tmp_path, 4)
        clients = [opened.enter_context(PeerClient(directory, own=3, rank=rank)) for rank in range(3)]
        with ThreadPoolExecutor(3) as pool:
            keys = [Key("parameters", 9, share.start, share.stop) for share in shares]
            list(pool.map(PeerClient.pull, clients, keys, [box[one.start : one.stop] for one in shares]))
        assert torch.equal(VECTOR, box)


def test_a_short_vector_comes_in_one_answer_and_a_long_one_is_refused_with_the_call_for_it(tmp_path):
    most = MOST_UNARY_BYTES // 4
    with sharing(tmp_path, held={5: torch.ones(most + 1)}) as (_, client):
        assert (5, bytes(bytes_of(torch.ones(most)))) == client.get(Key("parameters", 5, 0, most))
        with pytest.raises(
            CommunicationError, match=r"rank 0 \(peer\): 4194308 bytes are more than .* StreamParameters"
        ):
            client.get(Key("parameters", 5, 0, most + 1))


@pytest.mark.parametrize("step", [4, 6])
def test_a_read_of_another_step_is_refused_and_says_what_is_held(tmp_path, step):
    with sharing(tmp_path) as (_, client):
        for call in (
            lambda: client.get(whole(step)._replace(last=3)),
            lambda: client.pull(whole(step), VECTOR.clone()),
        ):
            with pytest.raises(NotHeldError, match=rf"of step {step} is not held; steps held: 5$"):
                call()


def test_a_read_of_this_step_or_a_newer_one_gets_the_newest(tmp_path):
    with sharing(tmp_path, held={5: VECTOR, 8: VECTOR + 1}) as (_, client):
        box = torch.empty(LONG)
        assert 8 == client.pull(whole(6), box, or_newer=True)
        assert torch.equal(VECTOR + 1, box)
        assert 8 == client.get(Key("parameters", 0, 0, 1), or_newer=True)[0]
        with pytest.raises(NotHeldError, match=r"step 9 or later is not held; newest step: 8$"):
            client.pull(whole(9), box, or_newer=True)


def test_what_has_been_promised_does_not_change_while_the_rank_trains_on(tmp_path):
    """The rank updates its weights in place and drops the step as soon as the first piece has been sent."""
    weights, client_ready, updated = VECTOR.clone(), threading.Event(), threading.Event()

    class Watched(Snapshots):
        def read(self, key):
            view = super().read(key)
            client_ready.set()
            assert updated.wait(30)
            return view

    with world(tmp_path, 2) as communicators, PeerClient(directory_of(tmp_path, 2), own=1, rank=0) as client:
        source = Watched()
        source.hold(1, "parameters", weights)
        communicators[0].share_state(source)

        def train():
            assert client_ready.wait(30)
            weights.mul_(-1)
            source.hold(2, "parameters", weights)
            source.forget(before=2)
            updated.set()

        thread = threading.Thread(target=train)
        thread.start()
        box = torch.empty(LONG)
        assert 1 == client.pull(whole(1), box)
        thread.join()
        assert torch.equal(VECTOR, box)
        with pytest.raises(NotHeldError, match=r"steps held: 2$"):
            client.pull(whole(1), box)


def test_a_vector_of_another_length_or_name_is_refused(tmp_path):
    with sharing(tmp_path) as (_, client):
        with pytest.raises(NotHeldError, match=rf"`parameters` has {LONG} values, not {LONG + 1}$"):
            client.pull(Key("parameters", 5, 0, LONG + 1), torch.empty(LONG + 1))
        with pytest.raises(NotHeldError, match=r"`momentum` of step 5 is not held; steps held: none$"):
            client.get(Key("momentum", 5, 0, 1))
        with pytest.raises(
            CommunicationError, match=r"^rank 0 \(peer\) sent 4 bytes of `parameters` from 0, expected 8"
        ):
            client.pull(Key("parameters", 5, 0, 1), torch.empty(2))


def test_a_rank_that_shares_nothing_says_so(tmp_path):
    refused = pytest.raises(NotHeldError, match=r"^rank 0 \(peer\): this rank gives no state away$")
    with world(tmp_path, 2), PeerClient(directory_of(tmp_path, 2), own=1, rank=0) as client, refused:
        client.get(Key("parameters", 0, 0, 1))


def test_every_call_ends_within_its_time_limit(tmp_path):
    release = threading.Event()

    class Stuck(Snapshots):
        def read(self, key):
            release.wait(30)
            return super().read(key)

    with world(tmp_path, 2) as communicators:
        communicators[0].share_state(Stuck())
        with PeerClient(directory_of(tmp_path, 2), own=1, rank=0, timeout_s=0.2) as client:
            for call in (lambda: client.get(whole(5)), lambda: client.pull(whole(5), torch.empty(LONG)), client.ping):
                with pytest.raises(PeerLostError, match=r"^rank 0 \(peer\): "):
                    call()
        release.set()


def test_a_rank_that_does_not_exist_is_lost_and_not_waited_for(tmp_path):
    lost = pytest.raises(PeerLostError, match=r"^rank 0 \(peer\): ")
    with PeerClient(directory_of(tmp_path, 2), own=1, rank=0, timeout_s=5) as client, lost:
        client.ping()


def test_what_a_hostile_rank_says_of_the_end_of_a_call_is_short_and_moves_no_terminal(tmp_path):
    class Hostile(grpc.GenericRpcHandler):
        def service(self, _call):
            def end(_request, context):
                context.abort(grpc.StatusCode.INTERNAL, "\x1b[2Jall is well\n" + "more " * 400)

            return grpc.unary_unary_rpc_method_handler(end)

    directory, server = directory_of(tmp_path, 2), grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Hostile(),))
    server.add_insecure_port(f"unix:{directory.addresses[0].socket}")
    server.start()
    try:
        with PeerClient(directory, own=1, rank=0) as client, pytest.raises(CommunicationError) as told:
            client.ping()
    finally:
        server.stop(0).wait()
    assert "\N{REPLACEMENT CHARACTER}[2Jall is well\N{REPLACEMENT CHARACTER}more " in str(told.value)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("change", [{"world": "run 2"}, {"peers": [Peer(0), Peer(2**40)]}])
def test_a_caller_of_another_run_is_refused(tmp_path, change):
    refused = pytest.raises(CommunicationError, match=r"^rank 0 \(peer\): this is another run$")
    with world(tmp_path, 2), PeerClient(directory_of(tmp_path, 2, **change), own=1, rank=0) as client, refused:
        client.ping()


def test_a_caller_on_another_host_proves_who_it_is(hosts, tmp_path):
    first, second = hosts(2, names=lambda rank: peer_name(7 * rank))
    comm = GrpcCommunicator(first, rank=0)
    try:
        as_seven = replace(second, peers=[Peer(0), Peer(7)])
        with PeerClient(as_seven, own=1, rank=0) as client:  # it joins: it is no member yet
            assert 0 == client.ping().epoch
        refused = pytest.raises(CommunicationError, match=r"this is not rank 1$")
        with PeerClient(second, own=1, rank=0) as client, refused:
            client.ping()
        stranger = replace(second, certificates=hosts(2)[1].certificates)
        with PeerClient(stranger, own=1, rank=0, timeout_s=5) as client, pytest.raises(PeerLostError):
            client.ping()
    finally:
        comm.close()


@pytest.mark.parametrize("data", [b"", bytes(60), pack_piece(Piece(PieceKind.WHICH, Key("x", 0, 0, 0)))[:-1]], ids=len)
def test_a_request_that_no_client_makes_is_refused(tmp_path, data):
    metadata = (("ttlaunch-worker", "1"), ("ttlaunch-incarnation", "0"), ("ttlaunch-world", "run 1"))
    with world(tmp_path, 2), grpc.insecure_channel(f"unix:{tmp_path}/rank-0.sock") as channel:
        for method in ("Ping", "GetParameters"):
            with pytest.raises(grpc.RpcError) as found:
                channel.unary_unary(f"/ttlaunch.v1.Peer/{method}")(data, metadata=metadata, timeout=20)
            assert grpc.StatusCode.INVALID_ARGUMENT == found.value.code()


MICRO_BATCHES = 6


def nodes_of(leaves):
    """The largest complete nodes of a block of micro-batches: their keys for values 0 to `LONG`, and their sums."""
    tree = GradientTree(LONG)
    for leaf in leaves:
        tree.add(leaf, gradient(leaf), tokens=1, loss=0.0)
    return {Key("gradients", 0, 0, LONG, one.start, one.size): one.gradient_N.clone() for one in tree.subtrees()}


def gradient(leaf):
    return torch.randn(LONG, generator=torch.Generator().manual_seed(leaf))


def total():
    mean = torch.empty(LONG)
    tree = GradientTree(LONG)
    for leaf in range(MICRO_BATCHES):
        tree.add(leaf, gradient(leaf), tokens=0, loss=0.0)
    tree.mean(mean, micro_batches=MICRO_BATCHES)
    return mean


def shard_of(rank, ranks):
    return LONG * rank // ranks, LONG * (rank + 1) // ranks


@contextmanager
def callers(folder, ranks, **options):
    """Clients of rank 0 for each rank of a world, and the communicator of rank 0."""
    with ExitStack() as opened:
        communicators = opened.enter_context(world(folder, ranks))
        directory = directory_of(folder, ranks)
        clients = [opened.enter_context(PeerClient(directory, own=rank, rank=0, **options)) for rank in range(ranks)]
        yield communicators[0], clients


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_sum_of_all_nodes_has_the_bits_of_one_process_for_any_number_of_ranks(tmp_path, ranks):
    blocks = contiguous_blocks(MICRO_BATCHES, ranks)
    result = torch.empty(LONG)

    def call(rank, client):
        first, last = shard_of(rank, ranks)
        wanted = Key("gradients", 0, first, last, size=MICRO_BATCHES)
        client.reduce_scatter(wanted, nodes_of(blocks[rank]), result[first:last])

    with callers(tmp_path, ranks) as (_, clients), ThreadPoolExecutor(ranks) as pool:
        list(pool.map(call, range(ranks), clients))
    assert torch.equal(total(), result)


def test_nodes_that_come_twice_late_and_in_ranges_of_values_are_summed_once(tmp_path):
    with callers(tmp_path, 2) as (_, (first, second)):
        parts = []
        for key, sum_N in (nodes_of(range(3)) | nodes_of(range(1, 6)) | nodes_of(range(4))).items():
            cut = (7 * key.start + 5) % LONG
            parts += [(key._replace(last=cut), sum_N[:cut]), (key._replace(first=cut), sum_N[cut:])]
        Random(3).shuffle(parts)  # noqa: S311 - no secret
        assert [True] * len(parts) == [first.send_gradients(key, part.contiguous()) for key, part in parts]
        assert [False] * len(parts) == [second.send_gradients(key, part.contiguous()) for key, part in parts]
        wanted, box = Key("gradients", 0, 0, LONG, size=MICRO_BATCHES), torch.empty(LONG)
        for client in (first, second):
            client.reduce_scatter(wanted, {}, box.zero_())
            assert torch.equal(total(), box)
        assert not first.send_gradients(*next(iter(nodes_of(range(2)).items())))  # when all have taken the total


def test_shards_of_all_ranks_are_gathered(tmp_path):
    boxes = [torch.empty(LONG) for _ in range(3)]

    def call(rank, client):
        first, last = shard_of(rank, 3)
        wanted, own = Key("weights", 4, 0, LONG, size=1), Key("weights", 4, first, last, size=1)
        client.all_gather(wanted, own, VECTOR[first:last], into=boxes[rank])

    with callers(tmp_path, 3) as (_, clients), ThreadPoolExecutor(3) as pool:
        list(pool.map(call, range(3), clients))
    assert all(torch.equal(VECTOR, box) for box in boxes)


def test_a_total_of_which_a_node_is_missing_is_waited_for_until_the_time_limit(tmp_path):
    with callers(tmp_path, 2, timeout_s=0.5) as (_, (client, _)):
        wanted = Key("gradients", 0, 0, LONG, size=MICRO_BATCHES)
        with pytest.raises(PeerLostError, match=r"^rank 0 \(peer\): .*Deadline Exceeded"):
            client.reduce_scatter(wanted, nodes_of(range(5)), torch.empty(LONG))


def test_sums_of_another_epoch_are_refused_and_counted_and_who_waits_learns_that_one_begins(tmp_path):
    with callers(tmp_path, 2) as (comm, (client, other)), ThreadPoolExecutor(1) as pool:
        wanted = Key("gradients", 0, 0, LONG, size=MICRO_BATCHES)
        waiting = pool.submit(client.reduce_scatter, wanted, {}, torch.empty(LONG))
        assert not waiting.done()
        comm.begin_epoch(replace(directory_of(tmp_path, 2), epoch=1), rank=0)
        with pytest.raises(EpochOverError, match=r"^rank 0 \(peer\): this rank is in epoch 1, not in 0$"):
            waiting.result(30)
        for key, sum_N in nodes_of(range(2)).items():
            with pytest.raises(EpochOverError):
                other.send_gradients(key, sum_N)
            assert other.send_gradients(key._replace(epoch=1), sum_N)
        assert 2 == comm.dropped_frames


@pytest.mark.parametrize("node", [(0, 3), (1, 2), (0, 0)])
def test_a_sum_of_leaves_that_are_no_node_is_refused(tmp_path, node):
    refused = pytest.raises(
        CommunicationError, match=r"^rank 0 \(peer\): a sum of leaves that are no node of the tree$"
    )
    with callers(tmp_path, 1) as (_, (client,)), refused:
        client.send_gradients(Key("gradients", 0, 0, 3, *node), torch.ones(3))


def test_a_key_that_fits_no_header_fails_the_call_at_once(tmp_path):
    with callers(tmp_path, 1) as (_, (client,)), pytest.raises(ValueError, match="cannot be sent"):
        client.send_gradients(Key("x" * 300, 0, 0, 3, 0, 1), torch.ones(3))


def test_a_worker_that_is_no_member_sends_no_sums(tmp_path):
    refused = pytest.raises(CommunicationError, match=r"worker 1 is no member of epoch 0$")
    with world(tmp_path, 1), PeerClient(directory_of(tmp_path, 2), own=1, rank=0) as client, refused:
        client.send_gradients(Key("gradients", 0, 0, 3, 0, 1), torch.ones(3))
