"""Wraps the functions of `torch.distributed`, so that the rank's flight recorder has each call: operation, group, bytes, line.

An operation in the background (`async_op=True`, `isend`) is entered when it begins, and again when the script waits for it. Inside
the wrappers, the functions of torch run as they are, with the same arguments and results.
"""

from __future__ import annotations

import functools
import inspect
from functools import partial

from ttlaunch.flight_recorder import (
    ANY,
    BEGUN_COLLECTIVE,
    COLLECTIVE,
    IRECV,
    ISEND,
    RECV,
    SEND,
    WAIT_RECV,
    WAIT_SEND,
    WORLD,
)

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

    from ttlaunch.torch_hooks.group_records import GroupRecords

_SIZED = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "all_gather_single": "output_tensor",
    "all_gather_into_tensor": "output_tensor",
    "_all_gather_base": "output_tensor",
    "reduce_scatter_single": "input",
    "reduce_scatter_tensor": "input",
    "_reduce_scatter_base": "input",
}
"""Collectives in which all ranks pass a tensor of the same size, and that parameter."""

_UNSIZED = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_object",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast_object_list",
    "gather_object",
    "monitored_barrier",
    "reduce_scatter",
    "scatter_object_list",
)
_MESSAGES = {
    "send": (SEND, WAIT_SEND, "dst"),
    "isend": (ISEND, WAIT_SEND, "dst"),
    "recv": (RECV, WAIT_RECV, "src"),
    "irecv": (IRECV, WAIT_RECV, "src"),
}
_NEW_GROUPS = ("new_group", "split_group")


def wrap_collectives(
    c10d: ModuleType, records: GroupRecords, *, joining: Callable[[], None], joined: Callable[[], None]
) -> None:
    """Put wrappers in place of the functions of `torch.distributed.distributed_c10d`, and of the waits for their works.

    Args:
        joining, joined: Called before and after the process joins the group of all ranks.
    """
    for name in (*_SIZED, *_UNSIZED):
        _replace(c10d, name, partial(_collective, records=records, size_of=_SIZED.get(name)))
    for name, kind in _MESSAGES.items():
        _replace(c10d, name, partial(_message, records=records, c10d=c10d, kind=kind))
    for name in _NEW_GROUPS:
        _replace(c10d, name, partial(_new_group, records=records, c10d=c10d))
    _replace(c10d, "init_process_group", partial(_init, records=records, c10d=c10d, joining=joining, joined=joined))
    _replace(c10d, "destroy_process_group", partial(_destroy, records=records))
    if hasattr(c10d, "Work"):
        _replace(c10d.Work, "wait", partial(_wait, records=records))


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function = getattr(owner, name, None)
    if callable(function):
        setattr(owner, name, wrap(function))


def _collective(function: Callable[..., Any], *, records: GroupRecords, size_of: str | None) -> Callable[..., Any]:
    """Wrap a collective function of all ranks of a group."""
    label = f"torch's {function.__name__.lstrip('_')}", None
    group_of, is_async, tensor_of = (_argument(function, name) for name in ("group", "async_op", size_of or ""))

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not records.records_now():
            return function(*args, **kwargs)
        tag = records.tag_of(group_of(args, kwargs))
        if tag is None:
            return function(*args, **kwargs)
        in_background = is_async(args, kwargs)
        size = getattr(tensor_of(args, kwargs), "nbytes", 0) if size_of else 0
        verb = BEGUN_COLLECTIVE if in_background else COLLECTIVE
        offset = records.begin(verb, label, tag=tag, size=size)
        result = _called(function, args, kwargs, records=records, offset=offset)
        if in_background:
            records.watch_work(result, offset)
        else:
            records.end(offset)
        return result

    return recorded


def _called(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, records: GroupRecords, offset: int
) -> Any:
    """Call a function of torch as the outermost one; if it raises, its entry stays open."""
    records.enter()
    try:
        result = function(*args, **kwargs)
    except BaseException:
        records.leave(broken=offset)
        raise
    records.leave()
    return result


def _message(
    function: Callable[..., Any], *, records: GroupRecords, c10d: ModuleType, kind: tuple[int, int, str]
) -> Callable[..., Any]:
    """Wrap a function that sends to one rank or receives from one."""
    verb, wait_verb, end = kind
    label = f"torch's {function.__name__}", None
    names = ("tensor", "group", "tag", end, f"group_{end}")
    tensor_of, group_of, tag_of, peer_of, group_peer_of = (_argument(function, name) for name in names)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not records.records_now():
            return function(*args, **kwargs)
        peer, inner = peer_of(args, kwargs), group_peer_of(args, kwargs)
        if peer is None and inner is not None:
            group = group_of(args, kwargs)
            peer = inner if group is None else c10d.get_global_rank(group, inner)
        peer, tag = ANY if peer is None else int(peer), int(tag_of(args, kwargs) or 0)
        size = getattr(tensor_of(args, kwargs), "nbytes", 0)
        offset = records.begin(verb, label, peer=peer, tag=tag, size=size)
        number = records.message
        result = _called(function, args, kwargs, records=records, offset=offset)
        records.end(offset)
        if verb in (ISEND, IRECV) and result is not None:

            def begin_wait() -> int:
                return records.begin(wait_verb, label, peer=peer, tag=tag, size=size, message=number)

            records.watch_work(result, offset, begin_wait=begin_wait)
        return result

    return recorded


def _init(
    function: Callable[..., Any],
    *,
    records: GroupRecords,
    c10d: ModuleType,
    joining: Callable[[], None],
    joined: Callable[[], None],
) -> Callable[..., Any]:
    """Wrap `init_process_group`: the recorder begins with it."""

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        try:
            records.open()
        except OSError:  # no room for the recorder
            records.close()
        joining()
        label = "torch's init_process_group", None
        offset = records.begin(COLLECTIVE, label, tag=WORLD) if records.is_open else 0
        result = _called(function, args, kwargs, records=records, offset=offset)
        records.end(offset)
        if not records.is_world(c10d.get_rank(), c10d.get_world_size()):
            records.close()
        elif c10d.group.WORLD is not None:
            records.join(c10d.group.WORLD, range(c10d.get_world_size()))
        joined()
        return result

    return recorded


def _new_group(function: Callable[..., Any], *, records: GroupRecords, c10d: ModuleType) -> Callable[..., Any]:
    """Wrap a function that makes a group; all ranks call it, unless it says that only the group's own do."""
    label = f"torch's {function.__name__}", None
    is_local = _argument(function, "use_local_synchronization")

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not records.records_now():
            return function(*args, **kwargs)
        by_all = function.__name__ == "new_group" and not is_local(args, kwargs)
        offset = records.begin(COLLECTIVE, label, tag=WORLD) if by_all else 0
        result = _called(function, args, kwargs, records=records, offset=offset)
        records.end(offset)
        if result is not None and result != c10d.GroupMember.NON_GROUP_MEMBER:
            records.join(result, c10d.get_process_group_ranks(result))
        return result

    return recorded


def _destroy(function: Callable[..., Any], *, records: GroupRecords) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(group: Any = None) -> Any:
        if group is None:
            records.forget_groups()
        return function(group)

    return recorded


def _wait(function: Callable[..., Any], *, records: GroupRecords) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(work: Any, *args: Any, **kwargs: Any) -> Any:
        offset = records.begin_waiting_for(work)
        result = function(work, *args, **kwargs)
        records.end(offset)
        return result

    return recorded


def _argument(function: Callable[..., Any], name: str) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """Return what finds an argument of a call by the name of its parameter; None for one that is not passed."""
    names = list(inspect.signature(function).parameters)
    if name not in names:
        return lambda _args, _kwargs: None
    at = names.index(name)

    def argument(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return args[at] if len(args) > at else kwargs.get(name)

    return argument
