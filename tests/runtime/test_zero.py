"""ZeRO over our collectives: the bits of one process at every stage, and what a rank keeps of the model (C7, C8, D1-D3)."""

import pytest

from ttlaunch import contract

from .layouts import train, train_recipe

STAGES = [0, 1, 2, 3]


def config(zero_stage=3, **training):
    small = {"steps": 4, "batch_size": 7, "micro_batch_size": 1, "validation_sequences": 3, "validation_interval": 2}
    sizes = {"num_blocks": 3, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16, "dropout_prob": 0.1}
    return {
        "training_config": small | {"clip_grad_norm_max_norm": 0.1} | training,
        "transformer_config": sizes,
        "zero_config": {"stage": zero_stage},
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, by what it trains with."""
    found = {}

    def run(**training):
        key = str(training)
        if key not in found:
            values = config(**training)
            del values["zero_config"]
            found[key] = train("single", tmp_path_factory.mktemp("single") / "run", values, data=None)
        return found[key]

    return run


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("zero_stage", STAGES)
def test_every_stage_trains_to_the_bits_of_one_process(tmp_path, reference, zero_stage, workers):
    """C7, C8, D1, D2, D3: 7 micro-batches divide by no world size; parameters, losses and norms are equal."""
    expected = reference()
    found = train_recipe("zero", ["worker"] * workers, tmp_path / "run", config(zero_stage), data=None)
    assert expected.sha256 == found.sha256
    for kind, keys in ((contract.KIND_STEP, ("loss", "tokens", "grad_norm")), (contract.KIND_VALIDATION, ("loss",))):
        for key in keys:
            assert expected.by_step(kind, key) == found.by_step(kind, key)
