"""The tokenizers with which this project's own models are served."""

import numpy as np
import pytest

from ttlaunch.runtime.data.text import tokenize
from ttlaunch.runtime.serving.text import make_tokenizer
from ttlaunch.spec.recipe.corpus import Corpus

TEXT = "Grüße, 世界 🙂\n"


def test_bytes_are_those_of_training():
    tokenizer = make_tokenizer("byte", vocabulary=256)
    tokens, vocabulary = tokenize(Corpus("text", TEXT.encode(), ""), "byte")
    assert (tokens.tolist(), vocabulary) == (tokenizer.encode(TEXT), tokenizer.vocabulary)
    assert TEXT.encode() == b"".join(map(tokenizer.piece, tokens.tolist()))


def test_characters_are_those_of_training():
    alphabet = sorted({ord(character) for character in TEXT})
    tokenizer = make_tokenizer("char", vocabulary=len(alphabet), alphabet=alphabet)
    tokens, vocabulary = tokenize(Corpus("text", TEXT.encode(), ""), "char")
    assert (tokens.tolist(), vocabulary) == (tokenizer.encode(TEXT), tokenizer.vocabulary)
    assert TEXT.encode() == b"".join(map(tokenizer.piece, np.asarray(tokens).tolist()))


def test_a_character_that_was_not_in_training_is_named():
    tokenizer = make_tokenizer("char", vocabulary=2, alphabet=[97, 98])
    with pytest.raises(ValueError, match="'c' at character 2 does not occur in the text"):
        tokenizer.encode("abc")


def test_half_of_a_surrogate_pair_is_refused_by_its_place():
    with pytest.raises(ValueError, match="at character 1 is half of a surrogate pair"):
        make_tokenizer("byte", vocabulary=256).encode("a\ud800")


def test_ids_are_read_as_numbers_and_others_are_refused():
    tokenizer = make_tokenizer("ids", vocabulary=64)
    assert [3, 63] == tokenizer.encode("3 63")
    assert b"3 63 " == tokenizer.piece(3) + tokenizer.piece(63)
    for wrong in ("64", "-1", "a", "9" * 5000):
        with pytest.raises(ValueError, match="is no token"):
            tokenizer.encode(wrong)


def test_a_tokenizer_of_another_size_than_the_model_is_refused():
    with pytest.raises(ValueError, match="the model has 300 tokens, its tokenizer 256"):
        make_tokenizer("byte", vocabulary=300)


def test_each_tokenizer_has_a_hash_of_its_own():
    made = [make_tokenizer("byte", vocabulary=256), make_tokenizer("ids", vocabulary=256)]
    made += [make_tokenizer("char", vocabulary=2, alphabet=[97, at]) for at in (98, 99)]
    assert 4 == len({one.sha256 for one in made})
