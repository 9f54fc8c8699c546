"""Reports how far a rank of a script has come with its start, and a rank that trains without the other ranks.

The latter has run a backward pass, and its process has joined no group of torch.
"""

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
    """Appends to the progress of a rank which stage of its start it begins, that it trains alone, and that it has joined after all."""

    def __init__(self, run_folder: str, *, rank: int, world_size: int) -> None:
        self._path = os.path.join(run_folder, contract.progress_file(rank))
        self._world_size = world_size
        self._pid = os.getpid()
        self._is_alone = False
        self._is_starting = True

    def importing_torch(self) -> None:
        """Record that the rank begins to import torch, which takes seconds in which it says nothing."""
        self._begin(contract.START_STAGES[2])

    def imported_torch(self) -> None:
        """Record that the rank has torch, from its own import or that of a warm process."""
        self._begin(contract.STAGE_SETTING_UP)

    def joining(self) -> None:
        """Record that the rank begins to join a group."""
        self._begin(contract.START_STAGES[0])

    def trains(self) -> None:
        """Record that the rank begins its first backward pass, and whether it has joined no group."""
        self._begin(contract.STAGE_FIRST_PASS)
        self._is_starting = False
        if self._world_size > 1 and os.getpid() == self._pid and not _has_joined():
            self._is_alone = True
            self._append(contract.KIND_TRAINS_ALONE)

    def joined(self) -> None:
        """Record that the rank has joined a group, also if it trained alone before."""
        self._begin(contract.STAGE_SETTING_UP)
        if self._is_alone and _has_joined():
            self._is_alone = False
            self._append(contract.KIND_JOINED_GROUP)

    def _begin(self, stage: str) -> None:
        # The recorder knows what follows the first pass; processes that the rank forks are no ranks.
        if self._is_starting and os.getpid() == self._pid:
            self._append(contract.KIND_STARTING, stage=stage)

    def _append(self, kind: str, **values: str) -> None:
        contract.append_progress(self._path, {"kind": kind, "time": time.time(), **values})


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
