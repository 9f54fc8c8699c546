"""How diagnostics are drawn, and that nothing a file holds can break the drawing."""

import json

from ttlaunch.diagnostics import Diagnostic, Format, Label, Severity, Source, closest, listed, render, shown

SOURCE = Source("hosts.txt", "a slots=1\n\tb\x1b slots=x\n" + "c" * 300 + " slots=1\n")


def check(diagnostic: Diagnostic, expected: str, **options) -> None:
    assert expected == render([diagnostic], **options)


def test_the_primary_place_comes_first_and_notes_before_hints():
    diagnostic = Diagnostic(
        "T999",
        "something is wrong",
        Label(SOURCE.span(1, 3, 7), "here"),
        (Label(SOURCE.span(1, 1, 1), "and here"),),
        notes=("a fact",),
        hints=("do this", "or that"),
    )
    expected = """\
error[T999]: something is wrong
 --> hosts.txt:1:3
  |
1 | a slots=1
  |   ^^^^^^^ here
 --> hosts.txt:1:1
  |
1 | a slots=1
  | - and here
  = note: a fact

hint: do this

hint: or that"""
    check(diagnostic, expected)


def test_tabs_are_widened_and_control_characters_shown():
    expected = """\
error[T999]: odd
 --> hosts.txt:2:2
  |
2 |     b\\x1b slots=x
  |     ^^^^^"""
    check(Diagnostic("T999", "odd", Label(SOURCE.span(2, 2, 2))), expected)


def test_a_long_line_is_cut_around_the_mark():
    text = render([Diagnostic("T999", "long", Label(SOURCE.span(3, 302, 7)))])
    assert all(len(line) < 200 for line in text.splitlines())
    line, marks = text.splitlines()[-2:]
    assert line[marks.index("^") : marks.rindex("^") + 1] == "slots=1"


def test_concise_is_one_line_each():
    diagnostic = Diagnostic("T999", "odd", Label(SOURCE.span(1, 3)), severity=Severity.WARNING)
    check(diagnostic, "hosts.txt:1:3: warning[T999]: odd", form=Format.CONCISE)


def test_json_has_every_place():
    diagnostic = Diagnostic("T999", "odd", Label(SOURCE.span(1, 3, 7), "here"))
    expected = {"file": "hosts.txt", "line": 1, "column": 3, "length": 7, "label": "here"}
    assert expected == json.loads(render([diagnostic], form=Format.JSON))[0]["primary"]


def test_colour_repeats_what_words_say():
    plain = render([Diagnostic("T999", "odd")])
    coloured = render([Diagnostic("T999", "odd")], colour=True)
    assert "\x1b[" in coloured
    assert plain == coloured.replace("\x1b[1;31m", "").replace("\x1b[0m", "")


def test_a_shown_value_is_one_printable_line_of_bounded_length():
    assert shown("a\nb\x1b") == "a\\nb\\x1b"
    assert len(shown("x" * 10_000_000)) == 60


def test_a_word_that_is_far_from_all_others_has_no_closest():
    assert closest("lots", ["slots", "max_slots"]) == "slots"
    assert None is closest("qqq", ["slots"])
    assert None is closest("slots" * 1_000_000, ["slots"])


def test_a_list_of_words_is_english():
    assert [listed("abc"[:count]) for count in range(4)] == ["", "`a`", "`a` or `b`", "`a`, `b` or `c`"]
