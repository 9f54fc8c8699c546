"""Targets that do not count: weights by tokens, in every layout the same bits, and never a division by zero."""

import math

import pytest
import torch
from torch.nn import functional

from ttlaunch import contract
from ttlaunch.runtime.comm.reduction import GradientTree
from ttlaunch.runtime.data.text import TextData
from ttlaunch.runtime.model.losses import IGNORED
from ttlaunch.spec.recipe.corpus import Corpus, CorpusError, CorpusReason
from ttlaunch.spec.recipe.responses import check_responses, response_ranges
from ttlaunch.train import build_model, count_tokens, differentiate, summed_loss

from .layouts import OTHERS, train

TEMPLATES = {"response_template": "[A]", "instruction_template": "[Q]"}
SMALL = {
    "training_config": {"steps": 6, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 3}
    | {"gradient_accumulation_steps": 2, "validation_sequences": 5, "learning_rate": 5e-3}
    | TEMPLATES,
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
    | {"dropout_prob": 0.1},
}


def conversation(turns):
    """Instructions of very different lengths, so that many sequences of 16 tokens have no response at all."""
    return "".join(f"[Q]{'why ' * (turn % 37)}[A]because {turn}\n" for turn in range(turns))


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "talk.txt"
    path.write_text(conversation(300))
    return path


@pytest.fixture(scope="module")
def alone(talk, tmp_path_factory):
    return train("single", tmp_path_factory.mktemp("alone") / "run", SMALL, data=talk)


def test_an_ignored_target_adds_no_loss_and_no_gradient():
    logits_BTV = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y_BT = torch.tensor([[1, IGNORED, 4], [IGNORED, IGNORED, 0]])
    summed_loss(logits_BTV, y_BT).backward()
    expected = -sum(logits_BTV.detach().log_softmax(-1)[place][y_BT[place]] for place in ((0, 0), (0, 2), (1, 2)))
    torch.testing.assert_close(expected, summed_loss(logits_BTV, y_BT).detach())
    assert torch.equal(y_BT == IGNORED, (logits_BTV.grad == 0).all(-1))
    assert 3 == count_tokens(y_BT)


def test_a_micro_batch_without_a_token_has_no_loss_and_no_gradient(make_cfg, make_context):
    cfg = make_cfg()
    model = build_model(cfg, make_context(cfg))
    x_BT = torch.zeros(2, 16, dtype=torch.int64)
    found = differentiate(model, x_BT, torch.full_like(x_BT, IGNORED), masks=model.masks(1, 0))
    assert (0.0, 0) == found
    assert not model.take_gradients().any()


def test_a_step_without_a_token_has_a_gradient_of_zeros():
    tree, out_N = GradientTree(3), torch.ones(3)
    for index in range(2):
        tree.add(index, torch.zeros(3), tokens=0, loss=0.0)
    assert (0.0, 0) == tree.mean(out_N, micro_batches=2)
    assert [0.0, 0.0, 0.0] == out_N.tolist()


def test_the_mean_is_over_the_tokens_that_count(make_cfg, make_context):
    """A9: ragged micro-batches, against the mean over all tokens in one pass, with masks made by hand."""
    cfg = make_cfg()
    model = build_model(cfg, make_context(cfg))
    generator = torch.Generator().manual_seed(0)
    x_BT = torch.randint(256, (5, 16), generator=generator)
    y_BT = torch.randint(256, (5, 16), generator=generator)
    y_BT[torch.rand(5, 16, generator=generator) < 0.7] = IGNORED
    y_BT[1] = IGNORED
    functional.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten()).backward()
    expected_N = model.take_gradients().clone()
    model.zero_grad()
    tree, mean_N = GradientTree(len(expected_N)), torch.empty_like(expected_N)
    for index, rows in enumerate((slice(0, 1), slice(1, 2), slice(2, 5))):
        loss, tokens = differentiate(model, x_BT[rows], y_BT[rows], masks=model.masks(1, index))
        tree.add(index, model.take_gradients(), tokens=tokens, loss=loss)
        model.zero_grad()
    assert count_tokens(y_BT) == tree.mean(mean_N, micro_batches=3)[1]
    torch.testing.assert_close(expected_N, mean_N, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", OTHERS)
def test_masked_training_has_the_same_bits_in_every_layout(talk, alone, tmp_path, layout):
    """A9, D24: losses, norms and validations per token that counts; some workers have steps without any."""
    found = train(layout, tmp_path / "run", SMALL, data=talk)
    assert alone.sha256 == found.sha256
    for kind, keys in ((contract.KIND_STEP, ("loss", "tokens")), (contract.KIND_VALIDATION, ("loss", "tokens"))):
        for key in keys:
            assert alone.by_step(kind, key) == found.by_step(kind, key)


def test_only_tokens_of_responses_are_counted(talk, alone, make_cfg):
    cfg = make_cfg(training=SMALL["training_config"])
    corpus = Corpus("talk", talk.read_bytes(), "")
    data = TextData(corpus, cfg)
    tokens = {
        step: sum(count_tokens(data.training_batch(step, index)[2]) for index in range(12)) for step in range(1, 7)
    }
    assert tokens == alone.by_step(contract.KIND_STEP, "tokens")
    assert all(0 < count < 12 * 16 for count in tokens.values())
    assert {0} < {count_tokens(data.training_batch(1, index)[2]) for index in range(12)}
    assert all(math.isfinite(loss) for loss in alone.by_step(contract.KIND_STEP, "loss").values())


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_a_response_ends_where_the_next_instruction_begins(make_cfg, tokenizer):
    text = "[Q]é?[A]yes,\n\nyes.[Q]so?[A][Q]no[A]é"
    training = make_cfg(training=TEMPLATES | {"tokenizer_type": tokenizer}).training_config
    corpus = Corpus("a text", text.encode(), "")
    whole = corpus.text if tokenizer == "byte" else text
    found = [whole[span.start : span.stop] for span in response_ranges(corpus, training)]
    assert ["yes,\n\nyes.", "é"] == [part.decode() if tokenizer == "byte" else part for part in found]


def test_a_target_is_masked_in_its_own_place(make_cfg):
    """The token *after* the template is the first that counts, and it is predicted from the template's last."""
    cfg = make_cfg(
        training=TEMPLATES | {"batch_size": 1, "micro_batch_size": 1, "validation_sequences": 1},
        transformer={"max_sequence_length": 8},
    )
    corpus = Corpus("a text", b"[Q]?[A]!" * 40, "")
    _, x_BT, y_BT = TextData(corpus, cfg).training_batch(1, 0)
    assert b"[Q]?[A]!" == bytes(x_BT[0].tolist())
    assert [IGNORED] * 6 + [ord("!"), IGNORED] == y_BT[0].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Q]why[A]" * 50, "the first 405 tokens of a text, which are for training, have no text after '[A]'"),
        ("[Q]?[A]yes" * 40 + "[Q]" * 60, "none of the 3 validation sequences of 16 tokens has text after '[A]'"),
    ],
)
def test_a_text_in_which_nothing_counts_is_refused(make_cfg, text, message):
    with pytest.raises(CorpusError) as caught:
        check_responses(Corpus("a text", text.encode(), ""), make_cfg(training=TEMPLATES))
    assert (message, CorpusReason.NO_RESPONSE) == (str(caught.value), caught.value.reason)
