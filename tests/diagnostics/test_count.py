"""Numbers in sentences."""

import pytest

from ttlaunch.diagnostics.count import render_size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (13_249_999, "13.2 MB"),
        (10**10, "10.0 GB"),
        (2 * 10**15, "2000.0 TB"),
    ],
)
def test_a_size_is_shown_in_its_largest_unit(size, text):
    assert text == render_size(size)
