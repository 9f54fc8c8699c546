"""What a message costs two ranks that compute between messages (E9)."""

import time
from types import SimpleNamespace

import pytest
import torch

from ttlaunch.runtime.calibration import trainer
from ttlaunch.runtime.comm.in_process import InProcessWorld


def test_neither_computing_nor_waiting_is_a_part_of_a_message(monkeypatch):
    """The first rank computes for half a second until it looks no more, and the second one comes half a second late."""
    monkeypatch.setattr(trainer, "_MOST_LOOKS", 4)
    world, found, computed = InProcessWorld(["copy"] * 2), {}, {0: 0, 1: 0}

    def live(rank):
        layers = trainer.Layers(16)

        def compute():
            computed[rank] += 1
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                layers.compute()

        time.sleep(rank / 2)
        sent, received = [torch.full((250,), rank + 1.0)], [torch.zeros(250)]
        found[rank] = trainer.exchange(world.communicator(rank), sent, received, between=compute)
        assert torch.equal(received[0], torch.full((250,), 2.0 - rank))

    outcome = world.run({rank: lambda rank=rank: live(rank) for rank in (0, 1)})

    assert not outcome.errors
    assert {0: 5, 1: 1} == computed
    # In one process its clock also runs while the other rank computes: the one that comes late has nothing of that.
    assert 0 < found[1] < 0.05


def test_layers_are_computed_forward_and_backward():
    layers = trainer.Layers(16)
    layers.compute()

    assert all(one.grad is not None for one in layers._model.parameters())


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"transformer_config": {"embedding_dim": 64}}, 64),
        ({"transformer_config": {"embedding_dim": 4096}}, 256),
        ({"transformer_config": {"embedding_dim": "wide"}}, 256),
        ({"transformer_config": [64]}, 256),
        ({}, 256),
    ],
)
def test_layers_are_as_wide_as_those_of_the_plan_up_to_a_limit(config, width):
    assert width == trainer._width_of(SimpleNamespace(config=config))
