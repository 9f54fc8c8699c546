"""E11, and the checkpoints of A13: training goes on from the checkpoint of any layout in any other, to the bits of the run that nobody interrupted.

All pairs, in one process; `tests/mpi/test_resume.py` has the same with real ranks, and kills them.
"""

import json
import shutil

import pytest

from tests.runtime.layouts import LAYOUTS, train
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import Checkpoint, verify

PLAN = {"hash": "h", "recipe": {"name": "r"}, "layout": "l", "world_size": 64, "config": {}, "data": None}
STEPS, HALF = 6, 3


def config(**training):
    small = {
        "steps": STEPS,
        "batch_size": 3,
        "micro_batch_size": 1,
        "validation_sequences": 3,
        "validation_interval": 4,
    }
    return {
        "training_config": small | {"gradient_accumulation_steps": 2} | training,
        "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
        | {"dropout_prob": 0.1},
        "scheduler_config": {"type": "cosine", "warmup_steps": 2},
        "checkpoint_config": {"interval": HALF},
    }


def start_of(checkpoint):
    """What a plan says of it."""
    files = [{"path": str(checkpoint.path / name)} | entry for name, entry in checkpoint.manifest["files"].items()]
    return {
        "origin": str(checkpoint.path),
        "step": checkpoint.step,
        "state": checkpoint.manifest["state"],
        "files": files,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(layout, …)`: a whole training of that layout, and the checkpoint that it made halfway."""
    found = {}

    def make(layout, **training):
        key = json.dumps([layout, training])
        if key not in found:
            folder = tmp_path_factory.mktemp("trained") / "run"
            whole = train(layout, folder, config(**training), data=None, saves=True)
            assert [HALF, STEPS] == sorted(complete_checkpoints(folder, PLAN, run_id="run"))
            checkpoint = verify(folder / contract.checkpoint_dir(HALF))
            assert isinstance(checkpoint, Checkpoint), checkpoint
            shutil.rmtree(folder / contract.checkpoint_dir(STEPS))
            found[key] = whole, checkpoint
        return found[key]

    return make


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_any_layout_goes_on_where_any_other_was_interrupted(trained, tmp_path, before, after):
    undisturbed, _ = trained("single")
    _, checkpoint = trained(before)
    resumed = train(after, tmp_path / "run", config(), data=None, start=start_of(checkpoint))
    assert undisturbed.sha256 == resumed.sha256
    for kind in (contract.KIND_STEP, contract.KIND_VALIDATION):
        expected = {step: loss for step, loss in undisturbed.by_step(kind, "loss").items() if step > HALF}
        found = {step: loss for step, loss in resumed.by_step(kind, "loss").items() if step > HALF}
        assert expected == found
        assert expected
    assert HALF not in {record["step"] for record in resumed.records(contract.KIND_STEP)}  # none is done twice


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_momentum_of_sgd_goes_on_too(trained, tmp_path, layout):
    undisturbed, checkpoint = trained(layout, optimizer="sgd", learning_rate=0.05)
    again = config(optimizer="sgd", learning_rate=0.05)
    assert undisturbed.sha256 == train(layout, tmp_path / "run", again, data=None, start=start_of(checkpoint)).sha256
