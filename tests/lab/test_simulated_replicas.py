"""A simulation of a trainer whose workers hold different weights under the same names."""

import shutil
from pathlib import Path

import pytest

import ttlaunch

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {
    "training_config": {"steps": 6, "batch_size": 4, "micro_batch_size": 1, "validation_sequences": 4},
    "transformer_config": {"num_blocks": 1, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
    "checkpoint_config": {"interval": 2},
    "multihost_config": {"num_workers": 3},
    "scheduler_config": {"warmup_steps": 1},
}
KEYS = {f"{section}.{key}": value for section, keys in SMALL.items() for key, value in keys.items()}
SAVED = "        saved=None if isinstance(exchange, CompressedExchange) else (model, optimizer),\n"
UPDATED = "            loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)\n"


@pytest.fixture
def drifting(here):
    """`drifting(save)`: a recipe whose workers drift apart in step 3 and then run a line; their parameters have own names at the end."""

    def make(save):
        folder = here / "recipes/drifting"
        shutil.copytree(RECIPES / "data_parallel", folder, ignore=shutil.ignore_patterns("__pycache__"))
        trainer = folder / "trainer.py"
        text = trainer.read_text(encoding="utf-8")
        assert (1, 1) == (text.count(SAVED), text.count(UPDATED))
        drift = '            model.weights_N[0] += ctx.position("worker") * (step == 3)\n'
        text = text.replace(SAVED, "").replace(UPDATED, f"{drift}{UPDATED}            {save}\n")
        named = 'ctx.report_parameters((f"{name}~{ctx.rank}", one) for name, one in model.named_parameters())'
        trainer.write_text(text.replace("ctx.report_parameters(model.named_parameters())", named), encoding="utf-8")
        return ttlaunch.simulate("drifting", set=KEYS, keep="kept")

    return make


def test_a_trainer_that_saves_different_weights_under_the_names_of_all_fails_instead_of_resuming_with_those_of_one_rank(
    drifting, here
):
    found = drifting("ctx.checkpoint(step, model, optimizer, owners=workers)")

    said = "rank 0 (worker, localhost), rank 1 (worker, localhost) and rank 2 (worker, localhost) had different bits in"
    assert ["R009"] == [diagnostic.code for diagnostic in found.diagnostics]
    assert found.diagnostics[0].message.startswith(said)
    assert found.diagnostics[0].message.endswith("in step 4")
    assert "give the tensors of each a name of its own, in checkpoints" in found.diagnostics[0].hints[0]
    assert ["step-2"] == [path.name for path in Path("kept/checkpoints").iterdir() if path.suffix != ".tmp"]


def test_a_trainer_that_saves_the_weights_of_one_rank_alone_may_let_the_others_differ(drifting):
    found = drifting("ctx.checkpoint(step, model, optimizer, owners=workers[:1]) if is_first else None")

    assert ("done", ()) == (found.status, found.diagnostics)
