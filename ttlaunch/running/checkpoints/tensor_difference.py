"""Measure the difference of two sets of weights without torch; it is slow, so use it for small models only."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ttlaunch.contract import AVERAGE_PREFIX, OPTIMIZER_PREFIX
from ttlaunch.running.checkpoints.tensor_file import FiledTensor, StoredTensor, join_parts, read_bytes, read_header

_FORMATS: dict[str, Literal["f", "d"]] = {"F32": "f", "F64": "d"}


def read_weights(checkpoint: Path, *, averaged: bool = False) -> Mapping[str, FiledTensor]:
    """Return the weights of a checkpoint by name, or with `averaged` their running average, empty if it has none."""
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        tensors |= read_header(path)
    if averaged:
        start = len(AVERAGE_PREFIX)
        return join_parts({name[start:]: one for name, one in tensors.items() if name.startswith(AVERAGE_PREFIX)})
    return join_parts({name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIMIZER_PREFIX)})


def largest_difference(one: Mapping[str, FiledTensor], other: Mapping[str, FiledTensor]) -> float:
    """Return the largest absolute difference of values at the same place; infinite if names, shapes or types differ."""
    if one.keys() != other.keys():
        return math.inf
    return max((_difference(tensor, other[name]) for name, tensor in one.items()), default=0.0)


def _difference(one: FiledTensor, other: FiledTensor) -> float:
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.dtype not in _FORMATS:
        return math.inf
    pairs = zip(_values(one), _values(other), strict=True)
    largest = 0.0
    for left, right in pairs:
        difference = abs(left - right)
        if math.isnan(difference):  # a value is NaN, or both are infinite
            difference = 0.0 if left == right or (math.isnan(left) and math.isnan(right)) else math.inf
        largest = max(largest, difference)
    return largest


def _values(tensor: FiledTensor) -> "memoryview[float]":
    """Read the values of a tensor; files are little-endian, like all supported machines."""
    return memoryview(b"".join(read_bytes(tensor))).cast(_FORMATS[tensor.dtype])
