"""Block-wise int8: a scale for each block of values, and one signed byte for each value.

The scale is symmetric around zero, `absmax / 127`, so there is no zero point that could be out of range for values of
one sign, and no branch for small ranges. A zero is sent as zero, whatever the other values of its block are.

Shapes: N = values, R = blocks of one piece, B = values of a block.
Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, for the blocks. There,
    quantization levels are spaced unevenly; here, evenly.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ttlaunch.runtime.parallel.compression.payloads import as_values, check_length

_LEVELS = 127
_SMALLEST_SCALE = 2.0**-126
_LARGEST_SCALE = torch.finfo(torch.float32).max / _LEVELS * (1 - 2.0**-22)
_PIECE = 1 << 17
"""How many values are encoded at a time: half a megabyte, which stays in the cache from one operation to the next."""


class BlockInt8:
    """Encodes a value in one byte, and a block's scale in four: with blocks of 256, 3.94 times fewer bytes than float32.

    Error: at most `1.0001 * absmax / 254` of the value's block (half a level, and float32's own rounding), and 2^-127
        where the block is below float32's normal range. Zeros are kept. If any value of a block is not finite,
        the whole block is decoded as NaN; other blocks are not affected.
    """

    def __init__(self, *, block_size: int = 256) -> None:
        self._block_size = block_size

    def payload_bytes(self, num_values: int) -> int:
        """Return the number of bytes: those of the scales, then one for each value."""
        return 4 * self._num_blocks(num_values) + num_values

    @torch.no_grad()
    def encode(self, values_N: Tensor) -> Tensor:
        count = len(values_N)
        payload = torch.empty(self.payload_bytes(count), dtype=torch.uint8, device=values_N.device)
        scales, codes_N = self._parts(payload, count)
        room_N = values_N.new_empty(min(count, max(_PIECE, self._block_size)))
        for values, blocks, width in self._pieces(count):
            rows_RB = values_N[values.start : values.stop].view(-1, width)
            room_RB = room_N[: len(values)].view(-1, width)
            scales_R = torch.abs(rows_RB, out=room_RB).amax(1).div_(_LEVELS)
            scales_R += scales_R - scales_R  # infinite becomes NaN, which the bounds below do not hide
            scales_R.clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
            torch.mul(rows_RB, scales_R.reciprocal()[:, None], out=room_RB).round_()
            if scales_R.isnan().any():
                room_RB.nan_to_num_(nan=0.0)  # any bytes would do, but every run sends the same
            scales[blocks.start : blocks.stop] = scales_R
            codes_N[values.start : values.stop] = room_RB.view(-1)
        return payload

    @torch.no_grad()
    def decode(self, payload: Tensor, out_N: Tensor) -> None:
        count = len(out_N)
        check_length(payload, self.payload_bytes(count))
        scales, codes_N = self._parts(payload, count)
        for values, blocks, width in self._pieces(count):
            part = out_N[values.start : values.stop]
            part.copy_(codes_N[values.start : values.stop])
            part.view(-1, width).mul_(scales[blocks.start : blocks.stop, None])

    def take_back(self) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def _num_blocks(self, num_values: int) -> int:
        return -(-num_values // self._block_size)

    def _parts(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales and of the codes in a payload."""
        border = 4 * self._num_blocks(count)
        return as_values(payload[:border], torch.float32), payload[border:].view(torch.int8)

    def _pieces(self, count: int) -> Iterator[tuple[range, range, int]]:
        """Yield pieces of the vector: its values, its blocks, the length of a block; a shorter last block is alone."""
        size, whole = self._block_size, count // self._block_size
        step = max(1, _PIECE // size)
        for first in range(0, whole, step):
            last = min(first + step, whole)
            yield range(first * size, last * size), range(first, last), size
        if count % size:
            yield range(whole * size, count), range(whole, whole + 1), count % size
