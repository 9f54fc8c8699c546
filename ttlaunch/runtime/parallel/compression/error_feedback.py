"""Error feedback: what a codec loses of one gradient is added to the next one.

    corrected = gradient + residual
    payload   = encode(corrected)
    residual  = corrected - decode(payload)

Then the sum of all that was sent differs from the sum of all gradients by one residual, however long training goes on,
and a codec that is biased, or sends few values, still converges.

Source: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", Interspeech 2014; S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes", ICML 2019.

Shapes: N = values.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

RESIDUAL = "residual"
"""Name of the residual in the state."""


class _Codec(Protocol):
    def payload_bytes(self, num_values: int) -> int: ...

    def encode(self, values_N: Tensor) -> Tensor: ...

    def decode(self, payload: Tensor, out_N: Tensor) -> None: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: Mapping[str, Tensor]) -> None: ...


class ErrorFeedback:
    """A codec and the residual of the vector that a rank sends in every step.

    If the gradient overflowed and the residual would not be finite, the residual does not change: the payload shows the
    overflow, the step is skipped, and later steps are not affected. Ranks whose own gradient was finite then call
    `take_back`, which restores the previous residual, because what they sent was not used.

    Cost: `8 * N` bytes: the residual, and a buffer for the decoded vector that afterwards holds the previous residual.
    """

    def __init__(self, codec: _Codec, num_values: int, *, device: torch.device | None = None) -> None:
        """Begin with a residual of zero.

        Args:
            codec: The codec that encodes gradient plus residual.
            num_values: The length N of every vector.
            device: The device of the vectors; None: the CPU.
        """
        self._codec = codec
        self._residual_N = torch.zeros(num_values, device=device)
        self._room_N = torch.empty_like(self._residual_N)

    def payload_bytes(self, num_values: int) -> int:
        return self._codec.payload_bytes(num_values)

    @torch.no_grad()
    def encode(self, values_N: Tensor) -> Tensor:
        corrected_N = values_N + self._residual_N
        payload = self._codec.encode(corrected_N)
        self._codec.decode(payload, self._room_N)
        corrected_N.sub_(self._room_N)
        self._room_N.copy_(self._residual_N)
        if torch.isfinite(corrected_N).all():
            self._residual_N.copy_(corrected_N)
        return payload

    def decode(self, payload: Tensor, out_N: Tensor) -> None:
        self._codec.decode(payload, out_N)

    @torch.no_grad()
    def take_back(self) -> None:
        """Restore the residual from before the last `encode`; the codec's own state, such as a warm start, is kept."""
        self._residual_N.copy_(self._room_N)

    def state(self) -> dict[str, Tensor]:
        """Return the residual and the codec's own state."""
        return {RESIDUAL: self._residual_N} | self._codec.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._residual_N.copy_(state[RESIDUAL])
        self._room_N.copy_(self._residual_N)
        self._codec.load_state(state)
