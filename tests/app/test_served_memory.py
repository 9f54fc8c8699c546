"""What a serving run takes of memory is compared with what each host has left."""

from dataclasses import replace

import pytest

from ttlaunch.app.served_memory import ServedMemory, too_large_for
from ttlaunch.diagnostics import Blame

MEMORY = ServedMemory(weights=600, cache=200, transposed=100, slots=8, context=64, sent_by_row=0, is_padded=False)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ({"a": 600, "b": 300}, []),
        ({"a": 599, "b": 300}, ["a has 599 bytes of memory left, and its 2 ranks need 600 bytes"]),
        ({"a": 600, "b": 0}, ["b has 0 bytes of memory left, and its 1 rank needs 300 bytes"]),
        ({}, []),
    ],
)
def test_a_host_without_room_for_its_ranks_is_named(left, expected):
    found = list(too_large_for(MEMORY, {"a": 2, "b": 1}, left))
    assert expected == [one.message for one in found]
    assert all(one.blame is Blame.COMMAND_LINE for one in found)


def test_a_plan_says_what_rows_that_are_only_there_for_the_bits_cost():
    assert "        transposed copies of matrices 100 bytes where the CPU has AVX-512" == MEMORY.described()[1]
    sent = replace(MEMORY, sent_by_row=2048)
    assert "sends   2.0 kB for each token" == sent.described()[2]
    padded = "sends   2.0 kB for each token, for 4 a step at least, or 16 where the CPU has AVX-512"
    assert padded == replace(sent, is_padded=True).described()[2]
