"""A mapping of which each change makes another one."""

import random
from dataclasses import dataclass, replace

from ttlaunch.membership.numbered import Numbered, changed


def test_it_is_what_a_dictionary_is_after_the_same_changes_and_earlier_ones_stay():
    drawn, right, found = random.Random(0), {}, Numbered()  # noqa: S311 - cases to try, no secret
    history = []
    for step in range(2000):
        number = drawn.randrange(600)
        if drawn.random() < 1 / 2:
            right, found = {**right, number: step}, found.put(number, step)
        else:
            right, found = {one: value for one, value in right.items() if one != number}, found.drop(number)
        history.append((right, found))
    for right, found in [*history[::97], history[-1]]:
        assert found == right
        assert (len(right), sorted(right)) == (len(found), sorted(found))
        assert [number for number in range(600) if number not in right] == found.lacks(range(600))
        assert [right[number] for number in range(600) if number in right] == found.among(range(600))
        assert Numbered(right) == found
    assert 600 not in found
    assert found.get(-1) is None
    assert found.drop(-1) is found


@dataclass(frozen=True)
class Value:
    first: int
    second: tuple[int, ...] = ()


def test_a_changed_value_is_what_replace_makes_and_the_former_one_stays():
    before = Value(1, (2,))
    after = changed(before, first=3)
    assert (Value(1, (2,)), replace(before, first=3), hash(Value(3, (2,)))) == (before, after, hash(after))
