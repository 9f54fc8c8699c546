"""Products of 2 to 15 rows with the bits of products of many, on CPUs where a plain product has them only from 16 rows on.

With AVX-512, MKL takes another path for few rows of `x @ W.T`, which sums in another order. With a matrix that is transposed in memory it takes
the path of many from 2 rows on, in half of the time of 16. That path sums over the inputs in blocks, for some numbers of inputs in
blocks of 384 and for others as the whole product of so few rows does. So there are two ways to compute: the whole matrix, and blocks of 384 inputs
whose results are added in order, to the bias if there is one. Which of them has the right bits is tried with each matrix and each number
of rows; where none has, the product is padded to more rows.

Shapes: K = inputs, N = outputs, R = rows.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from ttlaunch.spec.recipe.serving import MOST_TRANSPOSED_BYTES

_BLOCK = 384
_MANY = 64
"""Rows of a product whose bits are right."""

FEWEST_ROWS = 2
"""A product of one row has other bits in any form."""

_ENOUGH_ROWS = 16

Product = Callable[[Tensor], Tensor]


def can_transpose(matrices: Iterable[Tensor], *, least_rows: int) -> bool:
    """Whether transposed copies of matrices save time here, and are small enough.

    Args:
        matrices: All matrices of a rank, in the format of products.
        least_rows: The fewest rows of a plain product that have the right bits.
    """
    size = 0
    for matrix in matrices:
        if matrix.dtype != torch.float32 or matrix.device.type != "cpu":
            return False
        size += matrix.nbytes
    return size <= MOST_TRANSPOSED_BYTES and least_rows >= _ENOUGH_ROWS and torch.get_num_threads() == 1


def products_of_few_rows(weight_NK: Tensor, bias_N: Tensor | None) -> dict[int, Product]:
    """Return functions for products with a matrix, by their number of rows; of a number that is missing, none has the right bits.

    Args:
        weight_NK: The matrix, float32; it must not change while the functions are in use.
        bias_N: What is added.

    Cost: the memory of the matrix, and about 60 products of few rows.
    """
    inputs = weight_NK.shape[1]
    weight_KN = weight_NK.T.contiguous()
    x_RK = torch.randn(_MANY, inputs, generator=torch.Generator().manual_seed(0))
    right_RN = functional.linear(x_RK, weight_NK, bias_N)
    blocks = [min(_BLOCK, inputs - start) for start in range(0, inputs, _BLOCK)]
    ways = [_whole(weight_KN, bias_N), *([_in_blocks(weight_KN, bias_N, blocks)] if len(blocks) > 1 else [])]
    found: dict[int, Product] = {}
    for rows in range(FEWEST_ROWS, _ENOUGH_ROWS):
        tried = (slice(rows), slice(_MANY - rows, _MANY))
        for product in ways:
            if all(torch.equal(product(x_RK[part]), right_RN[part]) for part in tried):
                found[rows] = product
                break
    return found


def _whole(weight_KN: Tensor, bias_N: Tensor | None) -> Product:
    if bias_N is None:
        return lambda x_RK: x_RK @ weight_KN
    return lambda x_RK: torch.addmm(bias_N, x_RK, weight_KN)


def _in_blocks(weight_KN: Tensor, bias_N: Tensor | None, blocks: list[int]) -> Product:
    """Return the function that adds the products of blocks of inputs, in order, to the bias."""
    first_kN, *others_kN = weight_KN.split(blocks)
    first = _whole(first_kN, bias_N)

    def product(x_RK: Tensor) -> Tensor:
        first_Rk, *others_Rk = x_RK.split_with_sizes(blocks, 1)
        sum_RN = first(first_Rk)
        for x_Rk, weight_kN in zip(others_Rk, others_kN, strict=True):
            sum_RN.addmm_(x_Rk, weight_kN)
        return sum_RN

    return product
