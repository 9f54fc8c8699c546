"""Which ranks a flow makes talk to each other."""

import pytest

from ttlaunch.planning.roles import pairs
from ttlaunch.recipe import TrainingFile, all_pairs, chain, ends, in_columns, in_rows, per
from ttlaunch.spec.recipe.declare import Flow


@pytest.mark.parametrize(
    ("flow", "roles", "expected"),
    [
        (Flow("worker", "aggregator"), "worker worker aggregator", [(0, 2), (1, 2)]),
        (Flow("aggregator", "optimizer"), "worker aggregator optimizer", [(1, 2)]),
        (Flow("worker", "aggregator"), "worker optimizer", []),
        (chain("stage"), "stage stage stage", [(0, 1), (1, 2)]),
        (chain("stage"), "stage", []),
        (all_pairs("peer"), "peer peer peer", [(0, 1), (0, 2), (1, 2)]),
        (all_pairs("peer"), "peer", []),
        (Flow("client", "server"), "client server client server", [(0, 1), (0, 3), (2, 1), (2, 3)]),
    ],
    ids=["fan-in", "one-to-one", "absent", "chain", "short-chain", "all", "alone", "many-to-many"],
)
def test_a_flow_joins_the_ranks_of_its_roles(flow, roles, expected):
    assert list(pairs(flow, roles.split())) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (chain, [(0, 1), (1, 2), (3, 4), (4, 5)]),
        (ends, [(0, 2), (3, 5)]),
        (in_rows, [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]),
        (in_columns, [(0, 3), (1, 4), (2, 5)]),
    ],
)
def test_a_grid_of_ranks_talks_within_its_rows_or_across_them(make, expected):
    """A configuration says how long a row is: here two replicas of a pipeline of three stages."""
    row = per("multihost_config.pipeline_parallel_config.blocks_per_rank")
    blocks = {"multihost_config": {"pipeline_parallel_config": {"blocks_per_rank": [2, 1, 1]}}}
    flow = make("stage", row=row).under(TrainingFile.model_validate(blocks))
    assert expected == list(pairs(flow, ["stage"] * 6))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (chain, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (ends, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (in_rows, [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ],
)
def test_ranks_that_split_a_stage_take_turns_in_a_row(make, expected):
    """E15: two replicas of two stages of two ranks, each of which talks to the one with the same shares."""
    stages, shares = (
        f"multihost_config.pipeline_parallel_config.{key}" for key in ("blocks_per_rank", "ranks_per_stage")
    )
    blocks = {"multihost_config": {"pipeline_parallel_config": {"blocks_per_rank": [1, 1], "ranks_per_stage": 2}}}
    flow = make("stage", row=per(stages, times=shares), stride=per(shares)).under(TrainingFile.model_validate(blocks))
    assert expected == list(pairs(flow, ["stage"] * 8))


@pytest.mark.parametrize(("make", "expected"), [(ends, []), (in_columns, []), (in_rows, [])])
def test_a_grid_of_one_rank_has_nobody_to_talk_to(make, expected):
    blocks = {"multihost_config": {"pipeline_parallel_config": {"blocks_per_rank": [4]}}}
    row = per("multihost_config.pipeline_parallel_config.blocks_per_rank")
    flow = make("stage", row=row).under(TrainingFile.model_validate(blocks))
    assert expected == list(pairs(flow, ["stage"]))
