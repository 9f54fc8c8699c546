"""The codec that sends each value by itself: as it is, or in bfloat16.

Shapes: N = values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ttlaunch.runtime.parallel.compression.payloads import as_bytes, as_values, check_length


class Cast:
    """Each value in the bits of one dtype.

    Float32: 4 bytes a value, every bit kept. Bfloat16, rounded to nearest: 2 bytes a value; error at most `abs(x) / 256`, and
    2^-134 below the normal range. Zeros, infinities and NaN are kept; what lies beyond bfloat16's range, from about
    3.396e38, becomes infinite.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def payload_bytes(self, num_values: int) -> int:
        return self._dtype.itemsize * num_values

    def encode(self, values_N: Tensor) -> Tensor:
        return as_bytes(values_N.detach().to(self._dtype, copy=True))

    def decode(self, payload: Tensor, out_N: Tensor) -> None:
        check_length(payload, self.payload_bytes(len(out_N)))
        out_N.copy_(as_values(payload, self._dtype))

    def take_back(self) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        pass
