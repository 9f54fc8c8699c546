"""With how few keys attention gives a row the bits that it has in training, found by trying on this machine.

Attention that is handed fewer keys, only masked ones left out, often has other bits, because the kernel divides its sums by the number
of keys. Which numbers do no harm depends on the CPU, the length and the width of heads. With AVX-512 and 256 tokens all multiples of 32 have
the right bits, so a text of 60 tokens is attended to with 64 keys and not 256; of 512 tokens, those up to 256 have.

Shapes: T = tokens of a sequence, H = heads, W = width of a head.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ttlaunch.runtime.serving import rules

_LONGEST = 4096
"""Attention of longer sequences is not computed as a whole."""


@torch.no_grad()
def right_key_counts(
    length: int, *, width: int, dtype: torch.dtype, is_shared: bool = False, device: torch.device | str = "cpu"
) -> list[int]:
    """Return the multiples of 32 keys with which 4 query rows have the bits of training, in ascending order.

    Each of them is tried, with rows at both ends of those that need just so many keys.

    Args:
        length: T, of the training.
        width: W.
        dtype: The format of attention.
        is_shared: Whether several heads of queries share keys.
        device: Where attention is computed.

    Cost: attention of one sequence with two heads, and of 4 rows three times for each number of keys; about 20 ms for 512 tokens.
    """
    if length > _LONGEST:
        return []
    generator, step = torch.Generator().manual_seed(2), rules.FEW_KEYS
    q_HTW, k_HTW, v_HTW = (
        torch.randn(1, heads, length, width, generator=generator).to(device, dtype)
        for heads in ((2, 1, 1) if is_shared else (2, 2, 2))
    )
    expected_HTW = functional.scaled_dot_product_attention(q_HTW, k_HTW, v_HTW, is_causal=True, enable_gqa=is_shared)

    def is_right(rows: Tensor, keys: int) -> bool:
        bias = rules.causal_bias(rows[None], keys=keys, dtype=dtype)
        queries = rules.padded_rows(q_HTW.transpose(0, 2), rows).transpose(0, 2)
        found = rules.attend(queries, k_HTW[:, :, :keys], v_HTW[:, :, :keys], bias_B1nT=bias)
        return torch.equal(found, rules.padded_rows(expected_HTW.transpose(0, 2), rows).transpose(0, 2))

    def are_right(keys: int) -> bool:
        several = torch.arange(keys - rules.QUERY_ROWS, keys, device=device)
        first, last = (torch.tensor([place] * rules.QUERY_ROWS, device=device) for place in (keys - step, keys - 1))
        return all(is_right(rows, keys) for rows in (first, last, several))

    return [keys for keys in range(step, length, step) if are_right(keys)]


def fewest_keys(end: int, right: Sequence[int], *, otherwise: int) -> int:
    """Return the first number of keys in `right` that reaches to position `end - 1`; none does: `otherwise`.

    >>> [fewest_keys(end, (32, 64), otherwise=512) for end in (32, 33, 65)]
    [32, 64, 512]
    """
    place = bisect_left(right, end)
    return min(right[place], otherwise) if place < len(right) else otherwise
