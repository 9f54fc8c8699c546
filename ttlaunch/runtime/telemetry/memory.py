"""What a rank's tensors take in one step, by what they are for, and the most of it at any moment.

What counts is the memory that tensors really have: views of one piece count once, and a piece counts from the operation that
makes it until the last that needs it has let go, autograd included. Memory within an operation, and that of the process
besides tensors, is not seen. Looking on takes some microseconds for each operation and each live tensor, so it is done in
one step of a run that asks for it.

Source: the way of torch.distributed._tools.mem_tracker, in which modules and torch's own optimizers must be registered;
    this one asks what is there when the step begins.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, ACTIVATIONS = KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "activations",
)
"""What tensors are for. Buffers are all others that are there when the step begins; activations all that it makes."""


class StepMemory:
    """Looks on while a block runs; one block.

    Attributes:
        peaks: The most bytes of each kind at any moment, and of all together: `peak`.
    """

    def __init__(self) -> None:
        self.peaks = dict.fromkeys((*KINDS, "peak"), 0)
        self._kinds: dict[int, str] = {}  # by a piece's address, as long as it lives
        self._live: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._looking = ExitStack()

    def __enter__(self) -> Self:
        """Begin with what is there."""
        for kind, tensor in _tensors_at_rest():
            self._see(tensor, kind)
        self._count()
        self._looking.enter_context(_Operations(self._look_at))
        return self

    def __exit__(self, *_: object) -> None:
        self._looking.close()

    def _look_at(self, found: Any) -> None:
        """Take in what an operation has returned."""
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._see(tensor, ACTIVATIONS)
        self._count()

    def _see(self, tensor: Tensor, kind: str) -> None:
        for storage in _storages(tensor):
            if storage._cdata not in self._live:  # noqa: SLF001  its address, which `data_ptr` is not while it is empty
                self._live[storage._cdata] = storage  # noqa: SLF001
                self._kinds[storage._cdata] = kind  # noqa: SLF001

    def _count(self) -> None:
        """Ask every live piece, since FSDP takes memory away from one and gives it back without an operation."""
        now = dict.fromkeys(self.peaks, 0)
        for address, storage in self._live.items():
            now[self._kinds[address]] += storage.nbytes()
        now["peak"] = sum(now.values())
        self.peaks = {kind: max(most, now[kind]) for kind, most in self.peaks.items()}


class _Operations(TorchDispatchMode):
    """Shows what every operation of torch's returns while it is entered."""

    def __init__(self, show: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self._show = show

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self._show(found)
        return found


def _tensors_at_rest() -> Iterator[tuple[str, Tensor]]:
    """All tensors of the process with what they are for: first those that say it of themselves."""
    from ttlaunch.runtime.training.optimizers import Optimizer  # noqa: PLC0415  which writes into the books

    alive = [one for one in gc.get_objects() if issubclass(type(one), (Tensor, Optimizer))]
    tensors: list[Tensor] = [one for one in alive if issubclass(type(one), Tensor)]
    yield from ((PARAMETERS, one) for one in tensors if issubclass(type(one), nn.Parameter))
    yield from ((GRADIENTS, one.grad) for one in tensors if one.is_leaf and one.grad is not None)
    for optimizer in (one for one in alive if isinstance(one, Optimizer)):
        yield from ((OPTIMIZER, tensor) for _, tensor in optimizer.named_state())
    yield from ((BUFFERS, one) for one in tensors)


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor; of one that is made of others, such as torch's DTensor, theirs."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # and not the mesh of ranks
                yield from _storages(part)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
