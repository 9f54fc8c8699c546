"""Cut micro-batches and vectors among ranks; the ranks and the formulas of their traffic both use these functions."""

from collections.abc import Iterator
from itertools import pairwise


def contiguous_blocks(count: int, parts: int) -> list[range]:
    """Cut `range(count)` into `parts` contiguous blocks; if the division leaves a remainder, the first blocks are longer by one.

    >>> contiguous_blocks(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    short, longer = divmod(count, parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + short + (part < longer))
    return [range(start, end) for start, end in pairwise(ends)]


def aligned_subtrees(block: range) -> Iterator[range]:
    """Yield the largest subtrees of the reduction tree that together make up a block, as ranges of leaves, in order.

    >>> list(aligned_subtrees(range(3, 8)))
    [range(3, 4), range(4, 8)]
    """
    start = block.start
    while start < block.stop:
        size = start & -start or 1 << (block.stop - start).bit_length()
        while start + size > block.stop:
            size //= 2
        yield range(start, start + size)
        start += size
