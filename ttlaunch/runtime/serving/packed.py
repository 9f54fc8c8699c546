"""Products of 2, 4 or 8 rows with the bits of products of many, on CPUs where a plain product has them only from 16 rows on.

With AVX-512, MKL takes another path for few rows. A matrix that it has packed beforehand for so many rows takes the path of many, in a
third of the time of 16 rows. It sums over the inputs in blocks of 384, as that path does, but for some numbers of inputs it divides
them otherwise. So there are two ways to compute: the whole matrix, and blocks of 384 inputs whose results are added in order, to the bias if
there is one. Which of them has the right bits is tried with each matrix; if none has, the product is padded to 16 rows.

Shapes: K = inputs, N = outputs, R = rows, one of `PACKED_ROWS`.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from ttlaunch.spec.recipe.serving import MOST_PACKED_BYTES, PACKED_ROWS

_BLOCK = 384
_MANY = 64
"""Rows of a product whose bits are right."""

Product = Callable[[Tensor], Tensor]


def can_pack(matrices: Iterable[Tensor], *, least_rows: int) -> bool:
    """Whether packed matrices save time here, and are few enough.

    Args:
        matrices: All matrices of a rank, in the format of products.
        least_rows: The fewest rows of a plain product that have the right bits.
    """
    size = 0
    for matrix in matrices:
        if matrix.dtype != torch.float32 or matrix.device.type != "cpu":
            return False
        size += len(PACKED_ROWS) * matrix.nbytes
    is_possible = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    return is_possible and size <= MOST_PACKED_BYTES and least_rows > max(PACKED_ROWS) and torch.get_num_threads() == 1


def pack(weight_NK: Tensor, bias_N: Tensor | None) -> dict[int, Product]:
    """Return functions for products with a matrix, by their number of rows; of a number that is missing, none has the right bits.

    Args:
        weight_NK: The matrix, float32; it must not change while the functions are in use.
        bias_N: What is added.

    Cost: the memory of the matrix for each number of rows, and some products.
    """
    inputs = weight_NK.shape[1]
    x_RK = torch.randn(_MANY, inputs, generator=torch.Generator().manual_seed(0))
    right_RN = functional.linear(x_RK, weight_NK, bias_N)
    whole, blocks = [(0, inputs)], [(start, min(start + _BLOCK, inputs)) for start in range(0, inputs, _BLOCK)]
    found: dict[int, Product] = {}
    for rows in PACKED_ROWS:
        for parts in (whole, blocks) if len(blocks) > 1 else (whole,):
            product = _product(weight_NK, bias_N, rows, parts)
            tries = [x_RK[start : start + rows] for start in range(0, _MANY, rows)]
            if torch.equal(torch.cat([product(one.contiguous()) for one in tries]), right_RN):
                found[rows] = product
                break
    return found


def _product(weight_NK: Tensor, bias_N: Tensor | None, rows: int, parts: list[tuple[int, int]]) -> Product:  # noqa: PLR0917  private
    """Return the function that computes so many rows with packed parts of a matrix."""
    mkl = torch.ops.mkl
    packed = []
    for start, end in parts:
        part_Nk = weight_NK[:, start:end].contiguous()
        packed.append((start, end, mkl._mkl_reorder_linear_weight(part_Nk, rows)))  # noqa: SLF001 - torch's own compiler uses it
    linear = mkl._mkl_linear  # noqa: SLF001 - as above
    if len(parts) == 1:
        matrix = packed[0][2]
        return lambda x_RK: linear(x_RK, matrix, weight_NK, bias_N, rows)

    sizes = [end - start for start, end in parts]
    matrices = [(matrix, weight_NK[:, start:end]) for start, end, matrix in packed]

    def in_blocks(x_RK: Tensor) -> Tensor:
        first_Rk, *others_Rk = x_RK.split_with_sizes(sizes, 1)
        sum_RN: Tensor = linear(first_Rk, *matrices[0], bias_N, rows)  # adds the bias first, as the whole product does
        for x_Rk, matrix in zip(others_Rk, matrices[1:], strict=True):
            sum_RN += linear(x_Rk, *matrix, None, rows)
        return sum_RN

    return in_blocks
