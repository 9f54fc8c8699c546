"""PowerSGD: two thin factors in place of each matrix, found by one step of a power iteration per training step.

    P = orthonormal(M Q)        with the Q of the previous step
    Q = M' P                    sent: P and Q; decoded: P Q'

In the paper, ranks add up their P, then their Q, and share one pair of factors. Here a payload has both factors of one rank's
matrix, so that any flow can carry it, to a parameter server as well as in an all-gather. The price is that the bytes which
a rank receives grow with the number of senders.

Shapes: N = values, M = a matrix of the gradient with R rows and C columns, K = columns of the factors.
Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019: its compression and its warm start; vectors are not compressed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ttlaunch.runtime.parallel.compression.payloads import as_values, check_length

_SEED = 0x5057


class Matrix(NamedTuple):
    """Where a matrix is in the flat vector, row by row."""

    start: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


class PowerSgd:
    """Encodes each matrix in `4 * K * (R + C)` bytes, and sends uncompressed what would not become smaller.

    Error: P has orthonormal columns and Q = M' P, so a matrix is decoded as its projection on these columns. The squared
    norm of the error is the squared norm of M minus that of Q; there is no error if K is at least the rank of M. If any
    value of a matrix is not finite, the whole matrix is decoded as NaN.
    """

    def __init__(
        self, num_values: int, *, rank: int, matrices: Sequence[Matrix] = (), device: torch.device | None = None
    ) -> None:
        """Begin the power iteration with factors that are the same on every rank.

        Args:
            num_values: N, the length of every vector.
            rank: K, the columns of each factor.
            matrices: The matrices in the vector, in order, not overlapping; empty: the vector itself as one
                near-square matrix.
            device: The device of the vectors; None: the CPU.
        """
        self._num_values = num_values
        self._rank = rank
        found = list(matrices) or list(_near_square(num_values))
        self._matrices = [matrix for matrix in found if rank * (matrix.rows + matrix.columns) < matrix.size]
        generator = torch.Generator().manual_seed(_SEED)
        drawn = [torch.randn(matrix.columns, rank, generator=generator) for matrix in self._matrices]
        self._factors_CK = [factor_CK.to(device) for factor_CK in drawn]

    @property
    def factored(self) -> Sequence[Matrix]:
        """The matrices that are sent as factors."""
        return tuple(self._matrices)

    def payload_bytes(self, num_values: int) -> int:
        """Return the number of bytes: those of the factors of each matrix, then those of the other values.

        Raises:
            ValueError: The codec was made for vectors of another length.
        """
        if num_values != self._num_values:
            raise ValueError(f"{num_values} values, but this codec is for vectors of {self._num_values}")
        factors = sum(self._rank * (matrix.rows + matrix.columns) for matrix in self._matrices)
        return 4 * (factors + num_values - sum(matrix.size for matrix in self._matrices))

    @torch.no_grad()
    def encode(self, values_N: Tensor) -> Tensor:
        payload = torch.empty(self.payload_bytes(len(values_N)), dtype=torch.uint8, device=values_N.device)
        factors, others = self._parts(payload)
        for matrix, factor_CK, (left_RK, right_CK) in zip(self._matrices, self._factors_CK, factors, strict=True):
            matrix_RC = _of(values_N, matrix)
            peak = matrix_RC.abs().amax()
            if not peak.isfinite():
                left_RK.fill_(math.nan)
                right_CK.fill_(math.nan)
                continue
            scaled_RC = matrix_RC / peak.clamp(min=torch.finfo(torch.float32).tiny)  # no product overflows
            left_RK.copy_(torch.linalg.qr(scaled_RC @ factor_CK).Q)
            found_CK = scaled_RC.T @ left_RK
            right_CK.copy_(found_CK * peak)
            if peak > 0:
                factor_CK.copy_(found_CK)
        for part, values in zip(others, self._between(), strict=True):
            part.copy_(values_N[values.start : values.stop])
        return payload

    @torch.no_grad()
    def decode(self, payload: Tensor, out_N: Tensor) -> None:
        check_length(payload, self.payload_bytes(len(out_N)))
        factors, others = self._parts(payload)
        for matrix, (left_RK, right_CK) in zip(self._matrices, factors, strict=True):
            torch.mm(left_RK, right_CK.T, out=_of(out_N, matrix))
        for part, values in zip(others, self._between(), strict=True):
            out_N[values.start : values.stop] = part

    def take_back(self) -> None:
        """Keep the warm start: the next power iteration may begin anywhere."""

    def state(self) -> dict[str, Tensor]:
        """Return the right factor of each matrix, with which the next power iteration begins."""
        return {f"factor.{number}": factor_CK for number, factor_CK in enumerate(self._factors_CK)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, factor_CK in self.state().items():
            factor_CK.copy_(state[name])

    def _parts(self, payload: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """Return views of both factors of each matrix and of the values between matrices, in a payload's order."""
        values = as_values(payload, torch.float32)
        sizes = [side * self._rank for matrix in self._matrices for side in (matrix.rows, matrix.columns)]
        parts = values.split([*sizes, *map(len, self._between())])
        thin = [part.view(-1, self._rank) for part in parts[: len(sizes)]]
        return list(zip(thin[::2], thin[1::2], strict=True)), list(parts[len(sizes) :])

    def _between(self) -> Iterator[range]:
        """Yield the ranges of values before, between and after the matrices."""
        start = 0
        for matrix in self._matrices:
            yield range(start, matrix.start)
            start = matrix.start + matrix.size
        yield range(start, self._num_values)


def matrices_in(shapes: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Matrix]:
    """Return parameters of two or more dimensions as matrices; as in the paper, rows are the first dimension."""
    sides = [(shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0) for shape in shapes]
    return [Matrix(start, *side) for start, side in zip(starts, sides, strict=False) if side[0]]


def _near_square(num_values: int) -> Iterator[Matrix]:
    rows = math.isqrt(num_values)
    if rows:
        yield Matrix(0, rows, num_values // rows)


def _of(values_N: Tensor, matrix: Matrix) -> Tensor:
    return values_N[matrix.start : matrix.start + matrix.size].view(matrix.rows, matrix.columns)
