"""A13, D24: every layout reports the same metrics of every step, so that runs can be compared number by number."""

import math

import pytest

from tests.runtime.layouts import LAYOUTS, train

STEPS = 5
SETTINGS = {
    "training_config": {"steps": STEPS, "batch_size": 3, "micro_batch_size": 1, "gradient_accumulation_steps": 2}
    | {"validation_interval": 2, "validation_sequences": 3, "clip_grad_norm_max_norm": 0.1},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
    | {"dropout_prob": 0.1},
    "scheduler_config": {"type": "linear", "warmup_steps": 2},
    "checkpoint_config": {"interval": None},
}
METRICS = [("step", name) for name in ("loss", "tokens", "grad_norm", "learning_rate")]
METRICS += [("validation", name) for name in ("loss", "tokens", "perplexity")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(layout)`: the same training in each layout, once."""
    found = {}

    def make(layout):
        if layout not in found:
            found[layout] = train(layout, tmp_path_factory.mktemp("metrics") / "run", SETTINGS, data=None)
        return found[layout]

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reports_every_metric_of_every_step_with_the_same_bits(trained, layout):
    for kind, name in METRICS:
        expected, found = trained("single").by_step(kind, name), trained(layout).by_step(kind, name)
        assert expected == found, name
        assert ([0, 2, 4, STEPS] if kind == "validation" else list(range(1, STEPS + 1))) == list(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_metrics_are_what_they_are_called(trained, layout):
    """6 sequences of 16 tokens; the norm before clipping, which is well above the bound; e to the loss."""
    run = trained(layout)
    assert {6 * 16} == set(run.by_step("step", "tokens").values())
    assert min(run.by_step("step", "grad_norm").values()) > 0.1
    assert [0.5, 1.0] == [rate / 3e-3 for rate in list(run.by_step("step", "learning_rate").values())[:2]]
    losses, perplexities = run.by_step("validation", "loss"), run.by_step("validation", "perplexity")
    assert {step: math.exp(loss) for step, loss in losses.items()} == pytest.approx(perplexities)
    assert losses[STEPS] < losses[0] < 1.1 * math.log(256)
