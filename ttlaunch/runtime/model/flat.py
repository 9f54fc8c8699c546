"""All parameters of a model as one flat vector, and all gradients as another, without copies.

Each parameter begins on a 64-byte border: kernels may add in an order that depends on the alignment, and then
a pipeline stage would not compute the same bits as the whole model.

Shapes: N = values of the flat vectors, padding included.
"""

import hashlib
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor, nn

_ALIGNMENT = 16


class FlatParameters:
    """Flat views of parameters and their gradients.

    Attributes:
        parameters: The parameters in their order.
        starts: Where each of them begins in the vectors, and at last N.
        weights_N: Float32, shape `(N,)`; writing here changes the parameters.
        grads_N: All gradients, in the same layout; backward passes add to it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move the parameters into flat vectors; ones that already are in some, in this order, stay where they are.

        Raises:
            ValueError: There is no parameter, or one that is not float32.
        """
        self.parameters = list(parameters)
        if not self.parameters or any(parameter.dtype != torch.float32 for parameter in self.parameters):
            raise ValueError("flat parameters need at least one parameter, and all of them float32")
        sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in self.parameters]
        self.starts = [0, *accumulate(sizes)]
        tensors = [parameter.data for parameter in self.parameters]
        self.weights_N = self._joined(tensors) if self._is_flat(tensors) else self._moved(tensors)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        complete = len(gradients) == len(self.parameters) and self._is_flat(gradients)
        self.grads_N = self._joined(gradients) if complete else torch.zeros_like(self.weights_N)
        self._views = [self._view(self.grads_N, place) for place in range(len(self.parameters))]
        self.attach_gradients()

    def attach_gradients(self) -> None:
        """Let every `parameter.grad` be its part of `grads_N` again; the value of one that was replaced is kept.

        A parameter without a gradient, because its `grad` was set to None and no backward pass reached it, counts as
        zero.
        """
        for place in range(len(self.parameters)):
            self.attach_gradient(place)

    def attach_gradient(self, place: int) -> None:
        """Let the gradient of one parameter be its part of `grads_N` again; the value of one that was replaced is kept."""
        parameter, view = self.parameters[place], self._views[place]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view

    def _view(self, flat_N: Tensor, place: int) -> Tensor:
        parameter = self.parameters[place]
        return flat_N[self.starts[place] : self.starts[place] + parameter.numel()].view(parameter.shape)

    def _is_flat(self, tensors: list[Tensor]) -> bool:
        first = tensors[0]
        return (
            first.untyped_storage().nbytes() == 4 * self.starts[-1]
            and all(tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for tensor in tensors)
            and [tensor.storage_offset() for tensor in tensors] == self.starts[:-1]
        )

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        return torch.as_strided(tensors[0].detach(), (self.starts[-1],), (1,), 0)

    def _moved(self, tensors: list[Tensor]) -> Tensor:
        flat_N = torch.zeros(self.starts[-1], dtype=torch.float32, device=tensors[0].device)
        for place, tensor in enumerate(tensors):
            self._view(flat_N, place).copy_(tensor)
            self.parameters[place].data = self._view(flat_N, place)
        return flat_N


def digest(name: str, tensor: Tensor) -> str:
    """SHA-256 of name, shape, dtype and bytes, in hexadecimal."""
    about = f"{name}\n{tuple(tensor.shape)}\n{str(tensor.dtype).removeprefix('torch.')}\n"
    found = hashlib.sha256(about.encode())
    found.update(
        _bytes_of(tensor)
    )  # without a copy: an embedding may be most of a model, and the checkpoint's copy is still there
    return found.hexdigest()


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor's values in row-major order, of any dtype, from any device; they are copied."""
    return _bytes_of(tensor).tobytes()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def digests(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The digest of each parameter by name."""
    return {name: digest(name, parameter) for name, parameter in named_parameters}
