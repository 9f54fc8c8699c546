"""Parts of a payload as values, and the check of its length."""

import torch
from torch import Tensor


def check_length(payload: Tensor, expected: int) -> None:
    """Check that a payload has exactly the bytes that its values make.

    Raises:
        ValueError: It has more or fewer.
    """
    if payload.shape != (expected,):
        raise ValueError(f"a payload of shape {tuple(payload.shape)}, expected ({expected},)")


def as_values(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as values; a view, or a copy where the part does not begin on a border of the dtype."""
    is_aligned = not part.storage_offset() % dtype.itemsize and not part.data_ptr() % dtype.itemsize
    return (part if is_aligned else part.clone()).view(dtype)


def as_bytes(values_N: Tensor) -> Tensor:
    """The values as bytes, a view."""
    return values_N.view(torch.uint8)
