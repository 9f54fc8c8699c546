"""Reports a rank that trains without the other ranks: it has run a backward pass, and its process has joined no group of torch."""

from __future__ import annotations

import functools
import os
import sys
import time

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


class TrainingRecords:
    """Appends to the progress of a rank that it trains alone, and that it has joined the others after all."""

    def __init__(self, run_folder: str, *, rank: int, world_size: int) -> None:
        self._path = os.path.join(run_folder, contract.progress_file(rank))
        self._world_size = world_size
        self._pid = os.getpid()
        self._is_alone = False

    def trains(self) -> None:
        """Record that the rank begins its first backward pass, if it has joined no group."""
        if self._world_size > 1 and os.getpid() == self._pid and not _has_joined():
            self._is_alone = True
            self._append(contract.KIND_TRAINS_ALONE)

    def joined(self) -> None:
        """Record that a rank that trained alone has joined a group."""
        if self._is_alone and _has_joined():
            self._is_alone = False
            self._append(contract.KIND_JOINED_GROUP)

    def _append(self, kind: str) -> None:
        line = contract.record_line({"kind": kind, "time": time.time()}).encode()
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError:  # a full disk
            return


def _has_joined() -> bool:
    """Whether this process is in a group of several ranks, or in torch's framework for remote calls."""
    c10d, rpc = sys.modules.get("torch.distributed.distributed_c10d"), sys.modules.get("torch.distributed.rpc.api")
    is_in_group = c10d is not None and c10d.is_initialized() and c10d.get_world_size() > 1
    return bool(is_in_group or (rpc is not None and rpc._is_current_rpc_agent_set()))  # noqa: SLF001


def watch_backward(autograd: ModuleType, records: TrainingRecords) -> None:
    """Wrap `torch.autograd.backward`, which every `loss.backward()` calls, until its first call."""
    backward: Callable[..., Any] = autograd.backward

    @functools.wraps(backward)
    def first(*args: Any, **kwargs: Any) -> Any:
        if autograd.backward is first:
            autograd.backward = backward  # type: ignore[attr-defined]  # later passes cost nothing
            try:
                records.trains()
            except Exception as error:  # noqa: BLE001 - a torch without these functions trains as well
                print(f"ttlaunch: cannot tell whether this rank trains alone: {error!r}", file=sys.stderr)
        return backward(*args, **kwargs)

    autograd.backward = first  # type: ignore[attr-defined]
