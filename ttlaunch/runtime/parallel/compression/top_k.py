"""Top-k: the values of largest magnitude, each with its place; all others are zero.

Shapes: N = values, K = values that are sent.
Source: A. F. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; the bound is that
    of S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ttlaunch.runtime.parallel.compression.payloads import as_bytes, as_values, check_length
from ttlaunch.spec.recipe.compression import values_sent

_MOST_VALUES = 2**31 - 1


class TopK:
    """K = `ceil(k * N)` values with their places: `8 * K` bytes, which is less than float32 for k below a half.

    Error: values that are sent are exact. Each other value is at most as large as the smallest one sent, so the squared
        norm of the error is at most `(1 - K / N)` of that of the values. NaN counts as larger than infinity, and infinity
        as larger than all else, so both are sent first.
    """

    def __init__(self, k: float) -> None:
        """Set the share `k` of the values that is sent, above 0 and up to 1."""
        self._k = k

    def payload_bytes(self, num_values: int) -> int:
        """Return the number of bytes: 4 for the place and 4 for the value of each value that is sent."""
        return 8 * self._sent(num_values)

    @torch.no_grad()
    def encode(self, values_N: Tensor) -> Tensor:
        """See `Codec`.

        Raises:
            ValueError: A place would not fit 32 bits.
        """
        count = len(values_N)
        if count > _MOST_VALUES:
            raise ValueError(f"{count} values, but a place has 32 bits; cut the vector into parts")
        places_K = values_N.abs().topk(self._sent(count), sorted=False).indices.sort().values
        return torch.cat([as_bytes(places_K.int()), as_bytes(values_N[places_K])])

    @torch.no_grad()
    def decode(self, payload: Tensor, out_N: Tensor) -> None:
        check_length(payload, self.payload_bytes(len(out_N)))
        places, values = payload.chunk(2) if len(payload) else (payload, payload)
        out_N.zero_()
        out_N[as_values(places, torch.int32).long()] = as_values(values, torch.float32)

    def take_back(self) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def _sent(self, num_values: int) -> int:
        return values_sent(self._k, num_values)
