"""With how many ranks a recipe goes on where hosts are gone: as many as one of its layouts allows, keys lowered if need be."""

from pathlib import Path

import pytest

from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.planning.fewer_ranks import World, largest_world

WORKERS = "multihost_config.num_workers"
BLOCKS = "multihost_config.pipeline_parallel_config.blocks_per_rank"
REPLICAS = "multihost_config.pipeline_parallel_config.replicas"


@pytest.fixture
def world(here):
    """`world(recipe, slots, *overrides, …)`: the largest one on so many slots, where the configuration asked for more."""

    def find(recipe, slots, *overrides, most=64, before=None):
        folder = here / "configurations/left"
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, "hosts.txt").write_text(f"box slots={slots}\n")
        description = resolve(RunSpec(recipe, on="left", overrides=overrides), working_folder=here)
        assert description.choice.loaded.config is not None, description.diagnostics
        return largest_world(description.choice, description.topology, most=most, before=before)

    return find


@pytest.mark.parametrize(
    ("recipe", "slots", "overrides", "expected"),
    [
        ("data_parallel", 3, (f"{WORKERS}=4",), World(3, (f"{WORKERS}=3",), "data_parallel")),
        ("data_parallel", 1, (f"{WORKERS}=4",), World(1, (), "single")),
        ("hierarchical_parallel", 5, (f"{WORKERS}=4",), World(5, (), "two_tier")),
        ("hierarchical_parallel", 4, (f"{WORKERS}=4",), World(4, (f"{WORKERS}=2",), "three_tier")),
        ("hierarchical_parallel", 2, (f"{WORKERS}=4",), World(2, (f"{WORKERS}=1",), "two_tier")),
        ("pipeline_parallel", 3, (f"{BLOCKS}=[1, 1, 1, 1]",), World(3, (f"{BLOCKS}=[2, 1, 1]",), "pipeline")),
        ("pipeline_parallel", 3, (f"{REPLICAS}=2",), World(2, (f"{REPLICAS}=1",), "pipeline")),
        (
            "pipeline_parallel",
            3,
            (f"{BLOCKS}=[1, 1, 1, 1]", f"{WORKERS}=4"),
            World(3, (f"{BLOCKS}=[2, 1, 1]", f"{WORKERS}=3"), "pipeline"),
        ),
        ("fabric_minimal", 3, (), World(3, (), "all")),
    ],
)
def test_the_largest_world_that_the_layouts_allow(world, recipe, slots, overrides, expected):
    assert expected == world(recipe, slots, *overrides)


def test_of_two_layouts_of_one_size_the_one_so_far_is_kept(world):
    changed = World(4, (f"{WORKERS}=3",), "two_tier")
    assert changed == world("hierarchical_parallel", 4, f"{WORKERS}=4", before="two_tier")


def test_no_more_ranks_than_were_asked_for(world):
    assert World(2, (), "data_parallel") == world("data_parallel", 8, f"{WORKERS}=2", most=2)


def test_chunks_that_do_not_fit_the_blocks_rule_a_world_out(world):
    """Two stages of two chunks share 4 blocks; with 3 stages some would have an odd number of them."""
    pipeline = "multihost_config.pipeline_parallel_config"
    overrides = (f"{BLOCKS}=[2, 2, 2, 2]", f"{pipeline}.num_blocks=8", "transformer_config.num_blocks=8")
    chunks = (f"{pipeline}.chunks_per_rank=2", f"{pipeline}.schedule=interleaved")
    assert World(2, (f"{BLOCKS}=[4, 4]",), "pipeline") == world("pipeline_parallel", 3, *overrides, *chunks)


def test_a_recipe_without_a_layout_of_so_few_ranks_has_no_world(world, here):
    folder = here / "recipes/pair"
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(
        "from ttlaunch.recipe import ConfigFile, Layout, Recipe\n"
        'RECIPE = Recipe("Two talk.", ConfigFile, [Layout("pair", one=1, other=1)], uses_data=False)\n'
    )
    (folder / "trainer.py").write_text("def one(cfg, ctx): ...\ndef other(cfg, ctx): ...\n")
    assert world("pair", 1) is None
