"""How far two checkpoints are apart, from files written by hand."""

import json
import math
import struct

import pytest

from ttlaunch.running.checkpoints.tensor_difference import largest_difference, read_weights


def write_shard(folder, rank, tensors, dtype="F32"):
    header, body = {}, b""
    for name, values in tensors.items():
        data = struct.pack(f"<{len(values)}{'f' if dtype == 'F32' else 'd'}", *values)
        header[name] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    return folder


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_the_largest_difference_is_found_whoever_wrote_which_tensor(tmp_path, dtype):
    one = write_shard(tmp_path / "one", 0, {"a": [1.0, 2.0], "b": [3.0], "optimizer.mean.a": [7.0, 7.0]}, dtype)
    other = write_shard(tmp_path / "other", 1, {"a": [1.0, 2.25]}, dtype)
    write_shard(other, 3, {"b": [2.5]}, dtype)
    weights = read_weights(one), read_weights(other)
    assert ["a", "b"] == list(weights[0]) == list(weights[1])
    assert 0.5 == largest_difference(*weights)
    assert 0.0 == largest_difference(weights[0], weights[0])


@pytest.mark.parametrize(
    "values",
    [{"a": [1.0, 2.0, 3.0]}, {"a": [1.0, 2.0], "c": [0.0]}, {"a": [1.0, math.nan]}, {"a": [1.0, math.inf]}],
    ids=["shape", "names", "no number", "infinite"],
)
def test_weights_that_cannot_be_compared_are_infinitely_far_apart(tmp_path, values):
    one = read_weights(write_shard(tmp_path / "one", 0, {"a": [1.0, 2.0]}))
    other = read_weights(write_shard(tmp_path / "other", 0, values))
    assert math.inf == largest_difference(one, other)
    assert 0.0 == largest_difference(other, other)
