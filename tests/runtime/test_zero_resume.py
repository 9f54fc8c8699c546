"""Checkpoints of ZeRO have rows: any layout goes on from them, and ZeRO from those of any layout, to the same bits (C16, D23).

Embedding and head share a matrix here, which has one owner and one name.
"""

import pytest

from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.checkpoints.tensor_difference import largest_difference, read_weights

from .layouts import train, train_recipe
from .test_resume_layouts import HALF, PLAN, STEPS, config, start_of


def run(layout, folder, **world):
    """A layout of another recipe by its name, or workers and stage of ZeRO."""
    values = config()
    values["transformer_config"] |= {"tie_embeddings": True}
    if isinstance(layout, str):
        return train(layout, folder, values, data=None, saves=True, **world)
    workers, zero_stage = layout
    values |= {"zero_config": {"stage": zero_stage}}
    return train_recipe("zero", ["worker"] * workers, folder, values, data=None, saves=True, **world)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(layout)`: a whole training, and its checkpoints."""
    found = {}

    def make(layout):
        if layout not in found:
            folder = tmp_path_factory.mktemp("trained") / "run"
            whole = run(layout, folder)
            assert [HALF, STEPS] == sorted(complete_checkpoints(folder, PLAN, run_id="run"))
            found[layout] = whole, [verify(folder / contract.checkpoint_dir(step)) for step in (HALF, STEPS)]
        return found[layout]

    return make


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("single", (3, 3)),
        ((3, 3), "single"),
        ((3, 3), (2, 1)),
        ((2, 1), (4, 3)),
        ((2, 0), (3, 2)),
        ((2, 2), "pipeline"),
        ("two tiers", (2, 2)),
    ],
    ids=str,
)
def test_training_goes_on_in_another_layout(trained, tmp_path, before, after):
    undisturbed, _ = trained("single")
    _, (checkpoint, _) = trained(before)
    resumed = run(after, tmp_path / "run", start=start_of(checkpoint))
    assert undisturbed.sha256 == resumed.sha256
    expected = {step: loss for step, loss in undisturbed.by_step(contract.KIND_STEP, "loss").items() if step > HALF}
    assert expected == resumed.by_step(contract.KIND_STEP, "loss")
    assert expected


def test_rows_make_up_the_weights_of_one_process(trained):
    """What `ttlaunch weights` reads; the counts of updates are written once for each parameter."""
    weights = [read_weights(trained(layout)[1][1].path) for layout in ("single", (3, 3))]
    assert largest_difference(*weights) == 0.0
    stored = [name for file in trained((3, 3))[1][1].manifest["files"].values() for name in file["tensors"]]
    counts = [name for name in stored if name.startswith(f"{contract.OPTIMIZER_PREFIX}step.")]
    assert len(weights[0]) == len(counts) == len(set(counts))
