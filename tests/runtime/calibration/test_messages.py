"""What a message costs two ranks that compute between messages (E9)."""

import time

import torch

from ttlaunch.runtime.calibration import trainer
from ttlaunch.runtime.comm.in_process import InProcessWorld


def test_neither_computing_nor_waiting_is_a_part_of_a_message(monkeypatch):
    """Each rank computes half a second in all, and the second one comes half a second late."""
    monkeypatch.setattr(trainer, "_MOST_TESTS", 4)
    world, found, layers = InProcessWorld(["copy"] * 2), {}, {}

    def live(rank):
        layers[rank] = one = trainer.Layers()
        once = one.compute

        def compute():
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                once()

        one.compute = compute
        time.sleep(rank / 2)
        found[rank] = trainer.exchange(
            world.communicator(rank), torch.full((250,), rank + 1.0), torch.zeros(250), layers=one
        )

    outcome = world.run({rank: lambda rank=rank: live(rank) for rank in (0, 1)})

    assert not outcome.errors
    assert all(one.computed_s > 0.15 for one in layers.values())
    # In one process the clock of the process also runs while the other rank computes: one of the two has nothing of that.
    assert min(found.values()) < 0.1


def test_layers_are_computed_forward_and_backward():
    layers = trainer.Layers()
    layers.compute()

    assert all(one.grad is not None for one in layers._model.parameters())
    assert layers.computed_s > 0
