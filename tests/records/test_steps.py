"""Steps that are read together are those that the parser reads one by one, whatever a rank has written between them (X1, X7)."""

import json
import random

import pytest

from ttlaunch import contract
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import StepDone, read_progress
from ttlaunch.records.steps import Steps, read_together

NUMBERS = (
    "0",
    "-0",
    "1.5",
    "-2e-05",
    "1E+3",
    "1e999",
    "123456789012345678",
    "1234567890123456789012",
    '"nan"',
    "01",
    "1.",
    "+1",
    "0x1",
    "١",
    "null",
    "true",
)
TIMES = ("1", "1e9", "1764232764.25", "-1.0", "99999999999.5", "1000000000000.5", '"now"')
STEPS = ("0", "7", "-1", "1.0", "999999999999999", "9007199254740993", "007")
NAMES = (
    ("loss", "tokens"),
    ("loss",),
    (),
    ("tokens", "own_tokens", "grad_norm"),
    ('a"b', "é"),
    ("step_time_s", "loss"),
)
LINES = (
    b"",
    b"{",
    b"[]",
    b'{"kind": "note", "time": 1.0, "text": "two lines"}',
    b'{"kind": "step", "time": 1.0, "step": 1, "loss": 1.0, "loss": 2.0}',
    b'{"kind": "step", "time": 1.0, "step": 1, "loss": 1.0} ',
    b'{"kind": "step", "time": 1.0, "step": 1, "loss": 1.0, "tokens": 1}}',
    b'{"kind":"step","time":1.0,"step":1,"loss":1.0}',
    b'{"kind": "step", "step": 1, "time": 1.0, "loss": 1.0, "tokens": 1}',
)


def drawn_line(drawn):
    """A line as a rank writes it, in most cases; else one with a strange number, and at times another one."""
    if drawn.random() < 0.1:
        return drawn.choice(LINES)
    is_usual = drawn.random() < 0.9
    time, step = (
        (repr(1e9 + drawn.random()), str(drawn.randrange(10**6)))
        if is_usual
        else (drawn.choice(TIMES), drawn.choice(STEPS))
    )
    fields = "".join(
        f", {json.dumps(name)}: {drawn.choice((repr(drawn.random()), str(drawn.randrange(99)))) if is_usual else drawn.choice(NUMBERS)}"
        for name in drawn.choice(NAMES[: drawn.choice((1, len(NAMES)))])
    )
    return f'{{"kind": "step", "time": {time}, "step": {step}{fields}}}'.encode()


def one_by_one(found):
    return [record for one in found for record in (one.records() if isinstance(one, Steps) else [one])]


@pytest.mark.parametrize("seed", range(30))
def test_lines_that_are_read_together_give_the_records_that_the_parser_gives(seed):
    drawn = random.Random(seed)  # noqa: S311 - a test repeats itself
    lines = [drawn_line(drawn) for _ in range(300)]
    found, expected = one_by_one(read_together(lines)), [read_progress(line) for line in lines]
    assert [repr(one) for one in expected] == [repr(one) for one in found]  # 1 and 1.0 differ
    assert {StepDone, BadRecord} <= set(map(type, expected))


def test_steps_with_the_same_numbers_come_together_and_as_a_whole_before_anything_after_them_is_read():
    lines = [
        contract.record_line({"kind": "step", "time": 1.0, "step": step, "loss": 0.5}).encode()[:-1]
        for step in range(5000)
    ]
    read = []
    found = read_together(read.append(number) or line for number, line in enumerate([*lines, b"{"]))
    sizes = [len(one.steps) for one in found if isinstance(one, Steps)]
    assert 4999 == sum(sizes)
    assert len(sizes) < 10
    assert 5001 == len(read)


def test_a_rank_that_invents_kinds_of_lines_without_end_is_read_line_by_line_after_some():
    lines = [f'{{"kind": "step", "time": 1.0, "step": 1, "n{number // 2}": 1}}'.encode() for number in range(400)]
    found = list(read_together(lines))
    assert 32 == sum(isinstance(one, Steps) for one in found)
    assert [read_progress(line) for line in lines] == one_by_one(found)
