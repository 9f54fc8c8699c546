"""What serving takes, by formula: which blocks each stage has."""

import pytest

from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.recipe.serving import blocks_of_stages

SMOLLM = {"num_blocks": 30, "num_heads": 9, "num_kv_heads": 3, "embedding_dim": 576, "mlp_dim": 1536}


def model(kind="llama", **sizes):
    return TrainingFile.model_validate(
        {
            "training_config": {"model_type": kind},
            "transformer_config": {**SMOLLM, **sizes} if kind == "llama" else sizes,
        }
    )


def test_a_tied_matrix_lies_on_the_first_stage_only_which_has_fewer_blocks():
    """SmolLM2-135M: 134,515,008 values, 28,311,552 of them in the matrix; each of two stages holds at most 0.52."""
    first, second = blocks_of_stages(model(tie_embeddings=True), vocabulary=49152, count=2)
    assert (range(11), range(11, 30)) == (first, second)
    matrix, block = 49152 * 576, 3_540_096
    whole = matrix + 30 * block
    assert 134_515_008 - whole == 576  # the last norm
    assert 0.52 >= max(matrix + 11 * block, 19 * block) / whole


@pytest.mark.parametrize("kind", ["gpt", "mlp"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_stages_have_all_blocks_in_their_order_and_each_has_one(kind, count):
    for tied in (False, True):
        cfg = model(kind, num_blocks=7, embedding_dim=64, tie_embeddings=tied)
        found = blocks_of_stages(cfg, vocabulary=100_000, count=count)
        assert list(range(7)) == [block for part in found for block in part]
        assert count == len(found)
        assert all(found)
