"""Pipelines of any layout in one process, for tests that compare them bit for bit."""

from itertools import accumulate

from safetensors import safe_open

from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.runtime.simulate import simulate
from ttlaunch.runtime.world import World
from ttlaunch.spec.recipe.importing import import_recipe_module

from .layouts import RECIPES, Trained

STEPS = 3
SMALL = {
    "training_config": {"steps": STEPS, "batch_size": 5, "micro_batch_size": 1, "validation_interval": 2}
    | {"validation_sequences": 3, "learning_rate": 5e-3},
    "transformer_config": {"num_blocks": 8, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 8}
    | {"dropout_prob": 0.1},
    "scheduler_config": {"type": "cosine", "warmup_steps": 2},
    "checkpoint_config": {"interval": None},
}


class PipelineRuns:
    """Trains in folders of its own.

    Attributes:
        folder: Where the runs are.
        text: What they train on.
    """

    def __init__(self, folder, text):
        self.folder, self.text = folder, text
        self._count = 0

    def __call__(
        self, pipeline=None, *, ranks=1, recipe=RECIPES / "pipeline_parallel", saves=False, start=None, **sections
    ):
        """One process without a pipeline, else so many ranks; fails if one does or if messages are wrong."""
        config = sections | {name: dict(values) | sections.get(name, {}) for name, values in SMALL.items()}
        if pipeline:
            config["multihost_config"] = {"pipeline_parallel_config": pipeline}
        self._count += 1
        run_dir = self.folder / f"run-{self._count}"
        run_dir.mkdir()
        resolved = import_recipe_module(recipe, "recipe").RECIPE.config.model_validate(config)
        roles = ("stage",) * ranks if pipeline else ("trainer",)
        world = World(
            recipe_folder=recipe,
            layout="test",
            roles=roles,
            hosts=("here",) * len(roles),
            local_ranks=tuple(range(len(roles))),
            config=resolved.model_dump(mode="json"),
            data_path=self.text,
            data_sha256=None,
            start=start,
        )
        outcome = simulate(world, run_dir, saves=saves)
        assert ({}, []) == (outcome.errors, outcome.findings)
        trained = Trained(run_dir, world)
        trained.outcome = outcome
        return trained


def check_equal(expected, found):
    """The same parameters, losses, norms and validations, bit for bit."""
    assert expected.sha256 == found.sha256
    for kind, keys in (("step", ("loss", "tokens", "grad_norm", "learning_rate")), ("validation", ("loss", "tokens"))):
        for key in keys:
            assert expected.by_step(kind, key) == found.by_step(kind, key)
    assert [0, 2, STEPS] == list(found.by_step("validation", "loss"))


def most_in_flight(order):
    """How many forward passes a stage keeps the activations of at most."""
    in_flight = list(accumulate(1 if action.kind == "F" else -1 for action in order))
    assert 0 == in_flight[-1]
    return max(in_flight)


def start_from(trained, *, step):
    """What a plan says of a run's checkpoint, and the names of all tensors in it, file by file."""
    plan = {"hash": "h", "recipe": {"name": "r"}, "layout": "l", "world_size": 64, "config": {}, "data": None}
    complete_checkpoints(trained.run_dir, plan, run_id="run")
    found = verify(trained.run_dir / contract.checkpoint_dir(step))
    files = [{"path": str(found.path / name)} | entry for name, entry in found.manifest["files"].items()]
    names = []
    for entry in files:
        with safe_open(entry["path"], framework="pt") as file:
            names += file.keys()
    return {"step": step, "state": found.manifest["state"], "files": files}, names
