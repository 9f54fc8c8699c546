"""How far apart two sets of weights are, read from their files without torch; for models small enough to wait for."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ttlaunch.contract import OPTIMIZER_PREFIX
from ttlaunch.launch.saved.tensor_file import StoredTensor, read_header

_FORMATS: dict[str, Literal["f", "d"]] = {"F32": "f", "F64": "d"}


def read_weights(checkpoint: Path) -> dict[str, StoredTensor]:
    """The weights of a whole checkpoint, whichever ranks wrote them, by name."""
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(checkpoint.glob("rank-*.safetensors")):
        tensors |= read_header(path)
    return {name: tensor for name, tensor in sorted(tensors.items()) if not name.startswith(OPTIMIZER_PREFIX)}


def largest_difference(one: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]) -> float:
    """The largest absolute difference of two values in the same place; infinite where names, shapes or types differ."""
    if one.keys() != other.keys():
        return math.inf
    return max((_difference(tensor, other[name]) for name, tensor in one.items()), default=0.0)


def _difference(one: StoredTensor, other: StoredTensor) -> float:
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.dtype not in _FORMATS:
        return math.inf
    pairs = zip(_values(one), _values(other), strict=True)
    largest = 0.0
    for left, right in pairs:
        difference = abs(left - right)
        if math.isnan(difference):  # a value that is no number, or infinite on both sides
            difference = 0.0 if left == right or (math.isnan(left) and math.isnan(right)) else math.inf
        largest = max(largest, difference)
    return largest


def _values(tensor: StoredTensor) -> "memoryview[float]":
    """The file's order of bytes is little-endian, as that of every machine that ranks run on."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        return memoryview(file.read(tensor.end - tensor.start)).cast(_FORMATS[tensor.dtype])
