"""Compute the values of quantised tensors with the `gguf` package, a piece at a time.

A request names the type and the parts of the file whose bytes are wanted; the answer is the values as float32. Parts were
checked against the file (`gguf_header.py`), and blocks are independent, so a piece may end at any block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import gguf
import numpy as np

from ttlaunch.untrusted.child import UntrustedError
from ttlaunch.untrusted.gguf_header import BLOCKS

_PIECE = 2**21
"""Bytes of blocks that are computed at once; in memory they are 20 times as many."""


def answers(requests: Iterator[dict[str, Any]], file: BinaryIO) -> Iterator[bytes]:
    """Answer each request, `{"kind": "Q4_0", "parts": [[start, end], …]}`, with the values in the order of the parts."""
    for request in requests:
        kind = gguf.GGMLQuantizationType[request["kind"]]
        _, block_bytes = BLOCKS[request["kind"]]
        for data in _gathered(file, request["parts"], most=_PIECE // block_bytes * block_bytes):
            # One row: the package computes 16 rows at a time, which would be 16 blocks.
            blocks = np.frombuffer(data, dtype=np.uint8).reshape(1, -1)
            yield np.ascontiguousarray(gguf.quants.dequantize(blocks, kind), dtype="<f4").tobytes()


def _gathered(file: BinaryIO, parts: list[list[int]], *, most: int) -> Iterator[bytes]:
    """Yield the bytes of all parts in pieces of `most` bytes; rows that have to be exchanged are small parts."""
    held = bytearray()
    for start, end in parts:
        file.seek(start)
        left = end - start
        while left:
            data = file.read(min(left, most - len(held)))
            if not data:
                raise UntrustedError("the file ends too early")
            held += data
            left -= len(data)
            if len(held) == most:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)
