"""The checks that every synchronous recipe here passes, as sentences about what a training got wrong; none if it is right.

They are those of `ttlaunch parity`, `simulate` and `report`: the bits of one process, replicas that are equal, messages that
fit, and the counted traffic against the formula.
"""

import json
import os
import shutil
from collections import Counter, defaultdict
from pathlib import Path

from tests.runtime.layouts import RECIPES, Trained
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.readers.recorded import read_run
from ttlaunch.running.runs.registry import find_registry
from ttlaunch.runtime.simulate import simulate
from ttlaunch.runtime.world import read_world
from ttlaunch.spec.recipe.importing import import_recipe_module

HERE = Path(__file__).parent
STEPS, HALF = 4, 2
CONFIG = {
    "training_config": {"steps": STEPS, "batch_size": 8, "micro_batch_size": 1, "validation_sequences": 2}
    | {"clip_grad_norm_max_norm": 0.5, "learning_rate": 0.01},
    "transformer_config": {"num_blocks": 1, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
    "checkpoint_config": {"interval": HALF},
}
"""8 micro-batches: 2 and 4 workers have one node of the tree each, 3 have unequal blocks. Clipping bites in every step."""


class Judge:
    """Trains exhibits and recipes in this process, and says what is wrong with them."""

    def __init__(self, folder, corpus):
        self._folder, self._corpus = folder, corpus
        self._alone = None

    @property
    def alone(self):
        """One process, undisturbed."""
        if self._alone is None:
            self._alone = self.train("as_it_should_be", ["trainer"])[0]
        return self._alone

    def train(self, exhibit, roles, *, start=None):
        """What the ranks left behind, and what the simulation says about them."""
        folder = self._folder / f"{exhibit}-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        recipe = RECIPES / exhibit if (RECIPES / exhibit).exists() else self._hang(exhibit, folder)
        declared = import_recipe_module(recipe, "recipe").RECIPE
        plan = {
            "format": contract.PLAN_FORMAT,
            "hash": "h",
            "world_size": len(roles),
            "recipe": {"name": exhibit, "folder": str(recipe)},
            "layout": "museum",
            "ranks": [
                {"rank": rank, "slot": rank, "local_rank": rank, "host": "here", "role": role}
                for rank, role in enumerate(roles)
            ],
            "config": declared.config.model_validate(CONFIG).model_dump(mode="json"),
            "data": {"path": None, "sha256": self._corpus.sha256},
            "start": start,
        }
        (folder / contract.PLAN_FILE).write_text(json.dumps(plan))
        world = read_world(folder / contract.PLAN_FILE)
        outcome = simulate(world, folder, saves=True)
        (folder / contract.REPORT_FILE).write_text('{"status": "done"}')
        return Trained(folder, world), outcome

    def _hang(self, exhibit, folder):
        """An exhibit as a recipe: the declaration that all share, and its own trainer."""
        recipe = folder / "recipe"
        recipe.mkdir()
        shutil.copy(HERE / "recipe.py", recipe / "recipe.py")
        shutil.copy(HERE / "exhibits" / f"{exhibit}.py", recipe / "trainer.py")
        return recipe

    def verdict(self, exhibit, roles):
        """All that is wrong with a training, the most telling first."""
        trained, outcome = self.train(exhibit, roles)
        if outcome.findings:
            return [f"{finding.code}: {finding.message}" for finding in outcome.findings]
        if outcome.errors:
            error = next(iter(outcome.errors.values()))
            return [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
        return [*self._bits(trained), *self._losses(trained), *self._books(trained)]

    def _bits(self, trained):
        digests = defaultdict(set)
        for record in trained.records(contract.KIND_PARAMETERS):
            for name, digest in record["digests"].items():
                digests[name].add(digest)
        if any(len(found) > 1 for found in digests.values()):
            return ["ranks hold different parameters"]
        return [] if self.alone.sha256 == trained.sha256 else ["parameters are not those of one process"]

    def _losses(self, trained):
        for key in ("tokens", "loss", "grad_norm"):
            expected, found = (run.by_step(contract.KIND_STEP, key) for run in (self.alone, trained))
            wrong = [step for step in expected if found.get(step) != expected[step]]
            if wrong:
                return [f"`{key}` differs from one process's in step {wrong[0]}"]
        return []

    def _books(self, trained):
        # Reading a run runs code of its recipe's folder only if the registry says that this user has started it.
        plan = json.loads((trained.run_dir / contract.PLAN_FILE).read_text(encoding="utf-8"))
        registry = find_registry(os.environ)
        registry.enter(trained.run_dir.resolve(), name="museum", plan_hash=plan["hash"], ranks=len(plan["ranks"]))
        traffic = read_run(trained.run_dir).traffic
        told = [
            f"{edge.operation} {edge.source} -> {edge.dest}: {edge.ratio:.3f} of the formula"
            if edge.ratio is not None
            else f"{edge.operation} {edge.source} -> {edge.dest}: the formula has none"
            for edge in traffic.differing
        ]
        return told[:1]

    def verdict_after_resume(self, exhibit, roles):
        """What is wrong with a training that goes on from its own checkpoint of the half."""
        plan = {"hash": "h", "recipe": {"name": "r"}, "layout": "l", "world_size": 64, "config": {}, "data": None}
        whole, outcome = self.train(exhibit, roles)
        assert ({}, []) == (outcome.errors, outcome.findings)
        complete_checkpoints(whole.run_dir, plan, run_id="run")
        checkpoint = verify(whole.run_dir / contract.checkpoint_dir(HALF))
        files = [{"path": str(checkpoint.path / name)} | entry for name, entry in checkpoint.manifest["files"].items()]
        state = checkpoint.manifest["state"]
        start = {"origin": str(checkpoint.path), "step": HALF, "state": state, "files": files}
        resumed, outcome = self.train(exhibit, roles, start=start)
        assert ({}, []) == (outcome.errors, outcome.findings)
        steps = Counter(record["step"] for record in whole.records(contract.KIND_STEP) if record["step"] <= HALF)
        steps += Counter(record["step"] for record in resumed.records(contract.KIND_STEP))
        twice = [step for step, count in sorted(steps.items()) if count != len(roles)]
        found = [f"step {twice[0]} was done {steps[twice[0]] // len(roles)} times"] if twice else []
        same = whole.sha256 == resumed.sha256
        return found + ([] if same else ["parameters are not those of the run that nobody interrupted"])
