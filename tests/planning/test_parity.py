"""The matrix of `ttlaunch parity`: every cell is a plan of the layout it says, and a step of each is the same sequences."""

import json
import shlex

import pytest

from ttlaunch.planning.parity import ACCUMULATIONS, PRECISIONS, RECIPES, SEQUENCES, WORKERS, class_names, matrix

LAYOUTS = {
    "single": {"one process"},
    "two_tier": {"two tiers", "tiers of pairs"},
    "three_tier": {"three tiers"},
    "data_parallel": {"data parallel"},
    "pipeline": {"pipeline", "two pipelines"},
    "zero": {"ZeRO 1", "ZeRO 2", "ZeRO 3"},
    "sync_ps": {"one server", "two servers"},
    "ring": {"never stale"},
}


def test_every_layout_is_tried_with_one_to_four_workers():
    found = {(cell.layout, cell.workers) for cell in matrix()}
    expected = {(layout, workers) for layout in ("two tiers", "three tiers", "data parallel") for workers in WORKERS}
    expected |= {("pipeline", stages) for stages in (2, 3, 4)} | {("one process", 1)}
    expected |= {("tiers of pairs", 4), ("two pipelines", 4)}
    expected |= {("ZeRO 1", 3), ("ZeRO 2", 4), ("ZeRO 3", 2), ("ZeRO 3", 3), ("ZeRO 3", 4)}
    expected |= {("one server", 3), ("two servers", 2), ("never stale", 4)}
    assert expected == found
    assert len(found) * len(ACCUMULATIONS) * len(PRECISIONS) == len(matrix()) == len(set(matrix()))


@pytest.mark.parametrize("cell", matrix(accumulations=[3]), ids=str)
def test_the_command_of_a_cell_plans_what_the_cell_says(ttlaunch, cell):
    words = shlex.split(cell.command(steps=7, simulated=False))
    assert ["ttlaunch", "run"] == words[:2]
    answer = ttlaunch(["plan", *words[2:], "--format", "json"])
    assert (0, "") == (answer.status, answer.stderr)
    plan = json.loads(answer.stdout)
    roles = [row["role"] for row in plan["ranks"]]
    assert (cell.recipe, cell.ranks) == (plan["recipe"]["name"], plan["world_size"])
    assert cell.layout in LAYOUTS[plan["layout"]]
    assert cell.workers == sum(role in {"worker", "stage", "trainer"} for role in roles)
    training = plan["config"]["training_config"]
    assert (7, 3) == (training["steps"], training["gradient_accumulation_steps"])
    assert SEQUENCES == training["batch_size"] * training["gradient_accumulation_steps"]
    assert 0 < plan["config"]["transformer_config"]["dropout_prob"]


def test_the_first_cell_of_a_precision_is_one_process_whatever_is_asked_for():
    for cells in (matrix(recipes=["pipeline_parallel"]), matrix(ranks=[4]), matrix(accumulations=[6, 2])):
        assert ("one process", 1) == (cells[0].layout, cells[0].ranks)
        assert len(cells) == len(set(cells))
    assert {"one process", "pipeline", "two pipelines"} == {
        cell.layout for cell in matrix(recipes=["pipeline_parallel"])
    }
    assert {1, 4} == {cell.ranks for cell in matrix(ranks=[4])}
    assert set(RECIPES) == {cell.recipe for cell in matrix(ranks=[4])}


def test_classes_are_letters_in_the_order_of_their_appearance():
    assert {"x": "A", "y": "B"} == class_names(["x", "y", "x"])
    names = list(class_names([str(number) for number in range(703)]).values())
    assert ["Z", "AA", "AB", "ZZ", "AAA"] == [names[at] for at in (25, 26, 27, 701, 702)]
