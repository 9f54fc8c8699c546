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
    """One contiguous part of the flat vectors.

    Attributes:
        index: Its place in the order of backward passes, from 0.
        values: The range of its values in the flat vectors.
        parameters: The places of its parameters in the model's order.
    """

    index: int
    values: range
    parameters: range

    def of(self, vector_N: Tensor) -> Tensor:
        """Return the bucket's part of a flat vector, as a view."""
        return vector_N[self.values.start : self.values.stop]


def cut_buckets(starts: Sequence[int], *, bucket_bytes: int) -> list[Bucket]:
    """Cut flat vectors, from the end, into buckets of as many whole parameters as fit; a larger one is a bucket alone.

    Args:
        starts: Where each parameter begins in the flat vector; the last item is the vector's end.
        bucket_bytes: The most bytes of a bucket; with the vector's own size or more there is one bucket.

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
