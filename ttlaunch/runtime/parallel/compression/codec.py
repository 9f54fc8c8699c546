"""The interface of codecs for gradients, and how to build the configured one.

A codec turns a vector of float32 values into bytes and back, with a loss that its docstring bounds. The number
of bytes depends only on the number of values, so receivers know it and the formulas of traffic are exact:

    codec = build_codec(cfg.compression_config, num_values)
    ctx.send(codec.encode(grads_N), dest=server)
    ...
    payload = torch.empty(codec.payload_bytes(num_values), dtype=torch.uint8)
    ctx.recv(payload, source=worker)
    codec.decode(payload, out_N)

Codecs are for gradients only. With `ErrorFeedback`, what the codec loses of one gradient is added to the next one. An
error in weights could not be corrected later.

An infinity or NaN stays visible: the decoded vector is not finite at that place, and perhaps at others. The norm of the
gradient is then not finite either, so a training with fp16 detects the overflow and skips the step.

Shapes: N = values.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ttlaunch.runtime.parallel.compression.error_feedback import ErrorFeedback
from ttlaunch.runtime.parallel.compression.int8 import BlockInt8
from ttlaunch.runtime.parallel.compression.payloads import as_bytes, as_values, check_length
from ttlaunch.runtime.parallel.compression.powersgd import Matrix, PowerSgd
from ttlaunch.runtime.parallel.compression.top_k import TopK
from ttlaunch.spec.recipe.sections import CompressionConfig


class Codec(Protocol):
    """Turns values into bytes and back. A rank has one codec for each vector that it sends, because a codec may have a state."""

    def payload_bytes(self, num_values: int) -> int:
        """Return the number of bytes that any `num_values` values take."""

    def encode(self, values_N: Tensor) -> Tensor:
        """Turn values into bytes.

        Args:
            values_N: Shape `(N,)`, float32, contiguous; only read.

        Returns:
            Shape `(payload_bytes(N),)`, uint8, a new tensor on the same device.
        """

    def decode(self, payload: Tensor, out_N: Tensor) -> None:
        """Decode into `out_N` a payload from a codec with the same configuration on any rank; change no state.

        Raises:
            ValueError: The payload's length is not `payload_bytes(N)`.
        """

    def take_back(self) -> None:
        """Undo the change of state by the last `encode`, whose payload was not used because the step was skipped or refused."""

    def state(self) -> dict[str, Tensor]:
        """Return, for checkpoints, the tensors that the next `encode` depends on, by name; they are not copies."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from another codec's `state()`."""


class Cast:
    """Converts each value to one dtype.

    Float32 takes 4 bytes a value and keeps every bit. Bfloat16 takes 2 bytes a value and rounds to nearest; the error is
    at most `abs(x) / 256`, and 2^-134 below the normal range. Zeros, infinities and NaN are kept; a value beyond
    bfloat16's range, from about 3.396e38, becomes infinite.
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


def build_codec(
    cfg: CompressionConfig, num_values: int, *, matrices: Sequence[Matrix] = (), device: torch.device | None = None
) -> Codec:
    """Build the codec that a configuration asks for, with its error feedback.

    Args:
        cfg: The codec's configuration.
        num_values: The length N of every vector that it will encode.
        matrices: The matrices in those vectors, for `powersgd`, whose payload depends on them; see `matrices_in`.
            Empty: one near-square matrix of all values, which is less like a matrix of low rank.
        device: The device of those vectors; None: the CPU.
    """
    if cfg.kind == "none":
        return Cast(torch.float32)
    codec = _build_lossy(cfg, num_values, matrices=matrices, device=device)
    return ErrorFeedback(codec, num_values, device=device) if cfg.error_feedback else codec


def _build_lossy(
    cfg: CompressionConfig, num_values: int, *, matrices: Sequence[Matrix], device: torch.device | None
) -> Codec:
    match cfg.kind:
        case "bf16":
            return Cast(torch.bfloat16)
        case "int8":
            return BlockInt8(block_size=cfg.block_size)
        case "top_k":
            return TopK(cfg.k)
        case _:
            return PowerSgd(num_values, rank=cfg.rank, matrices=matrices, device=device)
