"""Measures the memory of a rank's tensors in one step, by purpose (weights, gradients, …), with the peak of each.

It counts the storages of tensors: views of one storage count once, and a storage counts from the operation that allocates it until
it is freed, also while only autograd holds it. It does not see memory within an operation, or memory of the process outside
tensors. Measuring takes some microseconds for each operation and each live tensor, so it is done in only one step, and only if the
run was started with this option.

Models and optimizers register with `TensorOwners` and are asked for their tensors when the step begins. Other
memory that existed before the step is found when an operation uses it, if it still exists at the end of the step.

Source: torch.distributed._tools.mem_tracker, in which modules and torch's own optimizers are registered in the same
    way.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any, Self, TypeVar

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
"""What tensors are for. Buffers are all others that were there when the step began and that it uses; activations all that it
makes."""

Owner = TypeVar("Owner")

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
"""The first operation that sees a tensor made by `torch.tensor([...])`, whose memory came without one."""


class TensorOwners:
    """The models and optimizers that hold tensors from step to step: they register, and are forgotten with their end."""

    def __init__(self) -> None:
        self._owners: weakref.WeakKeyDictionary[Any, Callable[[Any], Iterable[tuple[str, Tensor]]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, owner: Owner, tensors: Callable[[Owner], Iterable[tuple[str, Tensor]]]) -> None:
        """Register an owner.

        Args:
            owner: Is not kept alive by this.
            tensors: Gives the kind of each of its tensors, and the tensor; a function or a method of the class, since a
                bound method would keep its owner alive.
        """
        self._owners[owner] = tensors

    def tensors(self) -> list[tuple[str, Tensor]]:
        """What all owners hold now, by kind: memory that two of them name counts as the first of its kinds."""
        held = [one for owner, tensors in self._owners.items() for one in tensors(owner)]
        return sorted(held, key=lambda one: KINDS.index(one[0]))


def tensors_of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's parameters and their gradients."""
    for parameter in model.parameters():
        yield PARAMETERS, parameter
        if parameter.grad is not None:
            yield GRADIENTS, parameter.grad


class StepMemory:
    """Measures memory while a block runs; for one block only.

    Attributes:
        peaks: When the block is over, the most bytes of each kind at any moment, and of all together: `peak`.
        held: The bytes of each kind that owners held when the block began.
        extent: The most bytes of all kinds together where the memory of pieces smaller than `mapped_from` stays with the process when
            they are freed: the most of large pieces at one moment and the most of small ones.
        left: The same at the end, when the large pieces of the step are gone.
        small: The most of small pieces.
    """

    def __init__(self, owners: TensorOwners, *, mapped_from: int = 0) -> None:
        self._owners = owners
        self._mapped_from = mapped_from
        self.extent = self.left = self.small = 0
        self._small: list[int] = []  # bytes at each moment, without those of unknown origin that are seen later
        self.peaks = dict.fromkeys((*KINDS, "peak"), 0)
        self.held = dict.fromkeys(KINDS, 0)
        self._kinds: dict[
            int, str
        ] = {}  # by a piece's address, as long as it lives; of one of unknown origin its number
        self._live: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._moments: list[dict[str, int]] = []  # bytes by kind, and by number of each piece of unknown origin
        self._unknown = count()
        self._looking = ExitStack()

    def __enter__(self) -> Self:
        """Begin with what the owners hold."""
        for kind, tensor in self._owners.tensors():
            for storage in _storages(tensor):
                self._see(storage, kind)
        self._count()
        self.held = dict(self._moments[0])
        self._looking.enter_context(_Operations(self._look_before, self._look_after))
        return self

    def __exit__(self, *_: object) -> None:
        self._looking.close()
        self._settle()

    def _look_before(self, used: Any) -> None:
        """Note the memory that an operation is about to use; memory seen first here has no owner, and no operation of the step made it."""
        for storage in _storages_in(used):
            # Memory that numpy made, such as that of a micro-batch, cannot be resized; it is not counted, like all memory
            # that is not torch's.
            if storage.resizable() and storage._cdata not in self._live:  # noqa: SLF001
                self._see(storage, f"unknown {next(self._unknown)}")

    def _look_after(self, found: Any) -> None:
        """Note the memory that an operation has returned."""
        for storage in _storages_in(found):
            self._see(storage, ACTIVATIONS)
        self._count()

    def _see(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Note a storage as of this kind, unless it is known."""
        address = storage._cdata  # noqa: SLF001  which it keeps, while `data_ptr` is 0 as long as it is empty
        has_memory = storage.device.type != "meta"
        if has_memory and address not in self._live:
            self._live[address] = storage
            self._kinds[address] = kind

    def _count(self) -> None:
        """Read the size of every live storage, because FSDP frees the memory of one and allocates it again without an operation."""
        now = dict.fromkeys(KINDS, 0)
        for address, storage in self._live.items():
            kind = self._kinds[address]
            now[kind] = now.get(kind, 0) + storage.nbytes()
        self._moments.append(now)
        sizes = [storage.nbytes() for storage in self._live.values()] if self._mapped_from else []
        self._small.append(sum(size for size in sizes if size < self._mapped_from))

    def _settle(self) -> None:
        """Decide what memory of unknown origin was, and find the peaks.

        What has outlived the step was there when it began: a buffer, and one at every moment. What has not is memory
        that torch made out of sight, within an operation such as FSDP's gathering: activations, from when it was seen.
        """
        last = {self._kinds[address]: storage.nbytes() for address, storage in self._live.items()}
        buffers = {kind: size for kind, size in last.items() if kind not in KINDS}
        large = small = left = 0
        for moment, seen in zip(self._moments, self._small, strict=True):
            made = sum(size for kind, size in moment.items() if kind not in KINDS and kind not in buffers)
            now = {kind: moment[kind] for kind in KINDS}
            now[ACTIVATIONS] += made
            now[BUFFERS] += sum(moment.get(kind, size) for kind, size in buffers.items())
            now["peak"] = sum(now.values())
            self.peaks = {kind: max(most, now[kind]) for kind, most in self.peaks.items()}
            unseen = (size for kind, size in buffers.items() if kind not in moment)
            small_now = seen + sum(size for size in unseen if size < self._mapped_from)
            left = now["peak"] - small_now
            large, small = max(large, left), max(small, small_now)
        self.extent, self.left, self.small = large + small, left + small, small
        self._moments.clear()
        self._small.clear()


class _Operations(TorchDispatchMode):
    """Shows what every operation of torch's uses and returns while it is entered."""

    def __init__(self, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self._before = before
        self._after = after

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not _LIFT_FRESH:
            self._before((args, kwargs))
        found = func(*args, **(kwargs or {}))
        self._after(found)
        return found


def _storages_in(values: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor):
            yield from _storages(tensor)


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor; of one that is made of others, such as torch's DTensor, theirs."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # and not the mesh of ranks
                yield from _storages(part)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
