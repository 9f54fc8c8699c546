"""Bytes of each epoch of an elastic run against the recipe's formula, from files as ranks write them."""

import json
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.running.metrics.epoch_traffic import (
    EpochTraffic,
    compare_epochs,
    members_interval,
    members_step_bytes,
)
from ttlaunch.running.metrics.telemetry import read_rank

RECIPES = Path(__file__).parents[3] / "recipes"
VALUES = 8  # so that each of two members has a shard of 16 bytes
BLOCKS = [[0, 2], [2, 8]]  # one node of the tree, and two
# Each sends its nodes of the other one's shard, then the mean of its own; with each node a loss and a number of tokens.
SENT = {0: {"gradients": 1 * 16 + 16, "counts": 1 * 16}, 1: {"gradients": 2 * 16 + 16, "counts": 2 * 16}}
A_STEP = 128
ELASTIC = {"elastic": {"first": 2, "minimum": 1}}


def plan_of(recipe="data_parallel", ranks=4, role="worker", **sections):
    config = {"training_config": {"batch_size": 8, "micro_batch_size": 1}, **sections}
    rows = [{"rank": rank, "role": role} for rank in range(ranks)]
    return {"recipe": {"name": recipe, "folder": str(RECIPES / recipe)}, "ranks": rows, "config": config}


def write(folder, number, *, dest, last, sent, outside=0):
    """Write what a rank has sent in each step up to the last."""
    rows = [[name, None, "exchange", dest, [[1, last, 1, 1, size]]] for name, size in sent.items()]
    rows += [["gradients", None, "after", dest, [[1, last, 1, 1, outside]]]] if outside else []
    line = {"format": contract.TRAFFIC_FORMAT, "last": last, "facts": {"values": VALUES, "validation_micro_batches": 1}}
    path = folder / contract.traffic_file(number)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**line, "sent": rows, "waited": [], "spent": []}) + "\n")


def epoch(step, *members, blocks=BLOCKS):
    return {"step": step, "members": list(members), "blocks": blocks}


def compared(folder, *epochs, is_done=True, **plan):
    return compare_epochs(folder, plan_of(**plan), epochs, is_done=is_done)


def test_all_steps_of_an_epoch_but_the_first_are_compared_with_the_blocks_of_its_members(tmp_path):
    for number in (0, 1):
        write(tmp_path, number, dest=1 - number, last=10, sent=SENT[number])
    assert [EpochTraffic(9, 9 * A_STEP, 9 * A_STEP)] == compared(tmp_path, epoch(0, 0, 1))
    [equal] = compared(tmp_path, epoch(0, 0, 1, blocks=[[0, 4], [4, 8]]))
    assert 9 * (A_STEP - 32) == equal.expected  # then each has one node


def test_a_run_that_ended_before_its_first_epoch_has_nothing_to_compare(tmp_path):
    assert [] == compared(tmp_path)


def test_the_last_step_before_a_change_is_not_compared_nor_what_is_outside_of_steps(tmp_path):
    for number in (0, 1):
        write(tmp_path, number, dest=1 - number, last=10, sent=SENT[number], outside=7)
    first, second = compared(tmp_path, epoch(0, 0, 1), epoch(5, 0, 1))
    assert (EpochTraffic(3, 3 * A_STEP, 3 * A_STEP), 4) == (first, second.steps)


def test_of_a_killed_member_the_last_step_that_it_has_written_may_be_incomplete(tmp_path):
    write(tmp_path, 0, dest=1, last=10, sent=SENT[0])
    write(tmp_path, 1, dest=0, last=4, sent=SENT[1])
    assert 2 == compared(tmp_path, epoch(0, 0, 1), epoch(7, 0, blocks=[[0, 8]]))[0].steps
    assert [2] == [one.steps for one in compared(tmp_path, epoch(0, 0, 1), is_done=False)]


def test_bytes_that_differ_are_counted_as_they_are(tmp_path):
    write(tmp_path, 0, dest=1, last=3, sent=SENT[0])
    write(tmp_path, 1, dest=0, last=3, sent={**SENT[1], "gradients": 1000})
    assert [EpochTraffic(2, 2 * (A_STEP - 48 + 1000), 2 * A_STEP)] == compared(tmp_path, epoch(0, 0, 1))


@pytest.mark.parametrize("members", [(0, 1), (0, 9)])
def test_without_the_files_of_all_members_nothing_is_compared(tmp_path, members):
    """Worker 9 has joined from a machine that the run has not started."""
    write(tmp_path, 0, dest=1, last=10, sent=SENT[0])
    assert [None] == compared(tmp_path, epoch(0, *members))


@pytest.mark.parametrize(
    ("recipe", "sections"),
    [("zero", {"zero_config": {"stage": 0}}), ("classic_dp", {"classic_dp_config": {"staleness_bound": 0}})],
)
def test_recipes_that_sum_as_data_parallel_have_its_formula(tmp_path, recipe, sections):
    for number in (0, 1):
        write(tmp_path, number, dest=1 - number, last=10, sent=SENT[number])
    assert [EpochTraffic(9, 9 * A_STEP, 9 * A_STEP)] == compared(tmp_path, epoch(0, 0, 1), recipe=recipe, **sections)


S = 4 * VALUES
SHADOWED = {
    # Place 0 is the optimizer, 1 adds up and gives it the mean, 2 has one node and 3 two.
    "hierarchical_parallel": (
        {},
        [[0, 0], [0, 0], [0, 2], [2, 8]],
        [
            {"counts": 8},
            {"counts": 8 + 16, "gradients": S, "weights": 2 * S},
            {"counts": 2 * 32, "gradients": S},
            {"counts": 3 * 32, "gradients": 2 * S},
        ],
    ),
    # Place 0 is the server, 1 its shadow and a worker with one node, 2 a worker with two.
    "sync_ps": (
        {},
        [[0, 0], [0, 2], [2, 8]],
        [
            {"counts": 8 + 16, "gradients": S, "weights": S},
            {"counts": 2 * 32 + 8, "gradients": S},
            {"counts": 3 * 32, "gradients": 2 * S},
        ],
    ),
    # Places 0 and 1 have a half each, and shadow the other; both get the counts of the one worker.
    "sync_ps with two servers": (
        {"sync_ps_config": {"num_servers": 2}},
        [[0, 0], [0, 0], [0, 8]],
        [
            {"counts": 8, "gradients": S // 2, "weights": S // 2},
            {"counts": 8, "gradients": S // 2, "weights": S // 2},
            {"counts": 2 * 2 * 32, "gradients": S},
        ],
    ),
}


@pytest.mark.parametrize("name", SHADOWED)
def test_members_that_keep_each_others_state_send_what_the_formula_says(tmp_path, name):
    sections, blocks, sent = SHADOWED[name]
    for number, its in enumerate(sent):
        write(tmp_path, number, dest=(number + 1) % len(sent), last=5, sent=its)
    a_step = sum(sum(its.values()) for its in sent)
    [found] = compared(
        tmp_path, epoch(0, *range(len(sent)), blocks=blocks), recipe=name.split()[0], role="member", **sections
    )
    assert EpochTraffic(4, 4 * a_step, 4 * a_step) == found


@pytest.mark.parametrize("recipe", ["local_sgd", "diloco"])
def test_averages_count_in_the_steps_that_have_one(tmp_path, recipe):
    """An average after every third step, of which two are among steps 2 to 8: the last step of a training has one, whatever its number."""
    for number in (0, 1):
        rows = [
            [name, None, "exchange", 1 - number, [[3, 9, 3, 1, size]]]
            for name, size in (("weights", S), ("counts", 16))
        ]
        line = {"format": contract.TRAFFIC_FORMAT, "last": 9, "sent": rows, "waited": [], "spent": []}
        path = tmp_path / contract.traffic_file(number)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**line, "facts": {"values": VALUES, "validation_micro_batches": 1}}) + "\n")
    [found] = compared(tmp_path, epoch(0, 0, 1), recipe=recipe, **{f"{recipe}_config": {"every": 3}})
    assert EpochTraffic(7, 2 * 2 * (S + 16), 2 * 2 * (S + 16)) == found


@pytest.mark.parametrize("recipe", ["classic_dp", "elastic_dp", "zero", "pipeline_parallel", "nowhere"])
def test_a_recipe_without_a_formula_for_epochs_is_compared_with_nothing(tmp_path, recipe):
    """With a bound above 0, and where slots are cut anew at each change, there is none."""
    for number in (0, 1):
        write(tmp_path, number, dest=1 - number, last=10, sent=SENT[number])
    assert [None] == compared(tmp_path, epoch(0, 0, 1), recipe=recipe)


@pytest.mark.parametrize(("plan", "dest", "is_good"), [({}, 4, False), (ELASTIC, 4, True), (ELASTIC, 4 + 1024, False)])
def test_only_a_worker_of_an_elastic_run_sends_to_those_that_have_joined_from_other_machines(
    tmp_path, plan, dest, is_good
):
    (tmp_path / contract.PLAN_FILE).write_text(json.dumps(plan))
    write(tmp_path, 0, dest=dest, last=3, sent=SENT[0])
    bad = []
    entry = read_rank(tmp_path, 0, world_size=4, complain=bad.append)
    assert (is_good, not is_good) == (entry.is_written, bool(bad))


def test_a_formula_for_members_gives_the_bytes_of_a_step_and_the_steps_between_agreements():
    both = {"facts": [{"values": VALUES, "validation_micro_batches": 1}] * 2, "blocks": BLOCKS}
    alone = {"facts": both["facts"][:1], "blocks": [[0, 8]]}
    shards = plan_of("zero", zero_config={"stage": 3})
    local = plan_of("local_sgd", local_sgd_config={"every": 4})
    assert (A_STEP, 0) == (members_step_bytes(plan_of(), **both), members_step_bytes(plan_of(), **alone))
    assert (None, 1) == (members_step_bytes(shards, **both), members_interval(shards, **both))
    assert (0, 4) == (members_step_bytes(local, **both), members_interval(local, **both))
