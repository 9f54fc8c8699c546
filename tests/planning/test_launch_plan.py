"""The plan: equal for equal inputs, different when anything that matters changes, and free of the user's secrets."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from ttlaunch.engines.openmpi import OpenMpi, generation_of
from ttlaunch.planning.launch_plan import render_plan_json

ROOT = Path(__file__).parents[2]
CANARY = "sk-canary-0123"
WORKERS = ("multihost_config.num_workers=3",)


def test_equal_inputs_give_equal_plans(plan):
    first, second = plan("hierarchical_parallel"), plan("hierarchical_parallel")
    assert first == second
    assert first.hash == second.hash
    assert render_plan_json(first) == render_plan_json(second)


def test_the_hash_covers_the_whole_content(plan):
    content = json.loads(render_plan_json(plan("hierarchical_parallel")))
    assert (content["format"], content["hash"]) == (1, plan("hierarchical_parallel").hash)


def test_the_hash_leaves_out_only_what_follows_from_the_engine(plan):
    content = json.loads(render_plan_json(plan("hierarchical_parallel")))
    said = content.pop("hash"), content.pop("format"), content["engine"].pop("names")["launcher"]
    assert said == (hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(), 1, "mpirun")


@pytest.mark.parametrize(
    "change",
    [
        {"overrides": ("training_config.steps=7",)},
        {"overrides": ("training_config.seed=1",)},
        {"ranks": 3},
        {"on": "5loudboxes", "overrides": WORKERS},
        {"surroundings": {"engine": OpenMpi("/usr/bin/mpirun", (4, 1, 4), generation_of((4, 1, 4)))}},
        {"surroundings": {"working_folder": Path("/home/ann/other")}},
        {"surroundings": {"shell": {"TT_LOGGER_LEVEL": "debug"}}},
    ],
    ids=["steps", "seed", "layout", "topology", "engine", "working-folder", "environment"],
)
def test_the_hash_changes_with_everything_that_decides_the_run(plan, change):
    assert plan("hierarchical_parallel", **change).hash != plan("hierarchical_parallel").hash


def test_the_hash_changes_with_the_recipe_and_with_the_text(plan, here):
    shutil.copytree(ROOT / "recipes/hierarchical_parallel", here / "recipes/hierarchical_parallel")
    own = plan("hierarchical_parallel")
    shutil.rmtree(here / "recipes")
    assert own.hash != plan("hierarchical_parallel").hash
    data = {"overrides": ("training_config.data_path=book.txt",)}
    (here / "book.txt").write_text("It was a dark and stormy night.\n" * 200)
    first = plan("hierarchical_parallel", **data).hash
    (here / "book.txt").write_text("It was a calm and starry night.\n" * 200)
    assert plan("hierarchical_parallel", **data).hash != first


def test_the_hash_changes_with_a_binding(plan, here):
    shutil.copytree(ROOT / "configurations/5loudboxes", here / "lab")
    first = plan("hierarchical_parallel", on="lab", overrides=WORKERS).hash
    bindings = here / "lab/rank_bindings.yaml"
    bindings.write_text(bindings.read_text().replace("$HOME/tt-metal", "/opt/tt-metal"))
    assert plan("hierarchical_parallel", on="lab", overrides=WORKERS).hash != first


def test_no_value_of_the_environment_stands_on_a_command_line(plan, here):
    shutil.copytree(ROOT / "configurations/5loudboxes", here / "lab")
    bindings = here / "lab/rank_bindings.yaml"
    bindings.write_text(bindings.read_text().replace("$HOME/tt-metal", CANARY))
    shell = {"TT_TOKEN": CANARY, "PATH": f"/{CANARY}", "HOME": f"/{CANARY}", "OMPI_MCA_token": CANARY}
    made = plan("hierarchical_parallel", on="lab", overrides=WORKERS, surroundings={"shell": shell})
    assert made.environment["TT_METAL_HOME"] == CANARY
    assert made.environment["TT_TOKEN"].startswith("env:")
    for text in (*made.engine.argv, *made.engine.environment.values(), *made.engine.files.values(), *made.rank_command):
        assert CANARY not in text


def test_hostfile_and_bindings_give_the_plan_of_the_folder(plan, here, monkeypatch):
    shutil.copytree(ROOT / "configurations/5loudboxes", here / "lab")
    by_folder = plan("hierarchical_parallel", on="lab", overrides=WORKERS)
    files = {"hostfile": Path("lab/hosts.txt"), "rank_bindings": Path("lab/rank_bindings.yaml")}
    assert plan("hierarchical_parallel", overrides=WORKERS, **files).hash == by_folder.hash


@pytest.mark.parametrize(
    ("recipe", "request_", "layout", "roles"),
    [
        ("hierarchical_parallel", {"ranks": 1}, "single", ["trainer"]),
        ("hierarchical_parallel", {"ranks": 3}, "two_tier", ["worker", "worker", "aggregator_optimizer"]),
        ("hierarchical_parallel", {}, "three_tier", ["worker", "worker", "aggregator", "optimizer"]),
        ("hierarchical_parallel", {"overrides": ["multihost_config.enabled=false"]}, "single", ["trainer"]),
        ("pipeline_parallel", {}, "pipeline", ["stage", "stage"]),
        ("pipeline_parallel", {"ranks": 1}, "single", ["trainer"]),
        ("fabric_minimal", {}, "all", ["peer", "peer"]),
        ("fabric_minimal", {"ranks": 5}, "all", ["peer"] * 5),
        ("fabric_minimal", {"on": "2loudboxes"}, "all", ["peer", "peer"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_take_the_roles_of_the_layout_in_order(plan, recipe, request_, layout, roles):
    made = plan(recipe, **request_)
    assert made.program.layout == layout
    assert [row.role for row in made.ranks] == roles
    assert [row.rank for row in made.ranks] == list(range(len(roles)))


@pytest.mark.parametrize(
    ("recipe", "ranks", "flows"),
    [
        ("hierarchical_parallel", 1, ()),
        ("hierarchical_parallel", 3, (("worker", "aggregator_optimizer", "all"),)),
        ("hierarchical_parallel", 4, (("worker", "aggregator", "all"), ("aggregator", "optimizer", "all"))),
        ("pipeline_parallel", 2, (("stage", "stage", "chain"),)),
        ("fabric_minimal", 3, (("peer", "peer", "all"),)),
    ],
)
def test_a_layout_has_the_flows_between_its_roles(plan, recipe, ranks, flows):
    assert plan(recipe, ranks=ranks).flows == flows


def test_a_rank_drives_the_mesh_of_its_host(plan):
    made = plan("hierarchical_parallel", on="5loudboxes", overrides=WORKERS)
    assert [(row.host, row.mesh_id, row.device_shape) for row in made.ranks] == [
        ("loudbox-01", 1, (1, 8)),
        ("loudbox-02", 0, (1, 8)),
        ("loudbox-03", 2, (1, 8)),
        ("loudbox-04", 3, (1, 8)),
        ("loudbox-05", 4, (1, 8)),
    ]


def test_ranks_fill_the_slots_of_uneven_hosts_in_order(plan, here):
    (here / "lab").mkdir()
    (here / "lab/hosts.txt").write_text("a slots=1\nb slots=3\nc slots=2\n")
    rows = plan("fabric_minimal", on="lab", ranks=5).ranks
    assert [(row.host, row.slot) for row in rows] == [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]


def test_a_script_runs_on_every_rank_without_roles(plan, here):
    (here / "work.py").write_text("")
    made = plan("work.py", ranks=2)
    assert [row.role for row in made.ranks] == ["rank", "rank"]
    content = made.as_json()
    assert (content["recipe"], content["command"]) == (None, {"name": "work", "command": ["./work.py"]})
