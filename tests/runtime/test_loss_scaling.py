"""fp16: how the scale moves, that an overflow is skipped by everybody, and that every layout trains the same bits."""

import json
import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from ttlaunch import contract
from ttlaunch.recipe import TrainingFile
from ttlaunch.runtime.data.text import TextData
from ttlaunch.runtime.model import losses
from ttlaunch.runtime.model.flat import digests
from ttlaunch.runtime.model.loss_scaling import LossScaler
from ttlaunch.train import build_model, build_optimizer, differentiate, global_norm

from .layouts import LAYOUTS, OTHERS, train

STEP, MICRO_BATCH = 4, 2
SMALL = {
    "training_config": {"steps": 8, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 4}
    | {"validation_sequences": 5, "learning_rate": 5e-3, "precision": "fp16"},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
    | {"dropout_prob": 0.1},
    "checkpoint_config": {"interval": 5},
}


def config(**scale):
    return SMALL | {"loss_scale_config": {"initial_power": 10, "growth_interval": 3} | scale}


@pytest.fixture
def overflow(monkeypatch, corpus):
    """The gradient of one micro-batch of one step is too large for float16; its loss is as ever."""
    data = TextData(corpus, TrainingFile.model_validate(config()))
    chosen = data.training_batch(STEP, MICRO_BATCH)[2].flatten()

    def cross_entropy(logits, targets, **settings):
        loss = functional.cross_entropy(logits, targets, **settings)
        if not torch.equal(targets, chosen):
            return loss
        large = loss * 1e30
        return loss + (large - large.detach())

    monkeypatch.setattr(losses, "functional", SimpleNamespace(cross_entropy=cross_entropy))


def scales(run):
    """The state of the loss scale in the checkpoints of a run, by step, after checking that all owners agree."""
    found = {}
    for path in (run.run_dir / contract.CHECKPOINTS_DIR).glob("step-*.tmp/*.json"):
        record = json.loads(path.read_text())
        assert record["state"]["loss_scaler"] == found.setdefault(record["step"], record["state"]["loss_scaler"])
    return found


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(0, 6))
def test_the_scale_halves_and_doubles_within_its_bounds(overflows, interval, highest):
    bounds = {"initial_power": min(2, highest), "min_power": -1, "max_power": highest, "growth_interval": interval}
    cfg = TrainingFile.model_validate({"training_config": {"precision": "fp16"}, "loss_scale_config": bounds})
    scaler, power, good = LossScaler(cfg), min(2, highest), 0
    for overflowed in overflows:
        scaler.update(overflowed=overflowed)
        good = 0 if overflowed else good + 1
        power = max(-1, power - 1) if overflowed else power
        if good == interval:
            power, good = min(highest, power + 1), 0
        assert 2.0**power == scaler.scale
    assert sum(overflows) == scaler.skipped


def test_a_checkpoint_sets_the_scale_of_fp16_alone():
    saved = {"scale": 64.0, "good_steps": 2, "skipped": 5}
    scaled, plain = (
        LossScaler(TrainingFile.model_validate({"training_config": {"precision": precision}}))
        for precision in ("fp16", "fp32")
    )
    for scaler in (scaled, plain):
        scaler.restore(saved)
    assert ([64.0, 2.0, 5.0], saved) == (scaled.values(), scaled.state())
    assert ([1.0, 0.0, 0.0], None) == (plain.values(), plain.state())
    scaled.restore(None)  # as of a checkpoint of a training that scaled nothing
    assert [64.0, 2.0, 5.0] == scaled.values()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_is_scaled_where_exponents_suffice(precision):
    scaler = LossScaler(TrainingFile.model_validate({"training_config": {"precision": precision}}))
    scaler.update(overflowed=True)
    assert (1.0, False, None, None) == (scaler.scale, scaler.is_on, scaler.state(), scaler.seed(torch.ones(())))


@pytest.mark.parametrize("power", [0, 7, 12])
def test_the_scale_changes_no_gradient_that_float16_can_hold(make_cfg, make_context, power):
    """A power of two is divided out exactly, so norm and update are those of any other scale."""
    cfg = make_cfg(training={"precision": "fp16"}, loss_scale_config={"initial_power": power})
    ctx = make_context(cfg)
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=1)
    generator = torch.Generator().manual_seed(0)
    model.grads_N.copy_(2.0**power * torch.randn(len(model.grads_N), generator=generator))
    norm = global_norm(optimizer.squared_norms())
    optimizer.step(1, norm=norm)
    plain = make_cfg()
    reference = build_model(plain, ctx)
    other = build_optimizer(plain, reference, total_steps=1)
    reference.grads_N.copy_(torch.randn(len(model.grads_N), generator=generator.manual_seed(0)))
    assert norm == global_norm(other.squared_norms())
    other.step(1, norm=norm)
    assert digests(reference.named_parameters()) == digests(model.named_parameters())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_an_overflow_changes_neither_weights_nor_state(make_cfg, make_context, rule, bad):
    cfg = make_cfg(training={"precision": "fp16", "optimizer": rule})
    ctx = make_context(cfg)
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=3)
    model.grads_N.fill_(1.0)
    optimizer.step(1, norm=global_norm(optimizer.squared_norms()))
    before = digests(model.named_parameters()), digests(optimizer.named_state())
    model.grads_N.fill_(1.0)
    next(model.parameters()).grad.view(-1)[0] = bad
    optimizer.step(2, norm=global_norm(optimizer.squared_norms()))
    assert before == (digests(model.named_parameters()), digests(optimizer.named_state()))
    assert not model.grads_N.any()
    assert (2.0**7, [("skipped steps", 1)]) == (model.loss_scaler.scale, ctx.said)


def test_scaling_keeps_gradients_that_float16_alone_would_lose(make_cfg, make_context):
    """At scale 1 most of what flows back is below the least float16; at 2^16 the gradient is that of float32."""
    x_BT = torch.arange(32).view(2, 16)
    gradients = {}
    for name, training, power in (
        ("fp32", {}, 0),
        ("lost", {"precision": "fp16"}, -20),
        ("kept", {"precision": "fp16"}, 10),
    ):
        cfg = make_cfg(training=training, loss_scale_config={"initial_power": power, "min_power": -24})
        ctx = make_context(cfg)
        model = build_model(cfg, ctx)
        differentiate(model, x_BT, x_BT, masks=model.masks(1, 0))
        gradients[name] = model.grads_N / 2.0**power if training else model.grads_N
    expected = gradients["fp32"]
    errors = {name: ((found - expected).norm() / expected.norm()).item() for name, found in gradients.items()}
    assert errors["kept"] < 0.01
    assert errors["lost"] > 0.1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train("single", tmp_path_factory.mktemp("alone") / "run", config(), data=None, saves=True)


@pytest.mark.parametrize("layout", OTHERS)
def test_fp16_has_the_same_bits_in_every_layout(undisturbed, tmp_path, layout):
    """E12: with a real overflow in step 7, after the scale has doubled twice."""
    found = train(layout, tmp_path / "run", config(), data=None, saves=True)
    assert undisturbed.sha256 == found.sha256
    assert undisturbed.by_step(contract.KIND_STEP, "grad_norm") == found.by_step(contract.KIND_STEP, "grad_norm")
    assert {
        5: {"scale": 2.0**11, "good_steps": 2, "skipped": 0},
        8: {"scale": 2.0**11, "good_steps": 1, "skipped": 1},
    } == scales(found)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """`disturbed()`: one process that meets the overflow of the test that asks, trained by the first of them."""
    return cache(lambda: train("single", tmp_path_factory.mktemp("alone") / "run", config(), data=None, saves=True))


@pytest.mark.usefixtures("overflow")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_of_one_micro_batch_is_skipped_by_everybody(undisturbed, disturbed, tmp_path, layout):
    """E12: the same step, the same scale afterwards, the same bits at the end; and other bits than without it."""
    expected = disturbed()
    found = train(layout, tmp_path / "run", config(), data=None, saves=True)
    norms = found.by_step(contract.KIND_STEP, "grad_norm")
    assert [STEP] == [step for step, norm in norms.items() if not math.isfinite(norm)]
    assert list(range(1, 9)) == list(norms)
    assert 1 == found.result("skipped steps")
    assert {
        5: {"scale": 2.0**10, "good_steps": 1, "skipped": 1},
        8: {"scale": 2.0**11, "good_steps": 1, "skipped": 1},
    } == scales(found)
    assert expected.sha256 == found.sha256 != undisturbed.sha256
    assert found.by_step(contract.KIND_VALIDATION, "loss")[8] < found.by_step(contract.KIND_VALIDATION, "loss")[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_smallest_scale_that_is_too_large_is_said_once_at_once_and_in_the_end(tmp_path, layout):
    """At 2^24, 2^23 and then 2^22, the smallest, no gradient of any step fits: nothing is learned, and the run says so."""
    found = train(layout, tmp_path / "run", config(initial_power=24, min_power=22), data=None)
    notes = [record["text"] for record in found.records(contract.KIND_NOTE)]
    said = "step 3: gradients overflow at the smallest loss scale, 2^22; nothing is learned until they fit again"
    assert [said] == notes
    summary = "2^22, the smallest; the last updates, 6 in a row, were skipped all the same"
    assert (8, summary) == (found.result("skipped steps"), found.result("loss scale"))


def test_a_smallest_scale_that_suffices_again_is_said_too():
    bounds = {"initial_power": 1, "min_power": 0}
    cfg = TrainingFile.model_validate({"training_config": {"precision": "fp16"}, "loss_scale_config": bounds})
    scaler, results, notes = LossScaler(cfg), {}, []
    scaler.tell(results.__setitem__, note=notes.append)
    for overflowed in (True, False):
        scaler.update(overflowed=overflowed)
    assert ({"skipped steps": 1}, []) == (results, notes)
    for overflowed in (True, True, False):
        scaler.update(overflowed=overflowed)
    assert {"skipped steps": 3, "loss scale": "2^0, the smallest, was too large 2 times in a row"} == results
    scaler.update(overflowed=True)
    assert 2 == len(notes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_that_is_far_too_large_finds_its_way_down(tmp_path, layout):
    """Real overflows, in steps without an update at all, with no bound in the way."""
    found = train(layout, tmp_path / "run", config(initial_power=15, growth_interval=100), data=None)
    updated = [math.isfinite(norm) for norm in found.by_step(contract.KIND_STEP, "grad_norm").values()]
    assert [False, False, False] == updated[:3]
    assert updated[-1]
    assert updated.count(False) == found.result("skipped steps")


@pytest.mark.usefixtures("overflow")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scale_survives_a_resume(disturbed, tmp_path, layout):
    """From step 5, one step after the overflow, with one good step on the count."""
    alone = disturbed()
    folder = alone.run_dir / f"{contract.checkpoint_dir(5)}.tmp"
    record = json.loads((folder / contract.shard_record(0)).read_text())
    files = [{"path": str(folder / contract.shard_file(0)), "sha256": record["sha256"]}]
    start = {"origin": "here", "step": 5, "state": record["state"], "files": files}
    found = train(layout, tmp_path / "run", config(), data=None, saves=True, start=start)
    assert alone.sha256 == found.sha256
    assert scales(alone)[8] == scales(found)[8]
