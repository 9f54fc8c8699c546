"""What a worker has promised to another one is of one step, although it trains on; a source that gives live memory is found out."""

import threading

import pytest
import torch

from tests.runtime.grpc_worlds import directory_of, world
from ttlaunch.membership.messages import Begin, Member, Seat
from ttlaunch.runtime.comm.grpc.client import PeerClient
from ttlaunch.runtime.comm.grpc.frames import CHUNK_BYTES
from ttlaunch.runtime.comm.grpc.shared_state import Snapshots
from ttlaunch.runtime.comm.grpc.vectors import Key, bytes_of
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.early_stop import EarlyStop
from ttlaunch.runtime.elastic.feed import Mean
from ttlaunch.runtime.elastic.giving import Giver
from ttlaunch.runtime.elastic.state_transfer import ReplicaState
from ttlaunch.runtime.training.optimizers import build_optimizer
from ttlaunch.runtime.training.rank_model import build_model

VALUES = 4 * CHUNK_BYTES  # float32: 16 pieces, more than are under way at once
STEP = 5
_BEGIN = Begin(
    epoch=0,
    seats=(Seat(Member(0, 0)), Seat(Member(1, 0))),
    applied=STEP,
    kept=((), ()),
    todo=((), ()),
    blocks=((0, 1), (1, 2)),
    behind=((1, STEP - 1),),
    holders=(0,),
    validates=False,
)


class Weights:
    """A vector whose every value is the number of steps in it, and the rest of what a rank has."""

    def __init__(self, replica):
        self.values_N = torch.full((VALUES,), float(STEP))
        self.replica = replica

    def train(self):
        self.values_N.add_(1)


@pytest.fixture
def weights(make_cfg, make_context):
    cfg = make_cfg()
    model = build_model(cfg, make_context(cfg))
    optimizer = build_optimizer(cfg, model, total_steps=9)
    return Weights(ReplicaState(model, optimizer, EarlyStop(cfg.training_config)))


class Live:
    """A source that gives the memory of the weights themselves."""

    def __init__(self, weights):
        self._weights = weights

    def newest(self, name):
        return STEP

    def read(self, key):
        return bytes_of(self._weights.values_N[key.first : key.last])


def copied(weights):
    source = Snapshots()
    source.hold(STEP, "mean", weights.values_N)
    return source


def given(weights):
    """What a member gives at the begin of an epoch to one that lacks the last step."""
    giver = Giver()
    giver.mean = Mean(STEP, loss=0.5, tokens=7, mean_N=weights.values_N)
    giver.give(_BEGIN, 0, weights.replica)
    return giver.parts


@pytest.mark.parametrize(("make", "is_of_one_step"), [(copied, True), (given, True), (Live, False)])
def test_what_is_pulled_while_the_rank_trains_on_is_of_one_step(tmp_path, weights, make, is_of_one_step):
    begun, trained = threading.Event(), threading.Event()
    source = make(weights)

    class Watched:
        """Lets the rank make steps between the moment when its answer is chosen and that when it is sent."""

        newest = source.newest

        def read(self, key):
            view = source.read(key)
            begun.set()
            assert trained.wait(60)
            return view

    def train():
        assert begun.wait(60)
        weights.train()
        trained.set()
        for _ in range(20):  # while pieces are under way
            weights.train()

    with world(tmp_path, 2) as communicators, PeerClient(directory_of(tmp_path, 2), own=1, rank=0) as client:
        communicators[0].share_state(Watched())
        rank = threading.Thread(target=train)
        rank.start()
        pulled_N, damaged = torch.empty(VALUES), None
        try:
            assert STEP == client.pull(Key("mean", STEP, 0, VALUES), pulled_N)
        except (
            CommunicationError
        ) as error:  # memory that changes between its checksum and its journey is found out, too
            damaged = error
        rank.join()
    assert is_of_one_step == (damaged is None and bool((pulled_N == STEP).all())), damaged
