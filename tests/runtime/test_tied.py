"""Tied embeddings: one matrix with two uses, the same bits wherever the two are."""

import pytest
import torch

from ttlaunch.runtime.model.tied import EMBEDDING, HEAD
from ttlaunch.train import build_model, build_optimizer, global_norm, summed_loss

from .layouts import LAYOUTS
from .layouts import train as train_layout
from .pipelines import SMALL, check_equal, start_from

TIED = {"transformer_config": {"tie_embeddings": True}}


@pytest.mark.parametrize("kind", ["gpt", "mlp"])
@pytest.mark.parametrize(
    ("ranks", "pipeline"),
    [
        (1, {"blocks_per_rank": [8]}),
        (2, {"blocks_per_rank": [3, 5]}),
        (3, {"blocks_per_rank": [2, 4, 2], "schedule": "interleaved", "chunks_per_rank": 2}),
        (4, {"blocks_per_rank": [6, 2], "replicas": 2, "schedule": "gpipe"}),
        (2, {"blocks_per_rank": [8], "replicas": 2, "schedule": "interleaved", "chunks_per_rank": 2}),
    ],
)
def test_pipelines_equal_one_process(train, alone, kind, ranks, pipeline):
    """Digests of first and last stage must agree, or `sha256` fails; the norm counts the matrix once."""
    sections = TIED | {"training_config": {"model_type": kind}}
    check_equal(alone(**sections), train(pipeline, ranks=ranks, **sections))
    assert alone(**sections).sha256 != alone(training_config={"model_type": kind}).sha256


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_blocks_move_around_a_shared_matrix(train, precision):
    """With fp16 the first steps overflow, so the loss scale moves along, too."""
    sizes = {"tie_embeddings": True, "num_blocks": 4}
    sections = {"transformer_config": sizes, "training_config": {"steps": 13, "batch_size": 3, "precision": precision}}
    sections["loss_scale_config"] = {"initial_power": 24}
    pipeline = {"blocks_per_rank": [2, 2], "schedule": "auto", "chunks_per_rank": 2}
    alone, found = train(**sections), train(pipeline, ranks=2, **sections)
    assert alone.sha256 == found.sha256
    assert (precision == "fp16") == (found.result("skipped steps") is not None)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in {"single", "pipeline"}])
def test_tiers_and_data_parallelism_equal_one_process(tmp_path, fox, alone, layout, clips):
    """Without clipping, buckets are updated before the last gradient has arrived."""
    changes = {"transformer_config": {"tie_embeddings": True, "num_blocks": 2}}
    changes["training_config"] = {"use_clip_grad_norm": clips}
    config = {name: values | changes.get(name, {}) for name, values in SMALL.items()}
    check_equal(alone(**changes), train_layout(layout, tmp_path / "found", config, data=fox))


@pytest.fixture
def tied(make_cfg, make_context):
    cfg = make_cfg(transformer={"tie_embeddings": True})
    ctx = make_context(cfg)
    return cfg, ctx, build_model(cfg, ctx)


def test_the_gradient_is_that_of_both_uses(make_cfg, make_context, tied):
    """Against the two gradients of a model whose matrices are two, and equal."""
    cfg, ctx, model = tied
    other = build_model(make_cfg(), make_context(cfg))
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(values[EMBEDDING if name == HEAD else name])
    _, x_BT, y_BT = ctx.data(cfg).training_batch(1, 0)
    for each in (model, other):
        summed_loss(each(x_BT), y_BT).backward()
    model.add_head_gradient()
    model.add_head_gradient()  # a second time changes nothing
    expected = {name: parameter.grad for name, parameter in other.named_parameters()}
    expected[EMBEDDING] = expected[EMBEDDING] + expected.pop(HEAD)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_matrix_is_counted_once(tied):
    cfg, _, model = tied
    names = [name for name, _ in model.named_parameters()]
    assert (1, 0) == (names.count(EMBEDDING), names.count(HEAD))
    optimizer = build_optimizer(cfg, model, total_steps=10)
    assert len(names) == len(optimizer.squared_norms())
    assert not [name for name, _ in optimizer.named_state() if HEAD in name]


def test_the_matrix_stays_one_while_it_learns(tied):
    cfg, ctx, model = tied
    optimizer = build_optimizer(cfg, model, total_steps=60)
    _, x_BT, y_BT = ctx.data(cfg).training_batch(1, 0)
    for step in range(1, 61):
        loss = summed_loss(model(x_BT), y_BT) / y_BT.numel()
        loss.backward()
        optimizer.step(step, norm=global_norm(optimizer.squared_norms()))
        if step == 1:
            assert 5.4 < loss.item() < 5.8  # guessing among 256 tokens: ln 256 = 5.545
    assert loss.item() < 2.5
    assert 0 == model.head.output.weight.abs().max().item()


def test_stages_begin_with_the_same_matrix(make_cfg, make_context, tied):
    cfg, ctx, model = tied
    first, last = (build_model(cfg, ctx, stage=stage, blocks_per_stage=[1, 1]) for stage in range(2))
    matrices = [dict(part.named_parameters())[EMBEDDING] for part in (model, first, last)]
    assert torch.equal(matrices[0], matrices[1])
    assert torch.equal(matrices[0], matrices[2])
    assert ([], [], [EMBEDDING]) == tuple(list(part.copies) for part in (model, first, last))


def test_a_checkpoint_names_the_matrix_once_and_any_layout_goes_on_from_it(train):
    """Written by a pipeline of two replicas, where four ranks hold it; read by one process and by another pipeline."""
    steps = {"steps": 4, "validation_interval": 4}
    whole = train(**TIED | {"training_config": steps})
    checkpoint = {"checkpoint_config": {"interval": 2}}
    pipeline = {"blocks_per_rank": [3, 5], "replicas": 2}
    sections = TIED | checkpoint | {"training_config": steps}
    first = train(pipeline, ranks=4, saves=True, **sections)
    assert whole.sha256 == first.sha256
    start, names = start_from(first, step=2)
    assert len(names) == len(set(names))
    assert 1 == names.count(EMBEDDING)
    assert HEAD not in names
    for other, ranks in ((None, 1), ({"blocks_per_rank": [2, 4, 2]}, 3), ({"blocks_per_rank": [8], "replicas": 2}, 2)):
        assert whole.sha256 == train(other, ranks=ranks, start=start, **TIED | {"training_config": steps}).sha256
