"""What a message costs two ranks that compute between messages (E9)."""

import time

import torch

from ttlaunch.runtime.calibration import trainer
from ttlaunch.runtime.comm.in_process import InProcessWorld


class Slow:
    def compute(self):
        time.sleep(0.4)


def test_what_a_rank_computes_before_its_answer_is_no_part_of_the_message():
    world, found = InProcessWorld(["copy"] * 2), {}
    messages = {rank: (torch.ones(250), torch.ones(250)) for rank in (0, 1)}

    def ask():
        found["message_s"] = trainer._ask(world.communicator(0), *messages[0])

    def reply():
        trainer._reply(world.communicator(1), *messages[1], layers=Slow())

    outcome = world.run({0: ask, 1: reply})

    assert not outcome.errors
    assert 0.4 <= messages[0][1][1] < 4  # the answer says how long it took
    assert 0 < found["message_s"] < 0.1


def test_layers_are_computed_forward_and_backward():
    layers = trainer._Layers()
    layers.compute()

    assert all(one.grad is not None for one in layers._model.parameters())
