"""Contiguous parts of the flat vectors, each one message, in the order in which a backward pass fills them.

A backward pass goes from the last parameter to the first, so buckets are cut from the end of the vector; a forward pass
reads them in the opposite order. Borders lie between parameters, so the optimizer can update the parameters of a complete bucket.

Shapes: N = values of the flat vectors, padding included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

BYTES_PER_MEGABYTE = 10**6
_VALUE_BYTES = 4


@dataclass(frozen=True)
class Bucket:
    """One part.

    Attributes:
        index: Its place in the order of backward passes, from 0.
        values: The range of the flat vectors.
        parameters: Places of its parameters in the model's order.
    """

    index: int
    values: range
    parameters: range

    def of(self, vector_N: Tensor) -> Tensor:
        """The bucket's part of a flat vector, a view."""
        return vector_N[self.values.start : self.values.stop]


def cut_buckets(starts: Sequence[int], *, bucket_bytes: int) -> list[Bucket]:
    """Cut from the end: as many whole parameters as fit into a bucket; one that does not fit has a bucket to itself.

    Args:
        starts: Where each parameter begins in the flat vector, and at last where the vector ends.
        bucket_bytes: Room of a bucket; at least the vector's own bytes give one bucket.

    >>> [list(bucket.values) for bucket in cut_buckets([0, 1, 3, 4], bucket_bytes=8)]
    [[3], [1, 2], [0]]
    """
    buckets: list[Bucket] = []
    stop = len(starts) - 1
    while stop:
        start = stop - 1
        while start and (starts[stop] - starts[start - 1]) * _VALUE_BYTES <= bucket_bytes:
            start -= 1
        buckets.append(Bucket(len(buckets), range(starts[start], starts[stop]), range(start, stop)))
        stop = start
    return buckets
