"""Every recipe whose ranks share tensors reports their digests; a flipped bit in any of these tensors is found, in its rank."""

import os
import random

import pytest
import torch

from tests.runtime.flips import KINDS, STEPS, Trainings, flipping
from ttlaunch.runtime.checkpoint.checkpoints import held_tensors

from .conftest import FOX

FLIPS = int(os.environ.get("FLIPS_PER_RECIPE", "1"))
"""In each recipe; `FLIPS_PER_RECIPE=3` tries more."""


@pytest.fixture(scope="module", params=list(KINDS))
def trainings(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "text.txt").write_text(FOX)
    return Trainings(request.param, folder, data=folder / "text.txt")


@pytest.fixture(scope="module")
def undisturbed(trainings):
    """The ranks that hold each shared tensor, and what the launcher saw of the training that told them."""
    return trainings.shared_tensors(), trainings.last


def test_replicas_that_train_together_agree_after_every_compared_step(undisturbed):
    _, found = undisturbed
    assert (None, STEPS, STEPS) == (found.difference, found.step, found.agreed)


def test_a_flipped_bit_of_a_shared_tensor_is_found_in_the_right_rank(trainings, undisturbed):
    holders, _ = undisturbed
    draw = random.Random(5)  # noqa: S311 - the same flips in every run
    for _ in range(FLIPS):
        name = draw.choice(sorted(holders))
        rank = draw.choice(holders[name])
        with flipping(rank, name, draw):
            found = trainings.run()
        assert (2, 0) == (found.step, found.agreed)
        assert found.difference.name == name
        assert found.difference.odd == ((rank,) if len(holders[name]) > 2 else ())


def test_a_plain_module_and_optimizer_of_torch_are_compared_by_their_parameters():
    module = torch.nn.Linear(2, 2)
    held = dict(held_tensors(module, torch.optim.SGD(module.parameters())))
    assert ["weight", "bias"] == list(held)
