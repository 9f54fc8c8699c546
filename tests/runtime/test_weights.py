"""Plain weights out of any layout and into any other, bit for bit; and files of other models, named before a step is made."""

import hashlib
import json

import pytest
from safetensors.torch import load_file, save_file

from tests.runtime.layouts import LAYOUTS, train
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.tensor_difference import read_weights
from ttlaunch.running.checkpoints.tensor_file import write_tensors
from ttlaunch.running.report import combine_digests
from ttlaunch.runtime.checkpoint.reader import CheckpointReadError, read_tensors
from ttlaunch.runtime.model.flat import digests
from ttlaunch.runtime.training.rank_model import build_model

PLAN = {"hash": "h", "recipe": {"name": "r"}, "layout": "l", "world_size": 64, "config": {}, "data": None}
STEPS = 2


def config(**training):
    small = {"steps": STEPS, "batch_size": 6, "micro_batch_size": 1, "validation_sequences": 3, "seed": 3}
    return {
        "training_config": small | training,
        "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
        "checkpoint_config": {"interval": 1000},
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """`exported(layout)`: what a training of that layout came to, and its weights as one plain file."""
    found = {}

    def make(layout):
        if layout not in found:
            folder = tmp_path_factory.mktemp("exported")
            trained = train(layout, folder / "run", config(), data=None, saves=True)
            assert [STEPS] == complete_checkpoints(folder / "run", PLAN, run_id="run")
            weights = read_weights(folder / "run" / contract.checkpoint_dir(STEPS))
            write_tensors(folder / "w.safetensors", weights)
            found[layout] = trained, folder / "w.safetensors"
        return found[layout]

    return make


def begin(path):
    return {"origin": str(path), "step": 0, "files": [{"path": str(path), "sha256": sha256(path)}]}


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_exported_file_has_the_bits_that_training_ended_with(exported, layout):
    trained, path = exported(layout)
    assert trained.sha256 == combine_digests([digests(load_file(path).items())])[0]


@pytest.fixture(scope="module")
def alone(exported, tmp_path_factory):
    """One process that begins with the weights of the pipeline."""
    _, path = exported("pipeline")
    return train("single", tmp_path_factory.mktemp("alone") / "run", config(seed=4), data=None, start=begin(path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_begins_with_the_bits_of_the_file(exported, alone, tmp_path, layout):
    """The loss before the first step is the exporter's last one, and all layouts go on to the same bits."""
    before, path = exported("pipeline")
    after = train(layout, tmp_path / "run", config(seed=4), data=None, start=begin(path))
    assert before.by_step("validation", "loss")[STEPS] == after.by_step("validation", "loss")[0]
    assert alone.sha256 == after.sha256 != before.sha256


@pytest.mark.parametrize("layout", ["single", "pipeline"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weights: weights.pop("blocks.1.feed_forward_in.bias"), "no `blocks.1.feed_forward_in.bias` in {path}"),
        (
            lambda weights: weights.update(
                {"blocks.2.x": weights["head.norm.bias"].clone(), "zz": weights["head.norm.bias"].clone()}
            ),
            "`blocks.2.x` of {path} is no parameter of this model, nor is another tensor of it",
        ),
        (
            lambda weights: weights.update({"head.norm.bias": weights["head.norm.bias"][:8].clone()}),
            "`head.norm.bias` of {path} is float32 (8,), this model's is float32 (16,)",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_file_of_another_model_is_named(exported, make_cfg, make_context, tmp_path, layout, change, expected):
    weights = load_file(exported("single")[1])
    change(weights)
    path = tmp_path / "other.safetensors"
    save_file(weights, path)
    cfg = make_cfg()
    parts = [(0, [2])] if layout == "single" else [(0, [1, 1]), (1, [1, 1])]
    said = []
    for stage, blocks in parts:
        model = build_model(cfg, make_context(cfg), stage=stage, blocks_per_stage=blocks)
        try:
            read_tensors(begin(path)["files"], into=dict(model.named_parameters()), known=model.names_of_whole())
        except CheckpointReadError as error:
            said.append(str(error))
    assert expected.format(path=path) in said


@pytest.mark.parametrize("model_type", ["gpt", "llama", "mlp"])
def test_a_part_knows_the_names_of_the_whole(make_cfg, make_context, model_type):
    cfg = make_cfg(training={"model_type": model_type}, transformer={"num_blocks": 3})
    whole = {name for name, _ in build_model(cfg, make_context(cfg)).named_parameters()}
    for stage in range(3):
        part = build_model(cfg, make_context(cfg), stage=stage, blocks_per_stage=[1, 1, 1])
        assert whole == part.names_of_whole()
        assert {name for name, _ in part.named_parameters()} < whole


def test_nothing_but_the_models_own_names_is_in_the_file(exported, make_cfg, make_context):
    cfg = make_cfg()
    _, path = exported("three tiers")
    header = path.read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert {name for name, _ in build_model(cfg, make_context(cfg)).named_parameters()} == set(names)
