"""Fingerprints of parameters, to compare runs bit for bit."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digest(name: str, tensor: Tensor) -> str:
    """SHA-256 of name, shape, dtype and bytes, in hexadecimal."""
    flat_bytes = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    about = f"{name}\n{tuple(tensor.shape)}\n{str(tensor.dtype).removeprefix('torch.')}\n"
    return hashlib.sha256(about.encode() + flat_bytes.tobytes()).hexdigest()


def digests(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The digest of each parameter by name."""
    return {name: digest(name, parameter) for name, parameter in named_parameters}
