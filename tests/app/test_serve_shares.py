"""Ranks that share matrices by columns are refused before anything starts where one of them would have too few."""

from pathlib import Path

import pytest

from ttlaunch.app.serve import ServeOptions, check_shares, find_served
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
