"""Measure the difference of two sets of weights without torch; it is slow, so use it for small models only."""

import math
from collections.abc import Mapping
from pathlib import Path

from ttlaunch.contract import AVERAGE_PREFIX, OPTIMIZER_PREFIX
from ttlaunch.running.checkpoints.tensor_file import FiledTensor, StoredTensor, join_parts, read_header
from ttlaunch.running.checkpoints.tensor_values import find_difference

_COMPARED = frozenset({"F32", "F64"})


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
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.dtype not in _COMPARED:
        return math.inf
    found = find_difference(one, other)
    return found.largest if found else 0.0
