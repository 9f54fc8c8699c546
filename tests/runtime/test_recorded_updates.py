"""Runs whose gradients are old are made again in one process, from what they have recorded of each update."""

import pytest
import torch

from tests.runtime.layouts import train_recipe
from tests.runtime.test_classic_dp import config
from ttlaunch import contract
from ttlaunch.runtime.parallel.recorded_updates import sum_around_ring
from ttlaunch.spec.recipe.recorded_updates import RecordedUpdate, UnusableUpdatesError, in_order

WHOLE = RecordedUpdate(1, ((0, 3, 0), (3, 7, 0)))


def recorded(run, *, micro_batches):
    """What the updates of a run were made of, in order."""
    found = {
        record["step"]: RecordedUpdate(record["task"], tuple(map(tuple, record["parts"])))
        for record in run.records(contract.KIND_UPDATE)
    }
    return in_order(found, done=0, micro_batches=micro_batches)


@pytest.mark.parametrize(("workers", "bound", "damping"), [(2, 1, 1.0), (3, 2, 0.5), (3, 4, 0.0)])
def test_bounded_staleness_is_repeated_in_one_process_with_the_same_bits(tmp_path, workers, bound, damping):
    settings = config(bound, steps=9, batch_size=7, damping=damping, validation_interval=4)
    ring = train_recipe("classic_dp", ["worker"] * workers, tmp_path / "ring", settings, data=None)
    updates = recorded(ring, micro_batches=7)
    assert 9 == len(updates)
    assert any(version < step for step, update in enumerate(updates) for _, _, version in update.parts)
    again = train_recipe("classic_dp", ["trainer"], tmp_path / "one", settings, data=None, updates=updates)
    assert ring.sha256 == again.sha256
    assert updates == recorded(again, micro_batches=7)
    for key in ("loss", "tokens", "perplexity"):
        assert ring.by_step(contract.KIND_VALIDATION, key) == again.by_step(contract.KIND_VALIDATION, key)
    fresh = [update._replace(parts=((0, 7, step),)) for step, update in enumerate(updates)]
    other = train_recipe("classic_dp", ["trainer"], tmp_path / "other", settings, data=None, updates=tuple(fresh))
    assert ring.sha256 != other.sha256


def test_half_precision_is_repeated_with_its_scale_of_the_loss(tmp_path):
    settings = config(2, steps=6, batch_size=7, precision="fp16")
    ring = train_recipe("classic_dp", ["worker"] * 2, tmp_path / "ring", settings, data=None)
    updates = recorded(ring, micro_batches=7)
    again = train_recipe("classic_dp", ["trainer"], tmp_path / "one", settings, data=None, updates=updates)
    assert ring.sha256 == again.sha256


def test_vectors_around_a_ring_are_added_in_the_order_of_the_workers():
    gradients = [torch.tensor([1e8, 1.0, 1.0]), torch.tensor([1.0, 1e8, 1.0]), torch.tensor([-1e8, -1e8, 1.0])]
    # Shard 0 begins with worker 0, shard 1 with worker 1: 1 is lost beside 1e8, unless -1e8 comes first.
    assert [0.0, 1.0, 3.0] == sum_around_ring(gradients).tolist()


@pytest.mark.parametrize(
    ("updates", "reason"),
    [
        ({1: WHOLE, 3: WHOLE._replace(task=3)}, "there is no record of what update 2 was made of"),
        ({1: WHOLE, 2: WHOLE}, "updates 1 and 2 are recorded with the same task, 1"),
        ({1: WHOLE._replace(parts=((0, 3, 0),))}, "the record of update 1 has other micro-batches than a step"),
        ({1: WHOLE._replace(parts=())}, "the record of update 1 has other micro-batches than a step"),
        (
            {1: WHOLE._replace(parts=((0, 4, 0), (3, 7, 0)))},
            "the record of update 1 has other micro-batches than a step",
        ),
        (
            {1: WHOLE._replace(parts=((0, 7, 1),))},
            "the record of update 1 names weights that there were not yet, or no more",
        ),
    ],
)
def test_records_that_do_not_fit_together_are_refused(updates, reason):
    with pytest.raises(UnusableUpdatesError) as raised:
        in_order(updates, done=0, micro_batches=7)
    assert reason == str(raised.value)


def test_a_run_that_went_on_from_a_checkpoint_begins_with_its_updates():
    update = RecordedUpdate(7, ((0, 7, 5),))
    assert (update,) == in_order({6: update}, done=5, micro_batches=7)
    with pytest.raises(UnusableUpdatesError, match="not yet, or no more"):
        in_order({6: update._replace(parts=((0, 7, 4),))}, done=5, micro_batches=7)
