"""Receipts: what is written is read again; a stranger's file is refused with a reason, and never believed."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.greeting import HELLO, SHA
from ttlaunch.serving.receipt import (
    LONGEST_RECEIPT,
    BadReceiptError,
    ask_again,
    first_difference,
    hash_tokens,
    make_receipt,
    other_conditions,
    parse_receipt,
    read_receipt,
    receipt_values,
    render_receipt,
)
from ttlaunch.serving.wire import Accepted, Ask

ASK = Ask(stream=7, text="Hi", max_tokens=5, temperature=0.8, top_p=0.9, stop=("\n",))
ACCEPTED = Accepted(stream=7, seed=2**62, prompt_tokens=(72, 105), weights_sha256=SHA)


def made(**options):
    return make_receipt(HELLO, ASK, ACCEPTED, **({"tokens": [1, 2, 3], "reason": "stop"} | options))


def test_a_receipt_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "receipt.json"
    file.write_text(render_receipt(made()))
    assert made() == read_receipt(file)


def test_a_receipt_links_to_the_provenance_of_the_weights_and_says_where_the_ones_here_have_another():
    linked = replace(HELLO, provenance_sha256="ab" * 32)
    receipt = make_receipt(linked, ASK, ACCEPTED, tokens=[1], reason="stop")
    assert "ab" * 32 == parse_receipt(render_receipt(receipt).encode()).provenance_sha256
    assert {} == other_conditions(receipt, linked)
    assert {"provenance_sha256": ("ab" * 32, None)} == other_conditions(receipt, HELLO)
    assert "provenance_sha256" not in receipt_values(made())  # which versions without this key can read
    assert {} == other_conditions(made(), linked)


def test_a_stop_text_that_ends_nothing_is_not_in_a_receipt():
    ask = Ask(stream=7, text="Hi", max_tokens=5, stop=("", "x"))
    receipt = make_receipt(HELLO, ask, ACCEPTED, tokens=[1], reason="length")
    assert ("x",) == parse_receipt(render_receipt(receipt).encode()).stop


def test_the_same_text_is_asked_for_again():
    again = ask_again(parse_receipt(render_receipt(made()).encode()), stream=1)
    expected = Ask(
        stream=1, tokens=(72, 105), max_tokens=5, temperature=0.8, top_p=0.9, stop=("\n",), seed=2**62
    )  # the drawn seed
    assert expected == again


def test_of_a_text_that_was_cut_off_the_tokens_so_far_are_asked_for():
    receipt = made(reason="cancelled")
    assert 3 == ask_again(receipt, stream=1).max_tokens
    assert first_difference(receipt, [1, 2, 3], reason="length") is None
    nothing = made(reason="error", tokens=[])
    assert 1 == ask_again(nothing, stream=1).max_tokens
    assert first_difference(nothing, [9], reason="length") is None


def test_a_private_receipt_has_no_prompt_and_needs_it():
    receipt = parse_receipt(render_receipt(made(private=True)).encode())
    assert "72" not in str(receipt.prompt_tokens)
    with pytest.raises(BadReceiptError, match="only the hash of the prompt"):
        ask_again(receipt, stream=1)
    again = ask_again(receipt, stream=1, prompt="Hi")
    assert ("Hi", None) == (again.text, again.tokens)


@pytest.mark.parametrize(
    ("tokens", "reason", "expected"),
    [
        ([1, 2, 3], "stop", None),
        ([1, 9, 3], "stop", (1, "token 1 is 2 in the receipt and 9 here")),
        ([1, 2], "stop", (2, "the receipt has 3 tokens, and here they are 2")),
        ([1, 2, 3, 4], "stop", (3, "the receipt has 3 tokens, and here they are 4")),
        ([1, 2, 3], "length", (None, "the text ended by `stop` in the receipt and by `length` here")),
    ],
)
def test_the_first_difference_is_named(tokens, reason, expected):
    found = first_difference(made(), tokens, reason=reason)
    assert expected == (found and (found.token, found.message))


def test_what_is_other_here_is_named():
    other = parse_receipt(json.dumps(receipt_values(made()) | {"torch": "2.6.0", "threads": 4}).encode())
    assert {"torch": ("2.6.0", "2.13.0+cpu"), "threads": (4, 1)} == other_conditions(other, HELLO)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"receipt": 2}, "it has format 2, and this version of ttlaunch reads format 1"),
        ({"seed": "1"}, "`seed` is '1', expected a whole number"),
        ({"seed": 2**63}, f"`seed` is {2**63}, expected a number from 0 to {2**63 - 1}"),
        ({"seed": True}, "`seed` is True, expected a whole number"),
        ({"temperature": "nan"}, "`temperature` is nan, expected a number from 0 to 100"),
        ({"top_p": 1.5}, "`top_p` is 1.5, expected a number from 0 to 1"),
        ({"weights_sha256": "../../weights"}, "`weights_sha256` is '../../weights', expected 64 hexadecimal digits"),
        ({"finish_reason": "bored"}, "`finish_reason` is 'bored', expected one of stop, length, cancelled, error"),
        ({"tokens": [1, 2, -3]}, "`tokens.2` is -3, expected a whole number from 0 to 2**53"),
        ({"tokens": [1, 2, 4]}, "`tokens_sha256` is not the hash of its tokens, so one of the two was changed"),
        ({"prompt_tokens": [72]}, "`prompt_count` is 2, and `prompt_tokens` has 1"),
        ({"max_tokens": 2}, "it has 3 tokens where `max_tokens` is 2"),
        ({"context": 3}, "2 tokens and 3 more do not fit into a context of 3"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "`stop` has to be at most 4 texts of 1 to 200 characters"),
        ({"min_p": 0.1}, "`min_p` is no key of format 1"),
        ({"model": ["x"]}, "`model` is a list of 1, expected a text"),
    ],
)
def test_a_value_that_breaks_a_rule_is_named(changed, expected):
    with pytest.raises(BadReceiptError) as refused:
        parse_receipt(json.dumps(receipt_values(made()) | changed).encode())
    assert expected == str(refused.value)


@pytest.mark.parametrize("missing", sorted(receipt_values(made())))
def test_a_missing_key_is_named(missing):
    values = receipt_values(made())
    del values[missing]
    with pytest.raises(BadReceiptError, match=f"`{missing}` is missing, expected a value"):
        parse_receipt(json.dumps(values).encode())


@pytest.mark.parametrize(
    "content", [b"", b"no", b"[]", b"{}", b"[" * 100_000, b'{"receipt": ' + b"9" * 10_000 + b"}", b"\xff{"]
)
def test_what_is_no_receipt_is_refused(content):
    with pytest.raises(BadReceiptError):
        parse_receipt(content)


def test_a_file_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="it is no regular file"):
            read_receipt(path)
    with pytest.raises(FileNotFoundError):
        read_receipt(tmp_path / "none")


def test_a_file_of_terabytes_is_not_read(tmp_path):
    file = tmp_path / "large"
    with file.open("wb") as large:
        large.truncate(2**40)
    with pytest.raises(BadReceiptError, match=f"more than {LONGEST_RECEIPT // 2**20} MiB"):
        read_receipt(file)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_two_texts_with_one_hash_are_equal(left, right):
    assert (left == right) == (hash_tokens(left) == hash_tokens(right))
