"""Ranks that share matrices by columns are refused before anything starts where one of them would have too few."""

from pathlib import Path

import pytest

from ttlaunch.app.serve import ServeOptions, check_shares, find_served, whole_weights
from ttlaunch.diagnostics import LaunchError

SIZES = {"num_heads": 8, "embedding_dim": 128, "mlp_dim": None}


@pytest.mark.parametrize(
    ("sizes", "ranks", "kind", "vocabulary", "message"),
    [
        ({}, 8, "gpt", 256, None),
        ({}, 9, "gpt", 256, "9 ranks cannot share 8 heads of attention"),
        ({}, 9, "mlp", 256, "128 columns over 9 ranks are less than 16 each"),
        ({}, 4, "gpt", 63, "63 columns of the head, one for each token, over 4 ranks are less than 16 each"),
        ({}, 4, "gpt", 64, None),
        ({"mlp_dim": 48}, 4, "llama", 256, "48 columns inside of a feed-forward layer over 4 ranks are less than 16"),
        ({"num_heads": 2}, 4, "llama", 256, None),
    ],
)
def test_too_few_columns_or_heads_are_named_with_the_most_ranks(sizes, ranks, kind, vocabulary, message):
    if message is None:
        check_shares({**SIZES, **sizes}, ranks, kind=kind, vocabulary=vocabulary)
        return
    with pytest.raises(LaunchError) as refused:
        check_shares({**SIZES, **sizes}, ranks, kind=kind, vocabulary=vocabulary)
    assert refused.value.diagnostics[0].message.startswith(message)


@pytest.mark.parametrize(
    "override", ["serve_config.weights_sha256=abc", "serve_config.max_streams=64", "serve_config={}"]
)
def test_what_follows_from_the_checkpoint_or_has_an_option_cannot_be_set(override, tmp_path):
    """A hash that somebody sets would be told to clients and written into receipts; the plan would not know of other sizes."""
    with pytest.raises(LaunchError) as refused:
        find_served("latest", ServeOptions(overrides=(override,)), runs_dir=Path("runs"), working_folder=tmp_path)
    assert "is not for users" in refused.value.diagnostics[0].message


class Saved:
    """A checkpoint whose configuration a test states."""

    def __init__(self, path, *, recipe="data_parallel", **training):
        sections = {"transformer_config": {}, "device_config": {}, "data_config": {}, "multihost_config": {}}
        self.path, self.manifest = path, {"recipe": recipe, "config": {"training_config": training, **sections}}


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"model_type": "conv"}, "the checkpoint's model classifies images (`model_type: conv`)"),
        ({"precision": "fp16"}, "the checkpoint was trained with `precision: fp16`, in which no CPU computes"),
        ({"model_type": "nonesuch"}, "the checkpoint's `training_config` cannot be used"),
    ],
)
def test_models_that_continue_no_text_here_are_refused_by_name(training, message, tmp_path, monkeypatch):
    monkeypatch.setattr("ttlaunch.app.serve.search_checkpoint", lambda *_, **__: (Saved(tmp_path, **training), []))
    with pytest.raises(LaunchError) as refused:
        find_served("latest", ServeOptions(), runs_dir=Path("runs"), working_folder=tmp_path)
    assert refused.value.diagnostics[0].message.startswith(message)


class Matrix:
    shape = (256, 64)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["blocks.0.norm.weight", "head.norm.weight"], "embedding.token.weight"),
        (["embedding.token.weight", "blocks.0.norm.weight", "head.norm.weight"], "blocks.1"),
        (["embedding.token.weight~0", "head.norm.weight"], "embedding.token.weight"),
    ],
)
def test_a_checkpoint_without_a_whole_model_is_refused_with_its_recipe_and_what_it_lacks(
    names, missing, tmp_path, monkeypatch
):
    reads = "ttlaunch.running.checkpoints.tensor_difference.read_weights"
    monkeypatch.setattr(reads, lambda *_, **__: dict.fromkeys(names, Matrix()))
    with pytest.raises(LaunchError) as refused:
        whole_weights(Saved(tmp_path, recipe="tensor_parallel"), blocks=2)
    expected = f"the checkpoint of `tensor_parallel` has no whole model: it lacks `{missing}`"
    assert expected == refused.value.diagnostics[0].message
