"""Which rows of a parameter a rank has under torch's FSDP2, and what its collectives carry, against torch itself."""

import pytest
import torch

from ttlaunch.runtime.parallel.sharded.shards import _split, padded_values


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_rows_are_those_of_torchs_chunks(rows, parts):
    """E3: every row has one owner; a rank without any writes nothing of the parameter."""
    whole = torch.arange(2.0 * rows).view(rows, 2)
    chunks = list(whole.chunk(parts)) + [whole[:0]] * parts
    for place in range(parts):
        split = _split(whole.shape, len(chunks[place]), parts=parts, place=place)
        assert tuple(chunks[place].shape) == split.local_shape
        pieces = list(split.parts("w", chunks[place]))
        assert [f"w@{at}:{at + len(chunks[place])}/{rows},0:2/2" for at in _start(chunks[place])] == [
            str(part) for part, _ in pieces
        ]
        assert all(torch.equal(whole[part.places[0].start : part.places[0].stop], one) for part, one in pieces)


def _start(chunk):
    return [int(chunk[0, 0]) // 2] if len(chunk) else []


def test_a_unit_is_padded_to_as_many_rows_for_each_rank():
    """C18: 7 rows over 3 ranks travel as 9."""
    tensors = [torch.zeros(7, 5), torch.zeros(2), torch.zeros(6, 2, 2)]
    assert 9 * 5 + 3 + 6 * 4 == padded_values(tensors, parts=3)
