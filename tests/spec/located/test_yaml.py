"""Reading YAML: what is said about texts that are not YAML as we read it, and what values mean."""

import pytest

from ttlaunch.diagnostics import Source, render
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.nodes import node_at, plain, span_of
from ttlaunch.spec.located.yaml import parse_yaml


def parse(text):
    return parse_yaml(Source("f.yaml", text), codes=TOPOLOGY)


def check(text, expected):
    _, diagnostics = parse(text)
    assert expected == "".join(line.rstrip() + "\n" for line in render(diagnostics).splitlines())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("0x10", 16),
        ("0o17", 15),
        ("017", 17),
        ("~", None),
        ("null", None),
        ("true", True),
        ("'2'", "2"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("9" * 400, "9" * 400),
        (".5", 0.5),
        ("-1", -1),
        (".", "."),
        ("-", [None]),
    ],
)
def test_plain_values_follow_yaml_1_2(text, value):
    node, diagnostics = parse(text)
    assert diagnostics == []
    assert value == plain(node)


def test_whole_numbers_can_be_keys():
    node, _ = parse("blocks: {0: 2, 1: 3, '2': 4, true: 5, 1.5: 6}")
    assert plain(node) == {"blocks": {0: 2, 1: 3, "2": 4, "true": 5, "1.5": 6}}


def test_a_path_of_words_finds_a_number_as_key():
    node, _ = parse("blocks: {0: 2, 1: 3}")
    assert node_at(node, ("blocks", "1")).value == 3
    assert str(span_of(node, ("blocks", "1"))) == "f.yaml:1:19"


def test_a_place_is_the_key_for_what_holds_more_and_the_value_otherwise():
    node, _ = parse("a:\n  b: [1, 2]\n")
    places = [str(span_of(node, path)) for path in [("a",), ("a", "b"), ("a", "b", 1), ("a", "c"), ("x",)]]
    assert places == ["f.yaml:1:1", "f.yaml:2:3", "f.yaml:2:10", "f.yaml:1:1", "f.yaml:1:1"]


def test_characters_outside_ascii_move_no_column():
    node, _ = parse("ä: 'ü\u2028é'\nb: [ö, x]\n")
    assert str(span_of(node, ("b", 1))) == "f.yaml:2:8"


def test_aliases_are_read():
    node, diagnostics = parse("a: &x {k: 1}\nb: *x\n")
    assert diagnostics == []
    assert plain(node) == {"a": {"k": 1}, "b": {"k": 1}}


TOO_MANY = "f.yaml holds more than 500000 values, counting each use of an alias"


def test_aliases_that_unfold_into_billions_of_values_are_refused():
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    node, diagnostics = parse("\n".join(lines))
    assert node is None
    assert [diagnostic.message for diagnostic in diagnostics] == [TOO_MANY]


@pytest.mark.parametrize("text", ["- []\n" * 6_000, "[[" + "0," * 3_000 + "[" + "0," * 3_000], ids=["flat", "nested"])
def test_reading_stops_where_there_are_too_many_values(text, monkeypatch):
    """The mark is at the value that is one too many, so nothing behind it was read: the second text has no end."""
    monkeypatch.setattr("ttlaunch.spec.located.yaml._MOST_VALUES", 5_000)
    node, diagnostics = parse(text)
    expected = TOO_MANY.replace("500000", "5000")
    assert (None, [expected]) == (node, [diagnostic.message for diagnostic in diagnostics])


def test_aliases_that_nest_too_deep_are_refused():
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 200)]
    node, diagnostics = parse("\n".join(lines))
    assert node is None
    assert [diagnostic.message for diagnostic in diagnostics] == ["f.yaml unfolds into more than 60 levels"]


def test_an_unclosed_list_is_marked_where_it_opens():
    expected = """\
error[T008]: f.yaml is not YAML: `[` is not closed, or a comma is missing after an item
 --> f.yaml:1:4
  |
1 | a: [1, 2
  |    ^ opened here
 --> f.yaml:2:2
  |
2 | b: 3
  |  - the parser stopped here
"""
    check("a: [1, 2\nb: 3\n", expected)


def test_an_unclosed_group_is_marked_where_it_opens():
    expected = """\
error[T008]: f.yaml is not YAML: `{` is not closed, or a comma is missing after an item
 --> f.yaml:1:4
  |
1 | a: {b: 1
  |    ^ opened here
 --> f.yaml:2:2
  |
2 | c: 2
  |  - the parser stopped here
"""
    check("a: {b: 1\nc: 2\n", expected)


def test_an_unclosed_quote_is_marked_where_it_opens():
    expected = """\
error[T008]: f.yaml is not YAML: a quote is never closed
 --> f.yaml:1:4
  |
1 | a: 'x
  |    ^ opened here
"""
    check("a: 'x\nb: 1\n", expected)


def test_a_tab_that_indents_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: a tab indents line 2
 --> f.yaml:2:1
  |
2 |     b: 1
  | ^^^^ a tab; YAML indents with spaces
"""
    check("a:\n\tb: 1\n", expected)


def test_a_colon_in_a_value_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: a key is not allowed here
 --> f.yaml:1:5
  |
1 | a: b: c
  |     ^

hint: indent keys of one group alike; put a value that holds a colon in quotes
"""
    check("a: b: c\n", expected)


def test_a_key_indented_too_deep_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: a key is not allowed here
 --> f.yaml:2:4
  |
2 |   b: 2
  |    ^

hint: indent keys of one group alike; put a value that holds a colon in quotes
"""
    check("a: 1\n  b: 2\n", expected)


def test_a_key_indented_too_little_points_at_its_group():
    expected = """\
error[T008]: f.yaml is not YAML: line 3 does not fit the group that begins in line 1
 --> f.yaml:3:2
  |
3 |  c: 2
  |  ^ not indented like the rest
 --> f.yaml:1:1
  |
1 | a:
  | - the group that begins here

hint: indent the keys, or the items, of one group alike
"""
    check("a:\n  b: 1\n c: 2\n", expected)


def test_a_key_after_a_list_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: line 2 does not fit the group that begins in line 1
 --> f.yaml:2:1
  |
2 | b: 1
  | ^ not indented like the rest
 --> f.yaml:1:1
  |
1 | - a
  | - the group that begins here

hint: indent the keys, or the items, of one group alike
"""
    check("- a\nb: 1\n", expected)


def test_a_key_without_a_colon_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: a key has no colon after it
 --> f.yaml:2:1
  |
2 | b
  | ^ expected `key: value`
"""
    check("a: 1\nb\n", expected)


def test_a_value_that_begins_with_a_sign_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: a value begins with `@`
 --> f.yaml:1:4
  |
1 | a: @x
  |    ^

hint: put the value in quotes
"""
    check("a: @x\n", expected)


def test_an_undefined_alias_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: `*` refers to an anchor that is not defined
 --> f.yaml:1:4
  |
1 | a: *x
  |    ^

hint: put the value in quotes
"""
    check("a: *x\n", expected)


@pytest.mark.parametrize(
    ("text", "line", "arrow", "bracket"),
    [
        ("{", "{", "^", "{"),
        ("a: {\n", "a: {", "   ^", "{"),
        ("a: [\n\n", "a: [", "   ^", "["),
        ("[{", "[{", " ^", "{"),
        ("[{}, # more\n", "[{}, # more", "^", "["),
    ],
)
def test_a_bracket_that_the_file_ends_with_is_named(text, line, arrow, bracket):
    expected = f"""\
error[T008]: f.yaml is not YAML: `{bracket}` is not closed, or a comma is missing after an item
 --> f.yaml:1:{len(arrow)}
  |
1 | {line}
  | {arrow} opened here
"""
    check(text, expected)


def test_a_bracket_that_was_never_opened_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: found `]` where a value was expected
 --> f.yaml:1:4
  |
1 | a: ]
  |    ^
"""
    check("a: ]\n", expected)


def test_a_bracket_in_place_of_a_value_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: found `]` where a value was expected
 --> f.yaml:1:8
  |
1 | a: {b: ]}
  |        ^
"""
    check("a: {b: ]}\n", expected)


def test_an_unknown_escape_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: `\\q` means nothing in double quotes
 --> f.yaml:1:5
  |
1 | a: "\\q"
  |     ^

hint: use single quotes, or write `\\\\`
"""
    check('a: "\\q"\n', expected)


def test_a_second_document_is_marked():
    expected = """\
error[T008]: f.yaml holds two documents; one was expected
 --> f.yaml:2:1
  |
2 | ---
  | ^ the second one begins here
"""
    check("a: 1\n---\nb: 2\n", expected)


def test_a_control_character_is_marked():
    expected = """\
error[T008]: f.yaml is not YAML: it holds the control character \\x01
 --> f.yaml:2:5
  |
2 | b: x\\x01y
  |     ^^^^ remove it
"""
    check("a: 1\nb: x\x01y\n", expected)


def test_a_tag_is_refused():
    expected = """\
error[T008]: f.yaml holds a value with the tag `!!python/object:os.system`
 --> f.yaml:1:4
  |
1 | a: !!python/object:os.system {}
  |    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^

hint: write the plain value, without a tag
"""
    check("a: !!python/object:os.system {}\n", expected)


def test_a_merge_key_is_refused():
    expected = """\
error[T008]: f.yaml holds a merge key `<<`
 --> f.yaml:3:3
  |
3 |   <<: *a
  |   ^^

hint: write the merged keys out
"""
    check("a: &a {x: 1}\nb:\n  <<: *a\n", expected)


def test_a_list_as_key_is_refused():
    expected = """\
error[T008]: f.yaml holds a key that is a list or a group of keys
 --> f.yaml:1:3
  |
1 | ? [1]
  |   ^^^

hint: a key is a word or a number
"""
    check("? [1]\n: 2\n", expected)


def test_an_alias_that_contains_itself_is_refused():
    expected = """\
error[T008]: f.yaml holds an alias that contains itself
 --> f.yaml:1:4
  |
1 | a: &x [*x]
  |    ^^^^^^^
"""
    check("a: &x [*x]\n", expected)


def test_a_key_given_twice_points_at_both_places():
    expected = """\
error[T007]: key `a` is given twice
 --> f.yaml:3:1
  |
3 | a: 3
  | ^ and again here
 --> f.yaml:1:1
  |
1 | a: 1
  | - first given here
"""
    check("a: 1\nb: 2\na: 3\n", expected)


def test_a_number_given_twice_as_key_is_marked():
    expected = """\
error[T007]: key `0` is given twice
 --> f.yaml:1:8
  |
1 | {0: 1, 0x0: 2}
  |        ^^^ and again here
 --> f.yaml:1:2
  |
1 | {0: 1, 0x0: 2}
  |  - first given here
"""
    check("{0: 1, 0x0: 2}\n", expected)


def test_comments_alone_are_nothing():
    expected = """\
error[T002]: f.yaml holds nothing but comments
"""
    check("# a\n\n# b\n", expected)


def test_deep_nesting_is_refused():
    expected = """\
error[T008]: f.yaml is nested more than 60 levels deep
 --> f.yaml:1:61
  |
1 | [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[…
  |                                                             ^
"""
    check("[" * 100_000, expected)
