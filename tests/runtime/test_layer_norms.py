"""The norm of each layer's gradient: reported once by whoever updates the layer, the same in every layout."""

import math

import pytest

from ttlaunch import contract
from ttlaunch.recipe import TrainingFile
from ttlaunch.train import build_model, build_optimizer, global_norm

from .layouts import OTHERS, train

SMALL = {
    "training_config": {"steps": 3, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 2}
    | {"validation_sequences": 5, "log_layer_grad_norms": True},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
}
LAYERS = ["embedding", "blocks.0", "blocks.1", "head"]


def norms_of(run):
    """By step, the norm of each layer; no layer may be reported twice."""
    found = {}
    for record in run.records(contract.KIND_LAYER_NORMS):
        step = found.setdefault(record["step"], {})
        assert not step.keys() & record["norms"].keys()
        step |= record["norms"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """`alone(config)`: the norms of one process; trained once for each configuration."""
    found = {}

    def run(config):
        key = str(config)
        if key not in found:
            found[key] = norms_of(train("single", tmp_path_factory.mktemp("alone") / "run", config, data=None))
        return found[key]

    return run


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_layout_reports_every_layer_once_with_the_same_bits(alone, tmp_path, layout, is_tied):
    """D24."""
    config = SMALL | {"transformer_config": SMALL["transformer_config"] | {"tie_embeddings": is_tied}}
    expected = alone(config)
    found = train(layout, tmp_path / "run", config, data=None)
    assert expected == norms_of(found)
    assert [2, 3] == sorted(expected)
    assert set(LAYERS) == set(expected[3])
    for step, norms in expected.items():
        total = found.by_step(contract.KIND_STEP, "grad_norm")[step]
        assert total == pytest.approx(math.sqrt(math.fsum(norm**2 for norm in norms.values())), rel=1e-12)


def test_they_are_norms_over_the_tree_of_a_layers_parameters(make_cfg, make_context):
    """The global norm is the same tree over all parameters, so the two cannot disagree."""
    cfg = make_cfg()
    model = build_model(cfg, make_context(cfg))
    optimizer = build_optimizer(cfg, model, total_steps=1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad.fill_(number)
    squares = dict(zip((name for name, _ in model.named_parameters()), optimizer.squared_norms(), strict=True))
    expected = {
        layer: global_norm([square for name, square in squares.items() if name.startswith(f"{layer}.")])
        for layer in LAYERS
    }
    assert expected == optimizer.layer_norms()


def test_nothing_is_reported_unless_asked_for(tmp_path):
    config = SMALL | {"training_config": SMALL["training_config"] | {"log_layer_grad_norms": False}}
    assert {} == norms_of(train("single", tmp_path / "run", config, data=None))
    assert not TrainingFile().training_config.log_layer_grad_norms
