"""Rows of a stored matrix, in any order, have the bytes of these rows, in as few parts of the file as there can be."""

import pytest

from ttlaunch.running.checkpoints.derived_tensors import Rows
from ttlaunch.running.checkpoints.tensor_file import StoredTensor, read_bytes


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(range(1, 3), 1), (range(4), 1), (range(2, 2), 0), ((0, 1, 3), 2), ((3, 2, 1, 0), 4), ((1, 1), 2), ((), 0)],
)
def test_rows_are_read_in_their_order(tmp_path, rows, parts):
    file = tmp_path / "matrix"
    file.write_bytes(b"...." + b"".join(bytes([number] * 3) for number in range(4)))
    matrix = StoredTensor(file, "U8", (4, 3), 4, 16, "matrix")
    some = Rows(matrix, rows)
    assert b"".join(bytes([number] * 3) for number in rows) == b"".join(read_bytes(some))
    assert ((len(rows), 3), 3 * len(rows), parts) == (some.shape, some.size, len(some.extents()))
