"""A tree against a model: one diagnostic per mistake, at its place, in words of the file rather than of pydantic."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ttlaunch.diagnostics import Source, render
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.schema import Section, check_schema
from ttlaunch.spec.located.yaml import parse_yaml


class Inner(Section):
    noun: ClassVar[str] = "an inner part"
    name: str
    note: str | None = None


class File(Section):
    noun: ClassVar[str] = "the file"
    count: Annotated[int, Field(ge=1)] = 1
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    flag: bool = False
    kind: Literal["round", "square"] = "round"
    pair: Annotated[list[int], Field(min_length=2, max_length=2)] = Field([1, 2])
    blocks: Annotated[list[int], Field(min_length=1)] | dict[Annotated[int, Field(ge=0)], int] = Field([1])
    words: dict[str, str] = Field({})
    inner: Inner | None = None
    rows: list[Inner] = Field([])


def read(text):
    node, diagnostics = parse_yaml(Source("f.yaml", text), codes=TOPOLOGY)
    assert diagnostics == []
    return check_schema(File, node, codes=TOPOLOGY, aliases={"title": "name"})


def check(text, expected):
    model, diagnostics = read(text)
    assert model is None
    assert expected == "".join(line.rstrip() + "\n" for line in render(diagnostics).splitlines())


def test_a_file_without_mistakes_gives_its_model():
    model, diagnostics = read("count: 2\nratio: 1\nblocks: {0: 2, 1: 2}\nwords: {a: b}\nrows: [{name: x}]\n")
    assert diagnostics == []
    assert File(count=2, ratio=1, blocks={0: 2, 1: 2}, words={"a": "b"}, rows=[Inner(name="x")]) == model


def test_an_unknown_key_lists_those_that_are_possible():
    expected = """\
error[T004]: unknown key `colour` in the file
 --> f.yaml:1:1
  |
1 | colour: red
  | ^^^^^^ expected `count`, `ratio`, `flag`, `kind`, `pair`, `blocks`, `words`, `inner`, … (9 in all)
"""
    check("colour: red\n", expected)


def test_a_misspelled_key_of_many_says_how_many_there_are():
    expected = """\
error[T004]: unknown key `ration` in the file
 --> f.yaml:1:1
  |
1 | ration: 0.5
  | ^^^^^^ not among its 9 keys

hint: did you mean `ratio`?
"""
    check("ration: 0.5\n", expected)


def test_a_misspelled_required_key_is_one_mistake():
    expected = """\
error[T004]: unknown key `nam` in an inner part
 --> f.yaml:1:9
  |
1 | inner: {nam: x}
  |         ^^^ expected `name` or `note`

hint: did you mean `name`?
"""
    check("inner: {nam: x}\n", expected)


def test_a_known_misspelling_is_recognised():
    expected = """\
error[T004]: unknown key `title` in an inner part
 --> f.yaml:1:9
  |
1 | inner: {title: x}
  |         ^^^^^ expected `name` or `note`

hint: did you mean `name`?
"""
    check("inner: {title: x}\n", expected)


def test_a_key_of_another_section_says_where_it_belongs():
    expected = """\
error[T004]: unknown key `name` in the file
 --> f.yaml:1:1
  |
1 | name: x
  | ^^^^ expected `count`, `ratio`, `flag`, `kind`, `pair`, `blocks`, `words`, `inner`, … (9 in all)

hint: `name` belongs in `inner`
"""
    check("name: x\n", expected)


def test_an_unknown_number_as_key_is_marked():
    expected = """\
error[T004]: unknown key `1` in the file
 --> f.yaml:1:1
  |
1 | 1: 2
  | ^ expected `count`, `ratio`, `flag`, `kind`, `pair`, `blocks`, `words`, `inner`, … (9 in all)
"""
    check("1: 2\n", expected)


def test_an_odd_unknown_key_stays_on_one_line():
    expected = """\
error[T004]: unknown key `a\\nb c` in the file
 --> f.yaml:1:1
  |
1 | "a\\nb c": 2
  | ^^^^^^^^ expected `count`, `ratio`, `flag`, `kind`, `pair`, `blocks`, `words`, `inner`, … (9 in all)
"""
    check('"a\\nb c": 2\n', expected)


def test_an_unknown_key_deep_inside_is_marked():
    expected = """\
error[T004]: unknown key `nmae` in an inner part
 --> f.yaml:3:15
  |
3 |   - {name: b, nmae: c}
  |               ^^^^ expected `note`

hint: did you mean `name`?
"""
    check("rows:\n  - {name: a}\n  - {name: b, nmae: c}\n", expected)


def test_a_list_in_place_of_the_file_is_refused():
    expected = """\
error[T005]: the file is a list of 1 item; keys and values were expected
 --> f.yaml:1:1
  |
1 | - a
  | ^^^ expected keys and values
"""
    check("- a\n", expected)


def test_a_word_in_place_of_the_file_is_refused():
    expected = """\
error[T005]: the file is `a`; keys and values were expected
 --> f.yaml:1:1
  |
1 | a
  | ^ expected keys and values
"""
    check("a\n", expected)


def test_text_is_no_number():
    expected = """\
error[T005]: `count` is `x`; a whole number was expected
 --> f.yaml:1:8
  |
1 | count: x
  |        ^ expected a whole number
"""
    check("count: x\n", expected)


def test_a_quoted_number_is_no_number():
    expected = """\
error[T005]: `count` is "2"; a whole number was expected
 --> f.yaml:1:8
  |
1 | count: "2"
  |        ^^^ expected a whole number

hint: remove the quotes
"""
    check('count: "2"\n', expected)


def test_a_fraction_is_no_whole_number():
    expected = """\
error[T005]: `count` is `1.5`; a whole number was expected
 --> f.yaml:1:8
  |
1 | count: 1.5
  |        ^^^ expected a whole number
"""
    check("count: 1.5\n", expected)


def test_yes_is_no_boolean():
    expected = """\
error[T005]: `flag` is `yes`; `true` or `false` was expected
 --> f.yaml:1:7
  |
1 | flag: yes
  |       ^^^ expected `true` or `false`
"""
    check("flag: yes\n", expected)


def test_true_is_no_number():
    expected = """\
error[T005]: `count` is `true`; a whole number was expected
 --> f.yaml:1:8
  |
1 | count: true
  |        ^^^^ expected a whole number
"""
    check("count: true\n", expected)


def test_a_number_is_no_text():
    expected = """\
error[T005]: `name` is `5`; text was expected
 --> f.yaml:1:15
  |
1 | inner: {name: 5}
  |               ^ expected text

hint: put it in quotes: "5"
"""
    check("inner: {name: 5}\n", expected)


def test_a_number_below_its_bound_shows_the_bound():
    expected = """\
error[T005]: `count` is `0`; a number of at least 1 was expected
 --> f.yaml:1:8
  |
1 | count: 0
  |        ^ expected a number of at least 1
"""
    check("count: 0\n", expected)


def test_a_number_above_its_bound_shows_the_bound():
    expected = """\
error[T005]: `ratio` is `1.5`; a number of at most 1 was expected
 --> f.yaml:1:8
  |
1 | ratio: 1.5
  |        ^^^ expected a number of at most 1
"""
    check("ratio: 1.5\n", expected)


def test_a_number_is_shown_as_it_was_written():
    expected = """\
error[T005]: `ratio` is `2e0`; a number of at most 1 was expected
 --> f.yaml:1:8
  |
1 | ratio: 2e0
  |        ^^^ expected a number of at most 1
"""
    check("ratio: 2e0\n", expected)


def test_infinity_is_no_finite_number():
    expected = """\
error[T005]: `ratio` is `.inf`; a finite number was expected
 --> f.yaml:1:8
  |
1 | ratio: .inf
  |        ^^^^ expected a finite number
"""
    check("ratio: .inf\n", expected)


def test_nothing_is_no_number():
    expected = """\
error[T005]: `count` has no value; a whole number was expected
 --> f.yaml:1:7
  |
1 | count:
  |       ^ expected a whole number
"""
    check("count:\n", expected)


def test_a_word_out_of_a_few_is_suggested():
    expected = """\
error[T005]: `kind` is `squre`; `round` or `square` was expected
 --> f.yaml:1:7
  |
1 | kind: squre
  |       ^^^^^ expected `round` or `square`

hint: did you mean `square`?
"""
    check("kind: squre\n", expected)


def test_a_word_far_from_all_is_marked():
    expected = """\
error[T005]: `kind` is `7`; `round` or `square` was expected
 --> f.yaml:1:7
  |
1 | kind: 7
  |       ^ expected `round` or `square`
"""
    check("kind: 7\n", expected)


def test_a_group_is_no_number():
    expected = """\
error[T005]: `count` is a group of keys; a whole number was expected
 --> f.yaml:1:1
  |
1 | count: {a: 1}
  | ^^^^^ expected a whole number
"""
    check("count: {a: 1}\n", expected)


def test_a_list_is_no_number():
    expected = """\
error[T005]: `count` is a list of 1 item; a whole number was expected
 --> f.yaml:1:1
  |
1 | count: [1]
  | ^^^^^ expected a whole number
"""
    check("count: [1]\n", expected)


def test_a_list_too_long_says_how_many():
    expected = """\
error[T005]: `pair` is a list of 3 items; at most 2 items were expected
 --> f.yaml:1:1
  |
1 | pair: [1, 2, 3]
  | ^^^^ expected at most 2 items
"""
    check("pair: [1, 2, 3]\n", expected)


def test_a_list_too_short_says_how_many():
    expected = """\
error[T005]: `pair` is a list of 1 item; at least 2 items were expected
 --> f.yaml:1:1
  |
1 | pair: [1]
  | ^^^^ expected at least 2 items
"""
    check("pair: [1]\n", expected)


def test_an_item_of_a_list_is_counted_from_1():
    expected = """\
error[T005]: item 2 of `pair` is `x`; a whole number was expected
 --> f.yaml:1:11
  |
1 | pair: [1, x]
  |           ^ expected a whole number
"""
    check("pair: [1, x]\n", expected)


def test_a_value_that_fits_no_member_of_a_union_is_one_mistake():
    expected = """\
error[T005]: `blocks` is `3`; a list or keys and values were expected
 --> f.yaml:1:9
  |
1 | blocks: 3
  |         ^ expected a list or keys and values
"""
    check("blocks: 3\n", expected)


def test_a_bad_item_in_the_list_form_of_a_union_is_one_mistake():
    expected = """\
error[T005]: item 2 of `blocks` is `x`; a whole number was expected
 --> f.yaml:1:13
  |
1 | blocks: [1, x]
  |             ^ expected a whole number
"""
    check("blocks: [1, x]\n", expected)


def test_a_bad_value_in_the_map_form_of_a_union_is_one_mistake():
    expected = """\
error[T005]: `1` of `blocks` is `x`; a whole number was expected
 --> f.yaml:1:19
  |
1 | blocks: {0: 1, 1: x}
  |                   ^ expected a whole number
"""
    check("blocks: {0: 1, 1: x}\n", expected)


def test_a_quoted_key_in_the_map_form_of_a_union_is_one_mistake():
    expected = """\
error[T005]: key `0` in `blocks`: a whole number was expected as a key
 --> f.yaml:1:10
  |
1 | blocks: {"0": 1}
  |          ^^^ expected a whole number
"""
    check('blocks: {"0": 1}\n', expected)


def test_a_negative_key_in_the_map_form_of_a_union_is_one_mistake():
    expected = """\
error[T005]: key `-1` in `blocks`: a number of at least 0 was expected as a key
 --> f.yaml:1:10
  |
1 | blocks: {-1: 1}
  |          ^^ expected a number of at least 0
"""
    check("blocks: {-1: 1}\n", expected)


def test_an_empty_list_in_a_union_is_one_mistake():
    expected = """\
error[T005]: `blocks` is an empty list; at least 1 item was expected
 --> f.yaml:1:1
  |
1 | blocks: []
  | ^^^^^^ expected at least 1 item
"""
    check("blocks: []\n", expected)


def test_a_number_as_key_of_text_is_marked():
    expected = """\
error[T005]: key `1` in `words`: text was expected as a key
 --> f.yaml:1:9
  |
1 | words: {1: x}
  |         ^ expected text
"""
    check("words: {1: x}\n", expected)


def test_a_number_as_value_of_text_is_marked():
    expected = """\
error[T005]: `a-b c` is `1`; text was expected
 --> f.yaml:1:16
  |
1 | words: {a-b c: 1}
  |                ^ expected text

hint: put it in quotes: "1"
"""
    check("words: {a-b c: 1}\n", expected)


def test_all_mistakes_come_in_the_order_of_the_file():
    expected = """\
error[T005]: `count` is `x`; a whole number was expected
 --> f.yaml:1:8
  |
1 | count: x
  |        ^ expected a whole number

error[T004]: unknown key `colour` in the file
 --> f.yaml:2:1
  |
2 | colour: red
  | ^^^^^^ expected `flag`, `kind`, `pair`, `blocks`, `words`, `inner` or `rows`

error[T005]: `ratio` is `7`; a number of at most 1 was expected
 --> f.yaml:3:8
  |
3 | ratio: 7
  |        ^ expected a number of at most 1
"""
    check("count: x\ncolour: red\nratio: 7\n", expected)


def test_a_long_value_is_cut():
    expected = """\
error[T005]: `count` is `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…`; a whole number was expected
 --> f.yaml:1:8
  |
1 | count: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…
  |        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ expected a whole number
"""
    check(
        "count: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n",
        expected,
    )


def test_a_value_with_a_line_end_stays_on_one_line():
    expected = """\
error[T005]: `count` is "a\\nb\\x1b[0m"; a whole number was expected
 --> f.yaml:1:8
  |
1 | count: "a\\nb\\e[0m"
  |        ^^^^^^^^^^^ expected a whole number
"""
    check('count: "a\\nb\\e[0m"\n', expected)
