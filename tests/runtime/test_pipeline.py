"""B10, D10: pipelines in one process under every schedule, with replicas, equal one process bit for bit.

Sends of the in-process world are synchronous, and a deadlock or a message that nobody receives fails the test.
"""

import pytest

from ttlaunch import contract

from .pipelines import check_equal, start_from


@pytest.mark.parametrize(
    ("blocks", "schedule", "chunks"),
    [
        ([4, 4], "gpipe", 1),
        ([1, 5, 2], "gpipe", 1),
        ([1, 5, 2], "1f1b", 1),
        ([2, 2, 2, 2], "1f1b", 1),
        ([8], "1f1b", 1),
        ([4, 4], "interleaved", 2),
        ([2, 6], "interleaved", 2),
        ([2, 4, 2], "interleaved", 2),
        ([4, 4], "interleaved", 4),
        ([8], "interleaved", 2),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_schedule_and_number_of_replicas_equals_one_process(train, alone, blocks, schedule, chunks, replicas):
    """Five micro-batches: neither stages nor replicas divide them."""
    pipeline = {"blocks_per_rank": blocks, "schedule": schedule, "chunks_per_rank": chunks, "replicas": replicas}
    check_equal(alone(), train(pipeline, ranks=len(blocks) * replicas))


def test_as_many_replicas_as_micro_batches(train):
    """One micro-batch each, and fewer in a validation than there are replicas."""
    sections = {"training_config": {"batch_size": 6, "validation_sequences": 4}}
    check_equal(train(**sections), train({"blocks_per_rank": [3, 5], "replicas": 6}, ranks=12, **sections))


@pytest.mark.parametrize("chunks", [1, 2])
def test_auto_measures_each_schedule_in_steps_that_count(train, alone, chunks):
    """With chunks, blocks and their optimizer state move between ranks in mid-training; the bits stay."""
    steps = {"training_config": {"steps": 6 + 4 * chunks, "batch_size": 3, "validation_interval": 7}}
    pipeline = {"blocks_per_rank": [2, 4, 2], "schedule": "auto", "chunks_per_rank": chunks}
    expected, found = alone(**steps), train(pipeline, ranks=3, **steps)
    assert expected.sha256 == found.sha256
    assert expected.by_step("step", "loss") == found.by_step("step", "loss")
    assert expected.by_step("validation", "loss") == found.by_step("validation", "loss")
    names = ["gpipe", "1f1b", "interleaved"][: chunks + 1]
    times = {name: found.result(f"{name}_s") for name in names}
    assert min(times, key=times.get) == found.result("schedule")
    (note,) = [record["text"] for record in found.records(contract.KIND_NOTE)]
    assert note.startswith(f"schedule {found.result('schedule')} is the quickest: gpipe ")


def test_all_ranks_of_all_replicas_choose_the_same_schedule(train):
    """Ranks that disagreed would wait for each other, or pair messages of different passes."""
    steps = {"training_config": {"steps": 13, "batch_size": 3, "validation_interval": 13}}
    pipeline = {"blocks_per_rank": [4, 4], "schedule": "auto", "chunks_per_rank": 2, "replicas": 2}
    assert train(**steps).sha256 == train(pipeline, ranks=4, **steps).sha256


@pytest.mark.parametrize(
    ("steps", "chunks", "said"),
    [
        (1, 1, "none was chosen: 1 step is fewer than the 8 that measuring takes; gpipe ran"),
        (4, 1, "none was chosen: 4 steps are fewer than the 8 that measuring takes; gpipe ran"),
        (7, 1, "none was chosen: 7 steps are fewer than the 8 that measuring takes; gpipe, then 1f1b ran"),
        (8, 2, "none was chosen: 8 steps are fewer than the 12 that measuring takes; gpipe, then 1f1b ran"),
    ],
)
def test_auto_says_so_where_training_is_too_short_to_measure(train, steps, chunks, said):
    pipeline = {"blocks_per_rank": [4, 4], "schedule": "auto", "chunks_per_rank": chunks}
    found = train(pipeline, ranks=2, training_config={"steps": steps})
    assert (said, None) == (found.result("schedule"), found.result("gpipe_s"))


def test_auto_that_training_left_before_it_had_measured_says_so(train):
    """Here by early stopping, which nobody can know at the start."""
    stops = {"steps": 20, "validation_interval": 1, "early_stop_patience": 1, "early_stop_min_delta": 1000.0}
    found = train({"blocks_per_rank": [4, 4], "schedule": "auto"}, ranks=2, training_config=stops)
    assert "none was chosen: training ended within the 8 steps that measuring takes" == found.result("schedule")


def test_a_chosen_schedule_is_not_measured(train):
    assert train({"blocks_per_rank": [4, 4]}, ranks=2).result("schedule") is None


OTHERS = (None, 1), ({"blocks_per_rank": [2, 6], "replicas": 3}, 6), ({"blocks_per_rank": [2, 2, 4]}, 3)


def check_going_on(train, expected, first, *, at, **steps):
    """From a checkpoint of each of three steps another layout goes on to the same bits."""
    for step, (other, count) in zip(at, OTHERS, strict=True):
        start, names = start_from(first, step=step)
        assert len(names) == len(set(names))
        assert expected.sha256 == train(other, ranks=count, start=start, **steps).sha256


@pytest.mark.parametrize(
    ("before", "ranks"),
    [
        ({"blocks_per_rank": [3, 5], "replicas": 2}, 4),
        ({"blocks_per_rank": [4, 4], "schedule": "interleaved", "chunks_per_rank": 2}, 2),
        (None, 1),
    ],
)
def test_one_replica_writes_and_any_layout_goes_on(train, alone, before, ranks):
    steps = {"training_config": {"steps": 5, "validation_interval": 3}}
    first = train(before, ranks=ranks, saves=True, checkpoint_config={"interval": 2}, **steps)
    assert alone(**steps).sha256 == first.sha256
    check_going_on(train, alone(**steps), first, at=(2, 4, 4), **steps)


@pytest.mark.slow
def test_checkpoints_of_blocks_that_move_are_whole_and_any_layout_goes_on(train, alone):
    """With `auto` blocks have moved between the two checkpoints, and move again after the resume."""
    steps = {"training_config": {"steps": 16, "validation_interval": 8}}
    auto = {"blocks_per_rank": [2, 4, 2], "schedule": "auto", "chunks_per_rank": 2}
    first = train(auto, ranks=3, saves=True, checkpoint_config={"interval": 5}, **steps)
    assert alone(**steps).sha256 == first.sha256
    check_going_on(train, alone(**steps), first, at=(5, 10, 15), **steps)
    start, _ = start_from(first, step=5)
    assert alone(**steps).sha256 == train(auto, ranks=3, start=start, **steps).sha256
