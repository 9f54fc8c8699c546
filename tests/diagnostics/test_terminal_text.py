"""The table of characters that no terminal receives, and the two functions that apply it."""

import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.diagnostics import shown
from ttlaunch.diagnostics.terminal_text import clean, clean_output

STEERING = {"Cc", "Cs", "Zl", "Zp"}
BIDI = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
OUTPUT = st.lists(
    st.sampled_from(
        ["a", "é", "\x1b", "[", "]", "0;t", "3", "1m", "2J", "\\", "\x07", "\x9b", "\x9d", "\r", "\t", "\u202e"]
    )
)


def test_no_control_format_or_odd_space_character_passes_inside_a_line():
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if unicodedata.category(character) in {*STEERING, "Cf", "Zs"} and character != " ":
            found = clean(f"a{character}b")
            assert found.isprintable(), hex(number)
            assert found.isascii(), hex(number)
            assert found == shown(f"a{character}b"), hex(number)


def test_no_control_or_bidi_character_of_a_rank_passes_to_a_terminal_but_tab():
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if unicodedata.category(character) in STEERING or unicodedata.bidirectional(character) in BIDI:
            found = clean_output(f"a{character}b".encode("utf-8", "surrogatepass"), colour=True).decode()
            assert character not in found or character == "\t", hex(number)


@pytest.mark.parametrize("text", ["plain", "größer → ∞ ✓", "日本語", "‘quoted’ ×3", "back\\slash", "👍"])
def test_ordinary_text_stays_as_it_is(text):
    assert (text, text.encode()) == (clean(text), clean_output(text.encode(), colour=True))


def test_a_text_that_has_been_cleaned_stays_as_it_is():
    once = clean("a\x1b[2J\nb\u202e")
    assert "a\\x1b[2J\\nb\\u202e" == once == clean(once)


CASES = {
    "colours, which end with the line": (b"\x1b[1;31mred\x1b[0m x", b"\x1b[1;31mred\x1b[0m x\x1b[0m"),
    "the last state of a progress bar": (b"10 %\r20 %\r30 %", b"30 %"),
    "a tab": (b"a\tb", b"a\tb"),
    "the end of a line of another system": (b"a\r", b"a"),
    "the title of the terminal": (b"a\x1b]0;owned\x07b", b"ab"),
    "a title that ends with ST": (b"a\x1b]2;owned\x1b\\b", b"ab"),
    "a title in C1": ("a\x9d0;owned\x9cb".encode(), b"ab"),
    "a link": (b"\x1b]8;;http://x\x1b\\text\x1b]8;;\x1b\\", b"text"),
    "the clipboard": (b"\x1b]52;c;aGk=\x07a", b"a"),
    "erasing and moving": (b"a\x1b[2J\x1b[1;1H\x1b[Ab\x1b[?1049h", b"ab"),
    "device control": (b"a\x1bPq#0\x1b\\b", b"ab"),
    "a title that does not end": (b"a\x1b]0;b", b"a\\x1b]0;b"),
    "a lone escape": (b"a\x1bcb", b"a\\x1bcb"),
    "bytes that are no text": (b"a\xffb\x9b2J", "a�b�2J".encode()),
    "reversed text": ("a\u202eb".encode(), b"a\\u202eb"),
    "bells and backspaces": (b"a\x07\x08b", b"a\\x07\\x08b"),
    "text joined without width": ("\U0001f468\u200d\U0001f469".encode(), "\U0001f468\u200d\U0001f469".encode()),
}


@pytest.mark.parametrize("what", CASES)
def test_output_of_a_rank_becomes(what):
    line, expected = CASES[what]
    assert expected == clean_output(line, colour=True)


def test_colours_are_dropped_where_none_are_wanted():
    assert b"red x" == clean_output(b"\x1b[1;31mred\x1b[0m x", colour=False)


@settings(max_examples=examples(500), deadline=None)
@given(OUTPUT)
def test_whatever_a_rank_prints_only_colours_are_sequences(parts):
    found = clean_output("".join(parts).encode(), colour=True).decode()
    for sequence in found.split("\x1b")[1:]:
        assert "[" == sequence[0]
        assert sequence[1:].lstrip("0123456789;:").startswith("m")
    assert not {"\r", "\x07", "\x9b", "\x9d", "\u202e"} & set(found)
    assert clean_output("".join(parts).encode(), colour=False) == clean_output(found.encode(), colour=False)
