"""The vectors that ranks of an elastic run ask each other for.

Nothing here needs the packages of the extra `grpc`: trainers import it in runs over MPI, too.
"""

import ctypes
from typing import NamedTuple

from torch import Tensor


class Key(NamedTuple):
    """What the values of a vector are; two vectors with equal keys have equal bits.

    Attributes:
        name: The vector, such as `parameters`.
        epoch: The epoch in which a sum was made; 0 for what no epoch changes.
        step: The version: how many updates came before.
        start, size: The node of the tree of micro-batches that a sum is of, by its first leaf; 0 and 0 for other vectors.
        first, last: The range of values, without the last.
    """

    name: str
    step: int
    first: int
    last: int
    start: int = 0
    size: int = 0
    epoch: int = 0


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; the view keeps the tensor alive."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # an attribute is the only reference that the view can hold
    return memoryview(memory).cast("B")
