"""Drawing tokens: which ones top_k and top_p leave, how often each comes, and text that is passed on piece by piece."""

import pytest
import torch

from ttlaunch.runtime.serving.ask import Sampling
from ttlaunch.runtime.serving.guesses import Guesser
from ttlaunch.runtime.serving.sampling import draw, logprob_of
from ttlaunch.runtime.serving.text import ByteTokenizer, CharTokenizer, TextPieces

LOGITS = torch.tensor([0.5, 0.1, 0.1, 0.3]).log()


def drawn(**settings):
    return [draw(LOGITS, Sampling(seed=1, **settings), position=position) for position in range(2000)]


def test_tokens_come_as_often_as_their_probability_says():
    found = drawn()
    assert [0.5, 0.1, 0.1, 0.3] == pytest.approx([found.count(token) / 2000 for token in range(4)], abs=0.04)


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.6}, {0, 3}),
        ({"top_p": 0.85}, {0, 1, 3}),
        ({"top_k": 2, "top_p": 0.99}, {0, 3}),
        ({"temperature": 0}, {0}),
        ({"temperature": 0.01}, {0}),
    ],
)
def test_only_the_likeliest_tokens_are_left_and_of_equal_ones_the_lower(settings, left):
    assert left == set(drawn(**settings))


def test_noise_depends_on_seed_choice_and_position_and_on_nothing_else():
    assert drawn() == drawn()
    assert drawn() != drawn(choice=1)
    assert drawn()[1:] != drawn()[:-1]


def test_probabilities_are_those_of_the_models_own_logits():
    found = logprob_of(LOGITS, 3, likeliest=3)
    assert [0, 3, 1] == [token for token, _ in found.likeliest]
    assert torch.tensor(0.3).log().item() == pytest.approx(found.logprob)


def pieces(text, *, stops=()):
    stream = TextPieces(stops)
    return [stream.add(bytes([byte])) for byte in text.encode()] + [stream.finish()]


def test_characters_of_several_bytes_are_held_back_until_they_are_whole():
    assert ["a", "", "", "€", "b", ""] == pieces("a€b")


@pytest.mark.parametrize(
    ("stops", "expected"),
    [(("xyz",), "ab xy "), (("END",), "ab xy xxy"), ((), "ab xy xxyEND"), (("xxyENDE",), "ab xy xxyEND")],
)
def test_a_stop_text_and_what_follows_are_not_passed_on(stops, expected):
    text = "ab xy xyz" if stops == ("xyz",) else "ab xy xxyEND"
    assert expected == "".join(pieces(text, stops=stops))


def test_what_could_begin_a_stop_text_is_passed_on_only_when_it_does_not():
    assert ["a", "", "", "", "xxxb", ""] == pieces("axxxb", stops=("xxxy",))


def test_texts_that_a_tokenizer_has_no_token_for_are_refused_with_their_place():
    with pytest.raises(ValueError, match="'€' at character 2"):
        CharTokenizer("cab").encode("ab€")
    with pytest.raises(ValueError, match="character 1 is half of a surrogate pair"):
        ByteTokenizer().encode("a\ud800")


def test_the_characters_of_a_text_have_the_tokens_of_training():
    tokenizer = CharTokenizer("abc, cab")
    assert [" ", ",", "a", "b", "c"] == [tokenizer.piece(token).decode() for token in range(tokenizer.vocabulary)]
    assert [2, 3, 4] == tokenizer.encode("abc")


def test_a_guess_is_what_followed_the_last_time():
    assert [4, 1, 2] == Guesser([1, 2, 3, 4, 1, 2, 3]).guess(3)
    assert [5] == Guesser([1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3]).guess(1)
    assert [] == Guesser([1, 2, 3, 4]).guess(3)
