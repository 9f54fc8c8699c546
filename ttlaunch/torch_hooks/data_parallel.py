"""Enters the backward passes of `DistributedDataParallel` into the flight recorder: its all-reduces leave torch unseen by Python.

A communication hook would see each bucket. But torch divides by the number of ranks while it copies a gradient into its bucket, and
with any hook it does not: the hook would have to divide in another pass over all gradients, which costs time, and it would have
to divide as torch does in every case, or the bits differ. So one operation stands here for all buckets of a pass: it begins
with the backward pass, becomes a wait when the pass has computed all gradients, and ends when all buckets have arrived. The
script's own communication hook works as ever.
"""

from __future__ import annotations

import functools
import sys
import weakref

from ttlaunch.flight_recorder import BEGUN_COLLECTIVE, COLLECTIVE, DATA_PARALLEL_START, WORLD

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

    from ttlaunch.flight_recorder_writer import Place
    from ttlaunch.torch_hooks.group_records import GroupRecords

BACKWARD = "DistributedDataParallel's backward pass"
_BUFFERS = "DistributedDataParallel's broadcast of buffers"
_MOST_OUTPUTS, _DEEPEST = 16, 4


class _Replica:
    """What is known of one replica.

    Attributes:
        size: The bytes of its gradients.
        forward: The line of a forward pass that no backward pass has followed yet; None if there is none.
    """

    __slots__ = ("forward", "is_pending", "size")

    def __init__(self, module: Any) -> None:
        self.size = sum(one.nbytes for one in module.parameters() if one.requires_grad)
        self.forward: Place | None = None
        self.is_pending = False


def wrap_data_parallel(module: ModuleType, records: GroupRecords) -> None:
    """Wrap the methods of `torch.nn.parallel.distributed.DistributedDataParallel` in which ranks wait for each other."""
    kind = module.DistributedDataParallel
    torch = sys.modules["torch"]
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
    known: weakref.WeakKeyDictionary[Any, _Replica] = weakref.WeakKeyDictionary()

    def leaves(replica: Any, output: Any) -> None:
        """The forward pass ends: have the backward pass entered that begins at its results."""
        state = known.get(replica)
        if state is None:
            state = known[replica] = _Replica(replica)
        if state.is_pending:
            records.skipped(BACKWARD, state.forward)
        state.is_pending, state.forward = True, records.place()
        tag = records.tag_of(replica.process_group)
        begins = functools.partial(_begin_backward, state, records=records, tag=WORLD if tag is None else tag)
        for tensor in _tensors(output, torch.Tensor):
            tensor.register_hook(lambda _, begins=begins: begins(engine.queue_callback))

    post_forward = kind._post_forward  # noqa: SLF001

    @functools.wraps(post_forward)
    def ends_forward(replica: Any, output: Any) -> Any:
        output = post_forward(replica, output)
        if records.is_open and torch.is_grad_enabled() and replica.require_backward_grad_sync:
            try:
                leaves(replica, output)
            except Exception:  # noqa: BLE001 - such as a result of an unknown kind; the script goes on without records
                records.close()
        return output

    kind._post_forward = ends_forward  # noqa: SLF001
    kind.__init__ = _meeting(kind.__init__, records, DATA_PARALLEL_START)
    kind._sync_buffers = _meeting(kind._sync_buffers, records, _BUFFERS)  # noqa: SLF001


def _begin_backward(
    state: _Replica, queue_callback: Callable[[Callable[[], None]], None], *, records: GroupRecords, tag: int
) -> None:
    """Enter that a backward pass has begun; called by autograd, for each result of the forward pass."""
    if not state.is_pending:
        return
    state.is_pending = False
    offset = records.begin(BEGUN_COLLECTIVE, (BACKWARD, None), tag=tag, size=state.size)

    def computed() -> None:
        records.begin_wait(offset)
        queue_callback(lambda: records.end(offset))

    # Autograd calls these when all gradients are computed, in this order: ours, torch's wait for the buckets, ours.
    queue_callback(computed)


def _meeting(function: Callable[..., Any], records: GroupRecords, name: str) -> Callable[..., Any]:
    """Wrap a method in which all ranks of a replica's group wait for each other."""

    @functools.wraps(function)
    def recorded(replica: Any, *args: Any, **kwargs: Any) -> Any:
        if not records.records_now():
            return function(replica, *args, **kwargs)
        group = kwargs.get("process_group") or replica.__dict__.get("process_group")
        tag = records.tag_of(group)
        offset = records.begin(COLLECTIVE, (name, None), tag=WORLD if tag is None else tag)
        records.enter()
        try:
            result = function(replica, *args, **kwargs)
        except BaseException:
            records.leave(broken=offset)
            raise
        records.leave()
        records.end(offset)
        return result

    return recorded


def _tensors(value: Any, kind: type, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors of a forward pass's result through which a backward pass can begin, as far as they are easily found."""
    if isinstance(value, kind):
        if value.grad_fn is not None:  # type: ignore[attr-defined]
            yield value
    elif depth < _DEEPEST:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for part in list(parts)[:_MOST_OUTPUTS]:
            yield from _tensors(part, kind, depth + 1)
