"""Choose the size of a bucket: the configured one, or the one of a few sizes with which the first steps were fastest.

One rank decides and sends the size to the others, so that all use the same buckets. No bit of the result depends on it.
"""

import math
import statistics
import time

from ttlaunch.runtime.parallel.gradients.buckets import BYTES_PER_MEGABYTE

UNMEASURED = math.inf
"""In place of megabytes: the size with which a run begins, and no other. No configuration has it; a simulation in which no time passes does."""

_CANDIDATE_BYTES = tuple(size * BYTES_PER_MEGABYTE for size in (1, 2, 4, 8, 16, 32))
_MOST_CANDIDATES = 4
_LEAST_BUCKETS = 3
"""The fewest buckets that a candidate size must give: fewer overlap no more than a single message."""
_MOST_IN_ONE = _LEAST_BUCKETS * _CANDIDATE_BYTES[-1]
"""The largest vector that is tried as one bucket: the rank that adds up holds buckets of each worker, and a larger message hides no more of
its cost."""
_ROUNDS = 4
_CLEAR_GAIN = 0.98
"""A candidate must take less than this fraction of the time with the first one; a smaller gain is noise."""


def candidates(vector_bytes: int) -> list[int]:
    """List the sizes to try for a vector: one bucket for all of it if it is small, and the largest sizes that give several buckets."""
    several = [size for size in _CANDIDATE_BYTES if size * _LEAST_BUCKETS <= vector_bytes]
    if vector_bytes > _MOST_IN_ONE:
        return several[-_MOST_CANDIDATES:][::-1]
    return [vector_bytes, *several[1 - _MOST_CANDIDATES :][::-1]]


def largest_of_several(vector_bytes: int) -> int:
    """Return the bytes of a bucket where nobody measures: the largest size that gives several, or the whole vector if none does."""
    return next((size for size in candidates(vector_bytes) if size < vector_bytes), vector_bytes)


class BucketTuner:
    """Tries the candidates in turns, one step each, and keeps the one with the smallest median time.

    Attributes:
        bucket_bytes: The size of a bucket in the next step.
        is_final: Whether this size will not change any more.
    """

    def __init__(self, vector_bytes: int, *, bucket_megabytes: float | None) -> None:
        """Begin with the configured size, or with the first candidate if there is none or `UNMEASURED`, which stays."""
        self._candidates = candidates(vector_bytes)
        if bucket_megabytes == UNMEASURED:
            del self._candidates[1:]
        elif bucket_megabytes is not None:
            self._candidates = [int(bucket_megabytes * BYTES_PER_MEGABYTE)]
        self._seconds: list[list[float]] = [[] for _ in self._candidates]
        self._steps = 0
        self._began: float | None = None
        self.bucket_bytes = self._candidates[0]
        self.is_final = len(self._candidates) == 1

    def end_step(self) -> None:
        """Note the time since the last call, which a step with the present size took, and choose the next size."""
        if self.is_final:
            return
        now = time.perf_counter()
        if self._began is not None:  # the first step pays for connections and caches
            self._seconds[self._steps % len(self._candidates)].append(now - self._began)
            self._steps += 1
        self._began = now
        if self._steps == _ROUNDS * len(self._candidates):
            self.bucket_bytes, self.is_final = self._fastest(), True
        else:
            self.bucket_bytes = self._candidates[self._steps % len(self._candidates)]

    def _fastest(self) -> int:
        medians = [statistics.median(seconds) for seconds in self._seconds]
        best = min(medians)
        # The first candidate, the fewest messages, stays unless another one is clearly faster.
        return self._candidates[0 if medians[0] * _CLEAR_GAIN <= best else medians.index(best)]
