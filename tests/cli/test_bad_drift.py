"""Configurations of recipes whose workers drift apart that cannot train; the transcripts are in `tests/golden/refusals/`."""

import pytest


def test_bounded_staleness_over_fabric_sockets_is_refused(refused):
    text = "multihost_config:\n  socket_type: fabric\nclassic_dp_config:\n  staleness_bound: 4\n"
    refused("run classic_dp -c train.yaml", files={"train.yaml": text}, status=3)


def test_a_loss_scale_for_every_worker_is_refused(refused):
    refused("run diloco -c train.yaml", files={"train.yaml": "training_config:\n  precision: fp16\n"}, status=3)


def test_resume_of_local_steps_with_other_workers_is_refused(refused, trained):
    """Every worker has moments of its own, so here the number of workers belongs to the training."""
    trained("a", 10, recipe="local_sgd")
    refused("run local_sgd --resume latest --set multihost_config.num_workers=3", status=3)


def test_resume_of_compressed_gradients_with_other_workers_is_a_warning(ttlaunch, trained, golden):
    """D8: it goes on, but to other bits, and what the codecs of others owed is dropped."""
    sets = "--set compression_config.kind=int8 --set sync_ps_config.num_servers="
    trained("a", 10, recipe="sync_ps", options=f"{sets}1")
    answer = ttlaunch(f"run sync_ps --resume latest {sets}2 --dry-run")
    assert 0 == answer.status
    golden("warnings/C077.txt", answer.stderr)


def test_resume_on_another_device_is_a_warning(ttlaunch, trained, golden):
    """The weights go on to the bit; what comes after them is rounded otherwise."""
    trained("a", 10, recipe="data_parallel")
    answer = ttlaunch("run data_parallel --resume latest --set device_config.device=auto --dry-run")
    assert 0 == answer.status
    golden("warnings/C078.txt", answer.stderr)


def test_resume_with_other_kernels_is_a_warning(ttlaunch, trained):
    trained("a", 10, recipe="data_parallel")
    answer = ttlaunch("run data_parallel --resume latest --set device_config.deterministic=false --dry-run")
    assert 0 == answer.status
    assert "`device_config.deterministic` was true and is false" in answer.stderr


def test_a_slow_worker_that_there_is_not_is_refused(refused):
    text = "elastic_dp_config:\n  slow_workers: {0: 2, 2: 3}\n"
    refused("run elastic_dp -c train.yaml", files={"train.yaml": text}, status=3)


def test_a_decay_of_an_average_that_is_never_made_is_a_warning(ttlaunch, here, golden):
    (here / "train.yaml").write_text("sync_ps_config:\n  polyak_decay: 0.9\n")
    answer = ttlaunch("plan sync_ps -c train.yaml --verbose")
    assert 0 == answer.status
    golden("warnings/C062.txt", answer.stderr)


@pytest.mark.parametrize("recipe", ["sync_ps", "diloco"])
def test_resume_of_a_recipe_that_keeps_more_than_the_checkpoint_has_is_refused(refused, trained, recipe):
    """Ranks would find out one after the other, by the names of tensors that are not there."""
    trained("a", 10, recipe="zero")
    refused(f"run {recipe} --resume latest", status=3)


def test_resume_from_weights_of_single_workers_is_refused(refused, trained):
    trained("a", 10, recipe="local_sgd", also={"optimizer.weights.b~1of2": [1]})
    refused("run zero --resume latest", status=3)


@pytest.mark.parametrize("value", ["true", "1.0"])
def test_a_zero_stage_is_a_whole_number(ttlaunch, value):
    answer = ttlaunch(f"plan zero --set zero_config.stage={value} --format concise")
    expected = f"--set:1:19: error[C005]: `stage` is `{value}`; a whole number was expected\n"
    assert (3, expected) == (answer.status, answer.stderr)


@pytest.mark.parametrize(
    ("recipe", "keys", "expected"),
    [
        ("sync_ps", "kind: int8, block_size: 1", "2:46: warning[C087]: `int8` makes a gradient no smaller"),
        ("elastic_dp", "kind: top_k, k: 0.5", "2:38: warning[C087]: `top_k` makes a gradient no smaller"),
        ("elastic_dp", "kind: bf16", None),
        (
            "sync_ps",
            "kind: powersgd, rank: 64",
            "2:44: warning[C087]: `powersgd` of rank 64 makes no matrix smaller, so all are sent as they are",
        ),
        (
            "elastic_dp",
            "kind: top_k, error_feedback: false",
            "2:51: warning[C086]: `kind` is `top_k` without `error_feedback`: what a gradient leaves out is never sent",
        ),
    ],
)
def test_compression_of_what_is_pushed_that_does_no_good_is_a_warning(ttlaunch, here, recipe, keys, expected):
    (here / "train.yaml").write_text(f"# pushed\ncompression_config: {{{keys}}}\n")
    answer = ttlaunch(f"plan {recipe} -c train.yaml --format concise")
    assert (0, f"train.yaml:{expected}\n" if expected else "") == (answer.status, answer.stderr)
