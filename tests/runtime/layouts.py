"""Every layout of every synchronous recipe in one process, for tests that compare them bit for bit."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.report import combine_digests
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch
from ttlaunch.runtime.simulate import simulate
from ttlaunch.runtime.world import World
from ttlaunch.spec.recipe.importing import import_recipe_module

RECIPES = Path(__file__).parents[2] / "recipes"
LAYOUTS = {
    "single": ("hierarchical_parallel", ["trainer"]),
    "two tiers": ("hierarchical_parallel", ["worker"] * 3 + ["aggregator_optimizer"]),
    "three tiers": ("hierarchical_parallel", ["worker"] * 2 + ["aggregator", "optimizer"]),
    "data parallel": ("data_parallel", ["worker"] * 3),
    "pipeline": ("pipeline_parallel", ["stage"] * 2),
    "workers of two ranks": ("hierarchical_parallel", ["worker"] * 4 + ["aggregator", "optimizer"]),
    "two pipelines": ("pipeline_parallel", ["stage"] * 4),
    "two servers": ("sync_ps", ["worker"] * 3 + ["server"] * 2),
}
PIPELINE = {"blocks_per_rank": [1, 1]}
SECTIONS = {
    "pipeline": {"multihost_config": {"pipeline_parallel_config": PIPELINE}},
    "workers of two ranks": {"device_config": {"mesh_shape": [1, 2], "enable_ddp": True}},
    "two pipelines": {"multihost_config": {"pipeline_parallel_config": PIPELINE | {"replicas": 2}}},
}
"""What a layout needs in the configuration."""

OTHERS = [name for name in LAYOUTS if name != "single"]


class Trained:
    """What the ranks left behind."""

    def __init__(self, run_dir, world):
        self.run_dir, self.size = run_dir, world.size

    def records(self, kind):
        """All records of a kind, rank by rank."""
        paths = [self.run_dir / contract.progress_file(rank) for rank in range(self.size)]
        found = [
            contract.read_record(line) | {"rank": rank}
            for rank, p in enumerate(paths)
            for line in p.read_text().splitlines()
        ]
        return [record for record in found if record["kind"] == kind]

    def by_step(self, kind, key):
        """The value of `key` for each step, from the ranks that know it for the whole step."""
        whole = [record for record in self.records(kind) if key in record]
        most = defaultdict(list)
        for record in whole:
            most[record["step"]].append(record)
        chosen = {
            step: max(records, key=lambda r: (r.get("tokens", r.get("samples", 0)), "grad_norm" in r))
            for step, records in most.items()
        }
        return {step: record[key] for step, record in sorted(chosen.items())}

    def result(self, name):
        """The last value that a rank gave for the summary; None if none did."""
        values = [record["values"][name] for record in self.records(contract.KIND_RESULT) if name in record["values"]]
        return values[-1] if values else None

    def assert_replicas_agreed(self):
        """Fail unless the digests of all ranks agree after every step that they report."""
        watch = watch_records(self.run_dir, self.size)
        watch.replicas.settle({})
        assert watch.replicas.difference is None, "ranks hold different parameters"

    @property
    def sha256(self):
        self.assert_replicas_agreed()
        digests = defaultdict(set)
        for record in self.records(contract.KIND_PARAMETERS):
            for name, digest in record["digests"].items():
                digests[name].add(digest)
        assert digests
        assert {1} == {len(found) for found in digests.values()}, "ranks hold different parameters"
        return combine_digests([{name: found.pop() for name, found in digests.items()}])[0]


def watch_records(run_dir, size):
    """What the launcher sees of a run's records."""
    rows = tuple(RankRow(rank, "here", rank, "worker") for rank in range(size))
    watch = Watch(SimpleNamespace(ranks=rows), RunFolder(run_dir.name, run_dir))
    watch.read_all()
    return watch


def train(layout, run_dir, config, *, data, saves=False, **world):
    """Train in one process and say what came out; fails if a rank does or if messages are wrong."""
    recipe, roles = LAYOUTS[layout]
    return train_recipe(recipe, roles, run_dir, config | SECTIONS.get(layout, {}), data=data, saves=saves, **world)


def train_recipe(recipe, roles, run_dir, config, *, data, saves=False, **world):
    """The same for any recipe and any number of ranks."""
    folder = RECIPES / recipe
    resolved = import_recipe_module(folder, "recipe").RECIPE.config.model_validate(config)
    run_dir.mkdir(parents=True)
    planned = World(
        recipe_folder=folder,
        layout="test",
        roles=tuple(roles),
        hosts=("here",) * len(roles),
        local_ranks=tuple(range(len(roles))),
        config=resolved.model_dump(mode="json"),
        data_path=data,
        data_sha256=None,
        **world,
    )
    outcome = simulate(planned, run_dir, saves=saves)
    assert ({}, []) == (outcome.errors, outcome.findings)
    return Trained(run_dir, planned)
