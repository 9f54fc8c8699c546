"""D18: handwritten digits, classified by the same bits in every layout, with accuracy in the validation."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.runtime.layouts import LAYOUTS, train
from ttlaunch import contract
from ttlaunch.runtime.data.images import ImageData
from ttlaunch.runtime.model.losses import ask_for_errors, summed_loss
from ttlaunch.runtime.training.validation import validation_losses
from ttlaunch.spec.recipe.corpus import Corpus, CorpusError
from ttlaunch.spec.recipe.images import DIGITS, read_digits
from ttlaunch.train import build_model

from .conftest import LocalContext

IMAGES = {
    "training_config": {"model_type": "conv", "steps": 4, "batch_size": 10, "micro_batch_size": 2}
    | {"validation_sequences": 13, "validation_interval": 3, "learning_rate": 1e-2},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 8, "dropout_prob": 0.1},
}


def rows(*, count=30, side=2, classes=3):
    """Images whose class is where they are bright."""
    lines = [[9 if at % classes == label else at % 2 for at in range(side**2)] + [label] for label in range(classes)]
    text = "\n".join(",".join(map(str, lines[at % classes])) for at in range(count)).encode()
    return Corpus("these", text, "0" * 64)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train("single", tmp_path_factory.mktemp("alone") / "run", IMAGES, data=Path(DIGITS))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "single"])
def test_every_layout_classifies_digits_with_the_same_bits(tmp_path, alone, layout):
    """D18: parameters, losses and accuracy; 5 micro-batches make ragged blocks."""
    run = train(layout, tmp_path / "run", IMAGES, data=Path(DIGITS))
    assert alone.sha256 == run.sha256
    for key in ("loss", "samples", "accuracy"):
        assert alone.by_step(contract.KIND_VALIDATION, key) == run.by_step(contract.KIND_VALIDATION, key)
    assert [0, 3, 4] == list(run.by_step(contract.KIND_VALIDATION, "accuracy"))
    assert {12} == set(run.by_step(contract.KIND_VALIDATION, "samples").values())
    assert {10} == set(run.by_step(contract.KIND_STEP, "samples").values())
    kinds = (contract.KIND_STEP, contract.KIND_VALIDATION)
    assert [] == [record for kind in kinds for record in run.records(kind) if "tokens" in record]


def test_digits_are_learned(tmp_path):
    """D18: from a guess in ten to nine right answers in ten, of images that were never trained on."""
    training = {"steps": 90, "batch_size": 64, "micro_batch_size": 32, "validation_sequences": 160}
    longer = IMAGES | {"training_config": IMAGES["training_config"] | training | {"validation_interval": 90}}
    longer["transformer_config"] = IMAGES["transformer_config"] | {"embedding_dim": 16, "dropout_prob": 0.0}
    run = train("single", tmp_path / "run", longer, data=Path(DIGITS))
    accuracy = run.by_step(contract.KIND_VALIDATION, "accuracy")
    assert accuracy[0] < 0.3
    assert accuracy[90] > 0.85


def test_accuracy_is_the_share_of_right_answers(make_cfg):
    cfg = make_cfg(
        training={"model_type": "conv", "validation_sequences": 8, "validation_fraction": 0.5},
        transformer={"max_sequence_length": 4},
    )
    corpus = rows()
    ctx = LocalContext(cfg, corpus)
    ctx._data = data = ImageData(corpus, cfg)
    model = build_model(cfg, ctx)
    found = data.validation_values(
        validation_losses(cfg, ctx_with_phases(ctx), model).tolist(), tokens=data.validation_tokens
    )
    right, loss = 0, 0.0
    for index in range(data.validation_micro_batches // 2):
        _, x_BT, y_B1 = data.validation_batch(index)
        logits_BV = model(x_BT)[:, 0]
        right += int((logits_BV.argmax(1) == y_B1[:, 0]).sum())
        loss += functional.cross_entropy(logits_BV, y_B1[:, 0], reduction="sum").item()
    assert {"loss": loss / 8, "samples": 8, "accuracy": pytest.approx(right / 8)} == found | {
        "loss": pytest.approx(loss / 8)
    }


def ctx_with_phases(ctx):
    from contextlib import nullcontext  # noqa: PLC0415

    ctx.announced = lambda phase: nullcontext()
    return ctx


def test_a_target_that_asks_for_errors_trains_nothing():
    """Only where no gradient is asked for; else such a target would be out of range, and torch says so."""
    logits = torch.tensor([[[0.0, 2.0, 1.0]], [[3.0, 2.0, 1.0]]])
    asked = ask_for_errors(torch.tensor([[1], [1]]))
    with torch.no_grad():
        assert 1 == int(summed_loss(logits, asked))
    with pytest.raises(IndexError, match="out of bounds"):
        summed_loss(logits, asked)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3,4,0\n1,2,x,4,1", "these: line 2 is not a row of whole numbers and commas"),
        ("1,2,3,4,0\n1,2,3,4,5,1", "these: line 2 has 5 pixels, which make no square"),
        ("1,2,3,4,5,6,7,8,9,0", "an image of these has 3 × 3 = 9 pixels, and `max_sequence_length` is 4"),
        ("1,2,3,4,1000", "these: line 1 is of class 1000; classes are 0 to 999"),
        (
            "1,2,3,4,1",
            "these: validation_fraction 0.1 leaves 0 of 1 images for validation, and one micro-batch needs 2",
        ),
    ],
)
def test_rows_that_are_no_images_are_named(make_cfg, text, message):
    cfg = make_cfg(training={"model_type": "conv"}, transformer={"max_sequence_length": 4})
    with pytest.raises(CorpusError) as caught:
        ImageData(Corpus("these", text.encode(), "0" * 64), cfg)
    assert message == str(caught.value)


def test_the_digits_are_the_known_ones():
    text = read_digits().text.decode().split()
    assert (1797, 65) == (len(text), len(text[0].split(",")))
    labels = [int(row.rpartition(",")[2]) for row in text]
    assert [178, 182, 177, 183, 181, 182, 181, 179, 174, 180] == [labels.count(label) for label in range(10)]
