"""With how many rows a product on a GPU gives each row the bits that it has in training, found by trying.

cuBLAS chooses a kernel, and into how many parts it divides a sum, by the shape of the whole product. So a row of a product of 8 rows often has other
bits than the same row among the 1,024 of a micro-batch. Rows of one product do not depend on each other, and neither on their place. On
an H200, products in float32 need from 16 rows to as many as the training had, by the shape of the matrix; in bfloat16 and float16 any number will do,
or 192. A product of 512 rows takes hardly longer there than one of 8.

Shapes: R = rows, K = inputs, N = outputs.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

_LADDER = (16, 32, 64, 128, 256, 512, 1024, 2048)
_MOST_VALUES = 2**30
"""Outputs of the largest product that is tried: 4 GB in float32."""


@torch.no_grad()
def tried_counts(layers: Iterable[tuple[Tensor, Tensor | None]], *, rows: int) -> tuple[int, ...]:
    """Return numbers of rows, in ascending order, with which a product with each of these matrices has the bits of one of `rows` rows.

    Args:
        layers: Matrices, shape (N, K), and what is added to their products, on one device and in one format.
        rows: Rows of a product in training: the tokens of a micro-batch. It is the last of the numbers returned.

    Cost: for each shape one product of `rows` rows, and up to 27 of fewer.

    Raises:
        ValueError: A product of so many rows is too large to try.
    """
    by_shape = {(weight_NK.shape, bias_N is None): (weight_NK, bias_N) for weight_NK, bias_N in layers}
    outputs = max((shape[0] for shape, _ in by_shape), default=0)
    if rows * outputs > _MOST_VALUES:
        raise ValueError(
            f"a product of training has {rows} × {outputs} values, too many to try which rows have its bits"
        )
    right = [count for count in _LADDER if count < rows]
    for weight_NK, bias_N in by_shape.values():
        x_RK = torch.randn(rows, weight_NK.shape[1], generator=torch.Generator().manual_seed(0)).to(weight_NK)
        whole_RN = functional.linear(x_RK, weight_NK, bias_N)
        right = [count for count in right if _is_right(x_RK, whole_RN, weight_NK, bias_N=bias_N, count=count)]
    return (*right, rows)


def _is_right(x_RK: Tensor, whole_RN: Tensor, weight_NK: Tensor, *, bias_N: Tensor | None, count: int) -> bool:
    """Whether so many rows have the bits of all, at both ends and in the middle."""
    rows = len(x_RK)
    for start in (0, (rows - count) // 2, rows - count):
        part = slice(start, start + count)
        if not torch.equal(functional.linear(x_RK[part].contiguous(), weight_NK, bias_N), whole_RN[part]):
            return False
    return True
