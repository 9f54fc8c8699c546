"""bf16 and activation checkpointing: what is computed how, and that every layout computes the same bits."""

from itertools import chain

import pytest
import torch

from ttlaunch import contract
from ttlaunch.train import build_model, differentiate

from .layouts import OTHERS, train

SMALL = {
    "training_config": {"steps": 4, "batch_size": 3, "micro_batch_size": 1, "validation_interval": 2}
    | {"gradient_accumulation_steps": 2, "validation_sequences": 3, "learning_rate": 5e-3},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
    | {"dropout_prob": 0.1},
}
CASES = [(False, "gpt"), (True, "gpt"), (True, "llama"), (False, "mlp")]


def config(*, tied=False, **training):
    sizes = SMALL["transformer_config"] | {"tie_embeddings": tied}
    return {"training_config": SMALL["training_config"] | training, "transformer_config": sizes}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, by configuration; trained once."""
    found = {}

    def run(**keys):
        key = tuple(sorted(keys.items()))
        if key not in found:
            found[key] = train("single", tmp_path_factory.mktemp("alone") / "run", config(**keys), data=None)
        return found[key]

    return run


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize(("recomputes", "kind"), CASES)
def test_bf16_has_the_same_bits_in_every_layout(alone, tmp_path, layout, recomputes, kind):
    """E12: fp32 sums of what autocast computes, and an fp32 residual stream between stages."""
    keys = {"precision": "bf16", "activation_checkpointing": recomputes, "model_type": kind, "tied": recomputes}
    expected, found = alone(**keys), train(layout, tmp_path / "run", config(**keys), data=None)
    assert expected.sha256 == found.sha256
    for kind_of_record in (contract.KIND_STEP, contract.KIND_VALIDATION):
        assert expected.by_step(kind_of_record, "loss") == found.by_step(kind_of_record, "loss")


@pytest.mark.parametrize("layout", ["single", *OTHERS])
def test_checkpointing_activations_changes_no_bit(alone, tmp_path, layout):
    """E13: dropout on; the recomputation draws the same masks."""
    keys = {"activation_checkpointing": True}
    assert alone().sha256 == train(layout, tmp_path / "run", config(**keys), data=None).sha256


def test_bf16_is_another_computation_that_learns_as_well(alone):
    whole, half = alone(steps=8), alone(precision="bf16", steps=8)
    first, last = (half.by_step(contract.KIND_VALIDATION, "loss")[step] for step in (0, 8))
    expected_first, expected_last = (whole.by_step(contract.KIND_VALIDATION, "loss")[step] for step in (0, 8))
    assert whole.sha256 != half.sha256
    assert expected_first == pytest.approx(first, rel=1e-2)
    assert expected_last == pytest.approx(last, rel=2e-2)
    assert last < first


def kept_bytes(model, batch):
    """What autograd keeps of a forward pass for the backward pass, the parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(batch, model.masks(1, 0))
    return sum(found.values()), out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt", "mlp"])
def test_a_block_keeps_its_input_only_and_gradients_have_the_same_bits(make_cfg, make_context, precision, kind):
    """E13: per block one activation of B * T * D float32 values, where all that is inside was kept before."""
    models = []
    for recomputes in (False, True):
        training = {"precision": precision, "activation_checkpointing": recomputes, "model_type": kind}
        cfg = make_cfg(training=training, transformer={"num_blocks": 6, "dropout_prob": 0.2})
        models.append(build_model(cfg, make_context(cfg)))
    whole, lean = models
    x_BT = torch.arange(64).view(4, 16)
    (many, _), (few, _) = kept_bytes(whole, x_BT), kept_bytes(lean, x_BT)
    one_activation = 4 * 4 * 16 * 16
    assert many > few + 6 * 4 * one_activation
    for model in models:
        differentiate(model, x_BT, x_BT, masks=model.masks(1, 0))
    assert whole.grads_N.any()
    assert torch.equal(whole.grads_N, lean.grads_N)


def test_weights_gradients_and_the_residual_stream_are_float32(make_cfg, make_context):
    cfg = make_cfg(training={"precision": "bf16"})
    ctx = make_context(cfg)
    model = build_model(cfg, ctx)
    seen = []
    for module in chain([model.embedding], model.blocks.values()):
        module.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    model.head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    x_BT = torch.zeros(1, 16, dtype=torch.int64)
    differentiate(model, x_BT, x_BT, masks=model.masks(1, 0))
    assert [torch.float32, torch.float32, torch.float32, torch.bfloat16] == seen
    assert {torch.float32} == {tensor.dtype for p in model.parameters() for tensor in (p, p.grad)}
