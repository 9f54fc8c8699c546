"""Data that cannot be trained on: the reason, the place and the arithmetic; and names of data that are drawn."""

import gzip
import hashlib
import json
import sys
from pathlib import Path

import pytest

from ttlaunch.recipe import TrainingFile
from ttlaunch.spec.recipe.corpus import Corpus, CorpusError, CorpusReason, count_sequences, read_corpus, spread_evenly
from ttlaunch.spec.recipe.data import check_data, default_path, given_path, read_data
from ttlaunch.spec.recipe.images import DIGITS, count_images, read_digits
from ttlaunch.spec.recipe.responses import check_responses, response_ranges


def refusal(read, *given):
    """What the error says: reason, message, path and line, hint, package."""
    with pytest.raises(CorpusError) as caught:
        read(*given)
    error = caught.value
    return error.reason, str(error), (error.path, error.line), error.hint, error.package


def training_file(**training):
    sizes = {"num_blocks": 1, "num_heads": 1, "embedding_dim": 4, "max_sequence_length": 4}
    return TrainingFile.model_validate({"training_config": training, "transformer_config": sizes})


def corpus(text):
    return Corpus("these", text.encode(), "")


def test_a_file_that_is_no_text_is_refused_at_its_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\ntwo\0\nthree\n\n\0")
    message = f"{file} is not text: line 2 has a zero byte"
    assert (CorpusReason.BINARY, message, (file, 2), None, None) == refusal(read_corpus, file)
    file.write_bytes(b"\0")
    assert (CorpusReason.BINARY, f"{file} is not text: line 1 has a zero byte", (file, 1), None, None) == (
        refusal(read_corpus, file)
    )
    file.write_bytes(b"one\n\ntwo\xff\nthree\n")
    message = f"{file} is not UTF-8: line 3 has the byte 0xff"
    assert (CorpusReason.BINARY, message, (file, 3), None, None) == refusal(read_corpus, file)


def test_a_text_that_is_not_there_is_refused_with_its_path(tmp_path):
    missing, empty = tmp_path / "none", tmp_path / "empty.txt"
    empty.touch()
    assert (CorpusReason.MISSING, f"{missing} does not exist", (missing, None), None, None) == (
        refusal(read_corpus, missing)
    )
    assert (CorpusReason.EMPTY, f"{empty} has no text", (empty, None), None, None) == refusal(read_corpus, empty)
    device = Path("/dev/null")
    assert (
        CorpusReason.UNREADABLE,
        "/dev/null is neither a file nor a folder",
        (device, None),
        None,
        None,
    ) == refusal(read_corpus, device)


def test_a_text_has_its_name_and_its_digest(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    assert Corpus(str(tmp_path), b"one", hashlib.sha256(b"one").hexdigest()) == read_corpus(tmp_path)
    assert "the standard library's sources" == read_corpus(None).name


def test_a_text_that_fills_no_sequence_is_refused_with_the_arithmetic():
    message = "these has 41 tokens; validation_fraction 0.1 leaves 4 for validation, and one sequence needs 4 + 1 = 5"
    assert (CorpusReason.TOO_SHORT, message, (None, None), None, None) == (
        refusal(count_sequences, corpus("x" * 41), training_file())
    )
    message = "these has 8 tokens; validation_fraction 0.75 leaves 2 for training, and one sequence needs 4 + 1 = 5"
    assert message == refusal(count_sequences, corpus("x" * 8), training_file(validation_fraction=0.75))[1]
    assert (11, 1) == count_sequences(corpus("x" * 50), training_file())
    assert (8, 0) == (count_sequences(corpus("x" * 42), training_file(validation_fraction=0.2))[0], 0)


def test_a_validation_evaluates_sequences_from_the_whole_text():
    assert ([0, 3, 6], [0, 1, 2], []) == (spread_evenly(3, 10), spread_evenly(3, 3), spread_evenly(0, 5))


def test_passes_that_fill_no_step_are_refused_for_texts_images_and_drawn_data():
    few = {"num_epochs": 2, "batch_size": 4, "micro_batch_size": 1}
    rows = "\n".join(["1,2,3,4,0"] * 2)
    images = training_file(model_type="conv", validation_fraction=0.5, **few)
    message = "these has 1 training images; num_epochs 2 × 1 = 2, and one step needs 4"
    assert (CorpusReason.TOO_SHORT, message, (None, None), None, None) == refusal(count_images, corpus(rows), images)
    assert (2, 2) == count_images(corpus(f"{rows}\n{rows}"), images)
    message = "these has 1 training sequences; num_epochs 2 × 1 = 2, and one step needs 4"
    assert message == refusal(count_sequences, corpus("x" * 12), training_file(validation_fraction=0.45, **few))[1]


def test_an_image_of_another_size_is_refused_with_the_size_to_set():
    cfg = training_file(model_type="conv")
    found = refusal(check_data, corpus("1,2,3,4,5,6,7,8,9,0"), cfg)
    message = "an image of these has 3 × 3 = 9 pixels, and `max_sequence_length` is 4"
    assert (CorpusReason.IMAGE_SIZE, message, (None, None)) == found[:3]
    assert "`--set transformer_config.max_sequence_length=9`" == found[3]
    found = refusal(check_data, corpus("1,2,3,4,0\n1;2"), cfg)
    message = "these: line 2 is not a row of whole numbers and commas"
    hint = "a row is the pixels of a square image, row by row, and the number of its class: `0,12,255,7,3`"
    assert (CorpusReason.NO_IMAGE, message, (None, None), hint, None) == found


def test_digits_without_their_package_are_refused_with_the_extra_that_brings_them(monkeypatch, tmp_path):
    message, hint = (
        "scikit-learn, which has the handwritten digits, is not installed",
        "`pip install 'ttlaunch[digits]'`",
    )
    expected = (CorpusReason.NO_PACKAGE, message, (None, None), hint, "digits")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert expected == refusal(read_digits)
    monkeypatch.delitem(sys.modules, "sklearn")
    (tmp_path / "sklearn").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert expected == refusal(read_digits)  # a folder of that name is a package without an origin
    (tmp_path / "sklearn" / "__init__.py").touch()
    file = tmp_path / "sklearn" / "datasets" / "data" / "digits.csv.gz"
    found = refusal(read_data, Path(DIGITS))
    assert (CorpusReason.UNREADABLE, (file, None)) == (found[0], found[2])
    assert found[1].startswith(f"cannot read {file}: ")
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(b"1,2,3,4,0"))
    assert Corpus("scikit-learn's digits", b"1,2,3,4,0", hashlib.sha256(b"1,2,3,4,0").hexdigest()) == read_digits()


def test_drawn_data_have_a_name_that_says_all_about_them():
    """The name is compared when a run goes on, so it must not change with a version."""
    cfg = TrainingFile.model_validate({"data_config": {"source": "markov", "vocabulary": 9}})
    name = 'synthetic:{"branching":4,"order":1,"seed":0,"sequences":10000,"source":"markov","vocabulary":9}'
    assert (name, None) == (str(default_path(cfg)), given_path(cfg))
    expected = Corpus("the data of `data_config`", name.encode(), hashlib.sha256(name.encode()).hexdigest())
    assert expected == read_data(default_path(cfg))
    assert json.loads(name.partition(":")[2]) == cfg.data_config.model_dump()


def test_without_a_path_texts_have_a_default_and_images_the_digits():
    assert (None, Path(DIGITS)) == (default_path(training_file()), default_path(training_file(model_type="conv")))
    assert "a.txt" == given_path(training_file(data_path="a.txt"))


TEMPLATES = {"response_template": "[A]", "instruction_template": "[Q]"}


@pytest.mark.parametrize(
    ("answer", "counts"), [("x" * 29, True), ("x" * 28, False)], ids=["its first token", "the one before"]
)
def test_a_sequence_counts_if_its_first_target_ends_a_response(answer, counts):
    """40 tokens, of which the last 10 are for validation: the targets of its only sequence begin with token 31."""
    text = f"[A]{answer}[Q]".ljust(40, "?")
    cfg = training_file(validation_fraction=0.25, validation_sequences=1, **TEMPLATES)
    (found,) = response_ranges(corpus(text), cfg.training_config)
    assert 31 + counts == found.stop
    if counts:
        check_responses(corpus(text), cfg)
    else:
        message = "none of the 1 validation sequences of 4 tokens has text after '[A]'"
        assert (CorpusReason.NO_RESPONSE, message) == refusal(check_responses, corpus(text), cfg)[:2]


def test_the_first_line_of_a_file_of_tokens_says_how_many_there_are():
    mark = "ttlaunch token ids, of a vocabulary of"
    assert (9, [1, 8]) == (corpus(f"{mark} 9\n1\n8\n").vocabulary_of_ids, list(corpus(f"{mark} 9\n1\n8\n").ids))
    for first in ("", "9", f"{mark}", f"{mark} x", f"{mark} ²", f"a {mark} 9"):
        assert corpus(f"{first}\n1\n").vocabulary_of_ids is None
    found = refusal(lambda: corpus("1 2").ids)
    hint = "`ttlaunch data book.txt tokens.txt --tokenizer tokenizer.json` makes one for `data_path`"
    message = f"no token ids in these: its first line is not `{mark} NUMBER`"
    assert (CorpusReason.NO_TOKENS, message, (None, None), hint, None) == found
