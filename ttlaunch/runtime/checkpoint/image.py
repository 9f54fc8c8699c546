"""One shard as the bytes of its safetensors file, laid out once in host memory and filled anew for every checkpoint.

The format is that of https://huggingface.co/docs/safetensors: the header's length, the header as JSON, then all tensors
without gaps. The library can only write tensors that it first copies to bytes; here each is copied once, to the place
it has in the file, from any device.
"""

import json
import math
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What a file calls a type."""

_BORDER = 64
PAGE = 4096
"""The image begins at a page and fills whole ones, as writing past the system's page cache wants."""


class ShardImage:
    """The bytes of a safetensors file, in memory, for a fixed set of tensors.

    Attributes:
        names: The names of the tensors, in the order of the file.
        size: The size of the file, in bytes.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Make room for the tensors; nothing is copied.

        Args:
            tensors: By name, on one device, of any shape and of the dtypes above; looked at again by `copy()`.
        """
        self._sources = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
        self.names = tuple(self._sources)
        header, places = _lay_out(self._sources)
        self.size = len(header) + (places[-1].stop if places else 0)
        self._is_cuda = any(tensor.is_cuda for tensor in self._sources.values())
        room = torch.zeros(self.size + 2 * PAGE, dtype=torch.uint8, pin_memory=self._is_cuda)
        first = -room.data_ptr() % PAGE
        self._bytes = room[first : first + self.size + -self.size % PAGE]
        self._bytes[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._ends = [len(header) + place.stop for place in places]
        self._final = 0
        self._progress = threading.Condition()
        body = self._bytes[len(header) : self.size]
        self._targets = [
            body[place.start : place.stop].view(source.dtype).view(source.shape)
            for place, source in zip(places, self._sources.values(), strict=True)
        ]

    def begin(self) -> None:
        """Announce that a `copy()` will follow; from now on `final_after` waits for it."""
        self._final = 0

    def copy(self) -> None:
        """Copy all tensors as they are now; returns when they may change again."""
        try:
            for target, source, end in zip(self._targets, self._sources.values(), self._ends, strict=True):
                target.copy_(source, non_blocking=self._is_cuda)
                if not self._is_cuda:
                    self._say_final(end)
            # Copies from the device are only queued until here, so none of them counts as final before.
            if self._is_cuda:
                torch.cuda.current_stream().synchronize()
        finally:
            self._say_final(self.size)

    def final_after(self, place: int) -> int:
        """Wait until more than `place` bytes have been copied, and return how many; the header counts with the first tensor.

        The writer calls this, to write the first bytes of the file while others are still being copied. If copying fails, all bytes
        count as copied.
        """
        with self._progress:
            self._progress.wait_for(lambda: self._final > place)
            return self._final

    def _say_final(self, end: int) -> None:
        with self._progress:
            self._final = end
            self._progress.notify_all()

    @property
    def data(self) -> memoryview:
        """The file's bytes, without a copy; they change with the next `copy()`."""
        return self.pages[: self.size]

    @property
    def pages(self) -> memoryview:
        """The file's bytes, and zeros up to the end of the last page."""
        return self._bytes.numpy().data


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[range]]:
    """The header, padded so that tensors begin at a border, and each tensor's bytes behind it."""
    content, places, start = {}, [], 0
    for name, tensor in tensors.items():
        end = start + math.prod(tensor.shape) * tensor.element_size()
        places.append(range(start, end))
        content[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(content).encode()
    text += b" " * (-(len(text) + 8) % _BORDER)
    return len(text).to_bytes(8, "little") + text, places
