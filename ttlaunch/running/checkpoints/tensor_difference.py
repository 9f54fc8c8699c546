"""Read the weights of a checkpoint, and find out how two sets of weights differ, without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ttlaunch.contract import AVERAGE_PREFIX, OPTIMIZER_PREFIX
from ttlaunch.running.checkpoints.tensor_file import FiledTensor, StoredTensor, join_parts, read_header
from ttlaunch.running.checkpoints.tensor_values import TensorDifference, find_difference, have_same_bytes, is_readable

_COMPARED = frozenset({"F32", "F64"})


@dataclass(frozen=True)
class OtherTensor:
    """How a tensor differs from another one of its name.

    Attributes:
        dtypes: Both types, if they are not the same.
        shapes: Both shapes, if they are not the same; then no value is compared.
        values: How values differ.
        has_other_bytes: Whether bytes differ whose values cannot be read.
    """

    dtypes: tuple[str, str] | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    values: TensorDifference | None = None
    has_other_bytes: bool = False


def read_weights(checkpoint: Path, *, averaged: bool = False) -> Mapping[str, FiledTensor]:
    """Return the weights of a checkpoint by name, or with `averaged` their running average, empty if it has none."""
    tensors = _stored(checkpoint)
    if averaged:
        start = len(AVERAGE_PREFIX)
        return join_parts({name[start:]: one for name, one in tensors.items() if name.startswith(AVERAGE_PREFIX)})
    return join_parts({name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIMIZER_PREFIX)})


def read_tensors(checkpoint: Path) -> Mapping[str, FiledTensor]:
    """Return all tensors of a checkpoint by name: weights, and the state of the optimizer."""
    return join_parts(_stored(checkpoint))


def _stored(checkpoint: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        tensors |= read_header(path)
    return tensors


def compare(one: FiledTensor, other: FiledTensor) -> OtherTensor | None:
    """Return how two tensors differ; None if type, shape and all bits are the same. Cost: that of `find_difference`.

    Raises:
        OSError: A file cannot be read, or ends too early.
    """
    dtypes = None if one.dtype == other.dtype else (one.dtype, other.dtype)
    if one.shape != other.shape:
        return OtherTensor(dtypes, shapes=(one.shape, other.shape))
    if is_readable(one.dtype) and is_readable(other.dtype):
        values = find_difference(one, other)
        return OtherTensor(dtypes, values=values) if dtypes or values else None
    if dtypes is None and have_same_bytes(one, other):
        return None
    return OtherTensor(dtypes, has_other_bytes=dtypes is None)


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
