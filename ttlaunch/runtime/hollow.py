"""Tensors without values: a rank runs its own code and allocates what it always allocates, and computes nothing.

While `Hollow` is entered, an operation on floating-point numbers of up to 32 bits returns tensors of the right sizes and leaves their
memory untouched. Memory that nobody touches takes no pages, so a model of any size fits. Whole numbers, 64-bit numbers and views are
computed as usual, because ranks read them: counts of tokens, headers of messages, sums of losses.

A number without a value that a rank reads, such as a loss or a norm, is 0.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

_WITHOUT_VALUES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_SMALL = 1024
"""Results with at most so many values are cleared, because a rank may read them; larger ones are only sent and added up."""

_READS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default})  # noqa: SLF001
_EQUAL = torch.ops.aten.equal.default


Found = tuple[list[Any], Any]
"""What an operation returns: shapes, or values that are no tensors, and how they are nested."""


def has_values(tensor: Tensor) -> bool:
    """Whether operations on a tensor compute anything while `Hollow` is entered."""
    return tensor.dtype not in _WITHOUT_VALUES


@dataclass(frozen=True)
class _Shape:
    """A tensor that an operation returns.

    Attributes:
        argument: The place of the argument whose memory it shares; None: it has memory of its own.
        is_same: Whether it is that argument itself, as with operations in place.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    argument: int | None
    is_same: bool

    def made(self, leaves: Sequence[Any]) -> Tensor:
        """Return the tensor, or allocate it; whole numbers, which may be places in other tensors, are 0."""
        if self.argument is not None:
            argument: Tensor = leaves[self.argument]
            return argument if self.is_same else argument.as_strided(self.size, self.stride, self.offset)
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        return made.zero_() if made.numel() <= _SMALL or has_values(made) else made


class Hollow(TorchDispatchMode):
    """Run operations of torch in this thread without arithmetic on floating-point tensors while it is entered.

    Raises:
        torch._subclasses.fake_tensor.DynamicOutputShapeException, DataDependentOutputException: What an operation returns
            depends on values that are not there.
    """

    def __init__(
        self,
        *,
        known: dict[Hashable, Found] | None = None,
        spend: Callable[..., object] | None = None,
    ) -> None:
        """Make the mode.

        Args:
            known: What operations have returned, which ranks that run one at a time may share; None: nothing yet.
            spend: Called for each operation that is not computed, with its arguments and, as `out`, what it returns; they have sizes only.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self._shapes = FakeTensorMode()
        self._spend = spend
        self._known: dict[Hashable, Found] = {} if known is None else known

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out a wrapper around each operation that is for `torch.compile`, which no rank without values uses."""
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.is_view or func in _READS:
            return func(*args, **(kwargs or {}))
        leaves, form_of_arguments = _leaves(args, kwargs or {})
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        if tensors and all(map(has_values, tensors)):
            return func(*args, **(kwargs or {}))
        if not func._schema.returns:  # noqa: SLF001  it would only change values of its arguments
            if self._spend is not None:
                self._spend(func, args, kwargs or {}, out=None)
            return None
        if func is _EQUAL:
            return True
        key = (func, form_of_arguments, tuple(map(_key, leaves)))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._run(func, *tree_flatten((args, dict(kwargs or {}))))
        shapes, form = known
        if not tensors and all(one.dtype not in _WITHOUT_VALUES for one in shapes if isinstance(one, _Shape)):
            return func(*args, **(kwargs or {}))  # such as `arange`
        made = tree_unflatten([one.made(leaves) if isinstance(one, _Shape) else one for one in shapes], form)
        if self._spend is not None:
            self._spend(func, args, kwargs or {}, out=made)
        return made

    def _run(self, func: Any, leaves: Sequence[Any], tree: Any) -> Found:
        """Find what an operation returns: each tensor's shape, and how they are nested."""
        with self._shapes:
            places: dict[int, int] = {}
            stand_ins: dict[int, Tensor] = {}
            given = list(leaves)
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    if id(leaf) not in stand_ins:  # a tensor given twice is one
                        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
                        stand_ins[id(leaf)] = made
                        places[made.untyped_storage()._cdata] = place  # noqa: SLF001
                    given[place] = stand_ins[id(leaf)]
            args, kwargs = tree_unflatten(given, tree)
            found, form = tree_flatten(func(*args, **kwargs))
        return [_shape(one, given, places) if isinstance(one, Tensor) else one for one in found], form


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Hashable]:
    """Return what `tree_flatten` returns, in the same order, for arguments of torch's operations, where lists have no lists in them: much faster."""
    leaves: list[Any] = []
    lengths: list[int] = []
    for one in (*args, *kwargs.values()):
        if isinstance(one, list | tuple):
            leaves += one
            lengths.append(len(one))
        else:
            leaves.append(one)
            lengths.append(-1)
    return leaves, (tuple(lengths), tuple(kwargs))


def _key(leaf: Any) -> Hashable:
    """Return what the shapes of results depend on; the offset is that of what shares an argument's memory."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.storage_offset()
    if isinstance(leaf, torch.Generator):  # every rank that draws its weights makes its own
        return torch.Generator
    return (type(leaf), leaf) if isinstance(leaf, Hashable) else id(leaf)


def _shape(tensor: Tensor, given: Sequence[Any], places: Mapping[int, int]) -> _Shape:
    place = places.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
    is_same = place is not None and tensor is given[place]
    return _Shape(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, place, is_same)
