"""The rules that give cached rows the bits of the training's forward pass on CPUs, and a probe of them on this machine.

All were found by measurement, with torch's products (MKL, oneDNN) and its attention kernel for CPUs:

- Products of few rows round differently from those of many; from some number of rows on, a row does not depend on the others.
  With AVX2 that number is 4, with AVX-512 it is 3, 11 or 16, by the inputs of the product. Several threads may share the rows: of 5
  to 7 or 9 to 11, one of two threads gets fewer than 4. Multiples of 4 hold there, but not for every shape with AVX-512.
- Attention depends on how many keys it is handed, masked ones included, and on whether the last block of query rows has 1, 2
  or 3 rows. So queries are padded to a multiple of 4, and keys reach to the next multiple of 512 or the end of a sequence. For 4
  query rows, fewer keys do at some lengths; `keys.py` tries how many.
- Padding must be real rows: a row that is repeated with a stride of 0 takes another path through these kernels.
- The training's own last block of query rows can have 1 to 3 rows, at some sequence lengths; no cached row has these bits.
- Columns of a matrix can be shared among ranks, if no rank has fewer than 16.

Shapes: R = rows, n = rows of one sequence, T = tokens of a sequence, K = inputs of a product, H = heads, W = width of a head.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 4
"""The fewest rows of a product on this CPU."""

QUERY_ROWS = 4
"""The number of query rows, and of rows of a product for several threads, is a multiple of it."""

KEYS = 512
"""Attention is handed a multiple of so many keys, or those of a whole sequence if that is shorter."""

FEW_KEYS = 32
"""Where bits do not depend on it, attention is handed a multiple of so many keys, so that streams of similar length attend together."""

LEAST_SHARE = 16
"""The fewest columns of a matrix that a rank computes."""


_BLOCKS = ((192, 32), (768, 64), (float("inf"), 256))
"""Sequences of fewer tokens than the first number are attended to in blocks of so many query rows."""


@dataclass(frozen=True)
class Padding:
    """How many rows and keys are computed in vain.

    Attributes:
        is_exact: Whether rows get the bits of training.
        rows: The fewest rows of a product; None: as many as this CPU needs. Ranks that share matrices need one number, for all CPUs.
    """

    is_exact: bool
    rows: int | None = None

    @property
    def least_rows(self) -> int:
        """The fewest rows of a product."""
        return 1 if not self.is_exact else self.rows or ROWS

    def product_rows(self, rows: int) -> int:
        """Return to how many rows a product is padded, with the number of threads that torch has now."""
        if not self.is_exact:
            return rows
        rows = max(self.least_rows, rows)
        return rows if torch.get_num_threads() == 1 else padded_count(rows)

    def query_rows(self, rows: int) -> int:
        """Return to how many rows the queries of one sequence are padded."""
        return padded_count(rows) if self.is_exact else rows

    def key_count(self, end: int, length: int) -> int:
        """Return how many keys attention is handed for a row at position `end - 1` of a sequence of `length` tokens."""
        return key_count(end, length) if self.is_exact else min(length, -(-end // FEW_KEYS) * FEW_KEYS)


EXACT, FAST = Padding(is_exact=True), Padding(is_exact=False)


def padded_count(rows: int) -> int:
    """Return to how many rows the queries of one sequence are padded for exact bits.

    >>> [padded_count(rows) for rows in (1, 4, 98)]
    [4, 4, 100]
    """
    return -(-rows // QUERY_ROWS) * QUERY_ROWS


def key_count(end: int, length: int) -> int:
    """Return how many keys attention is handed for exact bits.

    >>> key_count(1, 160), key_count(513, 2048)
    (160, 1024)
    """
    return min(length, -(-end // KEYS) * KEYS)


def padded_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows with these indices, in new memory; padding repeats an index.

    Args:
        rows: Shape (R, ...).
        index: Any shape, int64.
    """
    return rows[index]


def last_block_rows(length: int) -> int:
    """Return the number of query rows in the last block of the causal attention of a whole sequence.

    >>> last_block_rows(513), last_block_rows(160)
    (1, 32)
    """
    block = next(rows for below, rows in _BLOCKS if length < below)
    return (length - 1) % block + 1


def attend(q_BHnW: Tensor, k_BHTW: Tensor, v_BHTW: Tensor, *, bias_B1nT: Tensor) -> Tensor:
    """Attend to cached keys.

    Args:
        q_BHnW: Queries, of a number of rows from `padded_count`.
        k_BHTW: Keys, as many as `key_count` says; with fewer heads, adjacent ones of the queries share each.
        v_BHTW: Their values.
        bias_B1nT: 0 where a query sees a key, otherwise minus infinity; in the queries' format.

    Returns:
        Shape (B, H, n, W).
    """
    is_shared = q_BHnW.shape[1] != k_BHTW.shape[1]
    return functional.scaled_dot_product_attention(q_BHnW, k_BHTW, v_BHTW, attn_mask=bias_B1nT, enable_gqa=is_shared)


def causal_bias(positions_Bn: Tensor, *, keys: int, dtype: torch.dtype) -> Tensor:
    """Return what hides from queries at these positions the keys behind them, shape (B, 1, n, keys)."""
    device = positions_Bn.device
    hidden_BnT = torch.arange(keys, device=device) > positions_Bn[..., None]
    return torch.zeros(hidden_BnT.shape, dtype=dtype, device=device).masked_fill_(hidden_BnT, float("-inf"))[:, None]


def cut_columns(columns: int, count: int) -> list[range]:
    """Divide the columns of a matrix among ranks at multiples of 16; the last part also has the rest.

    >>> cut_columns(70, 3)
    [range(0, 16), range(16, 32), range(32, 70)]

    Raises:
        ValueError: A rank would have fewer than `LEAST_SHARE` columns.
    """
    units = columns // LEAST_SHARE
    if units < count:
        raise ValueError(f"{count} ranks cannot share {columns} columns: each needs at least {LEAST_SHARE}")
    borders = [place * units // count * LEAST_SHARE for place in range(count)] + [columns]
    return [range(first, end) for first, end in pairwise(borders)]
