"""Which tokens a step sees: disjoint, complete, and independent of the number of workers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.data.order import SampleOrder, permutation
from ttlaunch.runtime.data.text import TextData, tokenize
from ttlaunch.spec.recipe.corpus import Corpus, CorpusError, CorpusReason, count_sequences, read_corpus

TEXT = "".join(chr(97 + number % 26) for number in range(2000)) + "é"


def text_corpus(text=TEXT):
    return Corpus("a text", text.encode(), "")


@given(st.integers(0, 2**40), st.integers(0, 50), st.integers(1, 300))
@settings(deadline=None)
def test_an_epoch_sees_every_sample_once(seed, epoch, count):
    """C13."""
    assert list(range(count)) == sorted(permutation(seed, epoch, count=count).tolist())


def test_the_order_of_an_epoch_is_frozen():
    assert [6, 5, 3, 4, 9, 8, 0, 1, 7, 2] == permutation(0, 0, count=10).tolist()
    assert permutation(0, 0, count=50).tolist() != permutation(0, 1, count=50).tolist()


def test_the_steps_of_an_epoch_see_every_sequence_once(make_cfg):
    """C13; B: two sequences that the last step of an epoch lacks come from the next epoch."""
    cfg = make_cfg(training={"batch_size": 4, "micro_batch_size": 3}, transformer={"max_sequence_length": 8})
    data = TextData(text_corpus("".join(f"{number:08}" for number in range(250))), cfg)
    seen = []
    for step in range(1, data.training_sequences // 4 + 1):
        for index in range(2):
            _, x_BT, y_BT = data.training_batch(step, index)
            assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
            seen += [int(bytes(row).decode()) for row in x_BT.tolist()]
    whole = data.training_sequences // 4 * 4
    assert whole == len(seen) == len(set(seen)) > 0.85 * 250
    assert max(seen) < data.training_sequences  # what follows is for validations
    assert [3, 1] == [len(data.training_batch(1, index)[1]) for index in range(2)]


def test_every_epoch_has_an_order_of_its_own(make_cfg):
    """C13: ten samples in steps of four; what a step lacks at the end of one epoch comes from the next."""
    cfg = make_cfg(training={"batch_size": 4, "micro_batch_size": 3, "num_epochs": 6, "seed": 5})
    order = SampleOrder(cfg.training_config, count=10)
    seen = [
        sample
        for step in range(1, order.total_steps + 1)
        for index in range(2)
        for sample in order.samples(step, index)
    ]
    epochs = [seen[at : at + 10] for at in range(0, 60, 10)]
    assert [permutation(5, epoch, count=10).tolist() for epoch in range(6)] == epochs
    assert 6 == len({tuple(epoch) for epoch in epochs})
    assert [{"epoch": 0, "sample": 4}, {"epoch": 1, "sample": 2}] == [order.position(step) for step in (1, 3)]


def test_a_validation_sees_the_last_part_of_the_text_and_training_never_does(make_cfg):
    """The text has 250 numbers; validation gets the last tenth, whose last number has no token that follows it."""
    text = "".join(f"{number:08}" for number in range(250))
    cfg = make_cfg(
        training={"batch_size": 4, "micro_batch_size": 4, "validation_sequences": 1000},
        transformer={"max_sequence_length": 8},
    )
    data = TextData(text_corpus(text), cfg)
    batches = [data.validation_batch(index) for index in range(data.validation_micro_batches)]
    seen = [
        (bytes(row).decode(), bytes(next_).decode())
        for _, x_BT, y_BT in batches
        for row, next_ in zip(x_BT.tolist(), y_BT.tolist(), strict=True)
    ]
    assert [(text[at : at + 8], text[at + 1 : at + 9]) for at in range(225 * 8, 249 * 8, 8)] == seen
    trained = [data.training_batch(step, 0)[1] for step in range(1, 2 * 225 // 4)]
    assert not {row for row, _ in seen} & {bytes(row).decode() for x_BT in trained for row in x_BT.tolist()}


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_workers_share_the_micro_batches_of_a_step(make_cfg, make_context, workers):
    """A5: the batch of a step does not depend on the number of workers."""
    cfg = make_cfg()
    ctx = make_context(cfg)
    seen = []
    for rank in range(workers):
        ctx.rank = rank
        seen += list(micro_batches(cfg, ctx, 3, among=range(workers)))
    ctx.rank = 0
    alone = list(micro_batches(cfg, ctx, 3))
    assert [0, 1, 2, 3] == [index for index, _, _ in seen]
    assert all(torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in zip(alone, seen, strict=True))


def test_training_ends_when_the_epochs_are_used_up(make_cfg):
    cfg = make_cfg(training={"num_epochs": 2, "steps": 1000}, transformer={"max_sequence_length": 8})
    data = TextData(text_corpus(), cfg)
    assert data.total_steps == 2 * data.training_sequences // 8
    assert TextData(text_corpus(), make_cfg(training={"num_epochs": 1, "steps": 3})).total_steps == 3


def test_characters_are_numbered_by_code_point():
    tokens, vocabulary = tokenize(text_corpus("baé b"), "char")
    assert vocabulary == 4
    assert [2, 1, 3, 0, 2] == tokens.tolist()
    tokens, vocabulary = tokenize(text_corpus("aé"), "byte")
    assert vocabulary == 256
    assert [97, 195, 169] == tokens.tolist()
    assert tokens.dtype == np.int64


def test_a_short_text_is_refused_with_the_arithmetic(make_cfg):
    with pytest.raises(CorpusError, match=r"has 50 tokens; validation_fraction 0.1 leaves 5 for validation") as caught:
        count_sequences(text_corpus("x" * 50), make_cfg())
    assert caught.value.reason is CorpusReason.TOO_SHORT
    with pytest.raises(CorpusError, match=r"num_epochs 1 × 11 = 11, and one step needs 16"):
        count_sequences(text_corpus("x" * 200), make_cfg(training={"batch_size": 16, "num_epochs": 1}))


def check_reason(path, reason, text):
    with pytest.raises(CorpusError) as caught:
        read_corpus(path)
    assert caught.value.reason is reason
    assert text in str(caught.value)
    return caught.value


def test_a_text_that_cannot_be_read_says_why(tmp_path):
    check_reason(tmp_path / "nothing", CorpusReason.MISSING, "does not exist")
    check_reason(tmp_path, CorpusReason.EMPTY, "has no text")
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\0")
    assert check_reason(tmp_path, CorpusReason.BINARY, "line 2 has a zero byte").line == 2
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\xff")
    assert check_reason(tmp_path / "a.txt", CorpusReason.BINARY, "line 3 has the byte 0xff").line == 3


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("second ")
    (tmp_path / "a.txt").write_text("first ")
    (tmp_path / "c.txt").write_text("third")
    (tmp_path / ".hidden").write_bytes(b"\0")
    assert read_corpus(tmp_path).text == b"first second third"


def test_the_default_text_is_large_enough_and_the_same_twice():
    first, second = read_corpus(None), read_corpus(None)
    assert first.sha256 == second.sha256
    assert 2**20 < len(first.text) <= 2**21
