"""What `ttlaunch generate` refuses before it looks for a run: values that no head would take."""

import pytest

SURROGATE = "a\udcffb"  # how Python passes on an argument that is no UTF-8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("latest", SURROGATE), "TEXT: expected a text without lone surrogates"),
        (("latest", "a", "--stop", SURROGATE), "`--stop`: expected a text without lone surrogates"),
        (("latest", "a", *(("--stop", "x") * 5)), "`--stop`: expected a list of at most 4 values"),
        (("latest", "a", "--seed", "9" * 20), f"`--seed`: expected a whole number from 0 to {2**63 - 1}"),
        (("latest", "a", "--max-tokens", "200000"), "`--max-tokens`: expected a whole number from 1 to 131072"),
        (("latest", "a", "--top-k", "9" * 12), f"`--top-k`: expected a whole number from 0 to {2**31 - 1}"),
        (("latest", "a" * (2**20 + 1)), "TEXT: expected a text of at most 1048576 characters"),
        (("latest", "a", "--private"), "`--private` is about receipts, and none was asked for"),
        (("latest", "a", "-n", "2", "--receipt", "r.json"), "`--receipt` writes the receipt of one text"),
        (("latest", "a", "--receipt", "."), ". already exists"),
        (("latest", "a", "--receipt", "nowhere/r.json"), "no file can be made in nowhere"),
    ],
)
def test_a_value_that_no_head_takes_is_refused(ttlaunch, words, message):
    answer = ttlaunch(["generate", *words])
    assert (2, "") == (answer.status, answer.stdout)
    assert message in answer.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"ab\xff\xfe", "byte 2 of standard input is 0xff, which is no UTF-8"),
        (b"a" * (2**20 + 1), "standard input has more than 1048576 bytes, the most that a prompt can have"),
    ],
)
def test_a_prompt_on_standard_input_is_read_up_to_a_limit_and_is_text(ttlaunch, given, message):
    answer = ttlaunch("generate latest -", stdin=given)
    assert (2, "") == (answer.status, answer.stdout)
    assert message in answer.stderr
