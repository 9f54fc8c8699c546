"""Conversions between the bytes of a payload and values, and the check of a payload's length."""

import torch
from torch import Tensor


def check_length(payload: Tensor, expected: int) -> None:
    """Check that a payload has exactly the expected number of bytes.

    Raises:
        ValueError: The payload has more or fewer bytes.
    """
    if payload.shape != (expected,):
        raise ValueError(f"a payload of shape {tuple(payload.shape)}, expected ({expected},)")


def as_values(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same bytes as values: a view, or a copy if their address is not aligned for the dtype."""
    is_aligned = not part.storage_offset() % dtype.itemsize and not part.data_ptr() % dtype.itemsize
    return (part if is_aligned else part.clone()).view(dtype)


def as_bytes(values_N: Tensor) -> Tensor:
    """Return a view of the values as bytes."""
    return values_N.view(torch.uint8)
