"""Files that others named are opened only if they are regular, and never read further than asked for."""

import os

import pytest

from ttlaunch.records.regular_files import next_data, open_regular, read_regular, read_tail

HOLE = 2**40


@pytest.fixture
def sparse(tmp_path):
    """A file with five bytes, a hole of a terabyte, five bytes, and a hole."""
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(HOLE)
        file.write(b"after")
        file.truncate(2 * HOLE)
    return tmp_path / "sparse"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "device", "missing", "nul"])
def test_what_is_no_regular_file_is_an_error_of_the_system(tmp_path, kind):
    path = tmp_path / "it"
    make = {"fifo": os.mkfifo, "folder": os.mkdir, "link": lambda place: place.symlink_to(__file__)}
    make.get(kind, lambda _: None)(path)
    named = {"device": "/dev/zero", "nul": f"{path}\0"}.get(kind, path)
    with pytest.raises(OSError):  # noqa: PT011 - whichever it is
        open_regular(named)


def test_reading_stops_where_it_was_told_to(sparse):
    assert b"beg" == read_regular(sparse, most=3)
    assert bytes(4) == read_tail(sparse, most=4)
    assert b"" == read_regular(sparse, most=0)


def test_holes_are_jumped_over_and_data_is_not(sparse):
    with open_regular(sparse) as file:
        assert 0 == next_data(file, 0)
        first = next_data(file, 1024 * 1024)
        assert HOLE - 1024 * 1024 <= first <= HOLE
        assert 2 * HOLE == next_data(file, HOLE + 1024 * 1024)
        assert 3 * HOLE == next_data(file, 3 * HOLE), "past the end"
