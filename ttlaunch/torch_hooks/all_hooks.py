"""Lists which hook belongs to which module of torch."""

from __future__ import annotations

import os

from ttlaunch import contract
from ttlaunch.torch_hooks.alone import TrainingRecords, watch_backward
from ttlaunch.torch_hooks.collectives import wrap_collectives
from ttlaunch.torch_hooks.data_parallel import wrap_data_parallel
from ttlaunch.torch_hooks.group_records import GroupRecords
from ttlaunch.torch_hooks.store import bind_store

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def make_hooks(environment: Mapping[str, str]) -> dict[str, Callable[[Any], None]]:
    """Return what to call when the import of torch begins, and with each of its modules; nothing in a process that is no rank of a run.

    `environment` has the variables of the rank.
    """
    scratch = environment.get(contract.ENV_SCRATCH)
    rank, world_size = environment.get(contract.ENV_RANK, ""), environment.get(contract.ENV_WORLD_SIZE, "")
    if not scratch or not rank.isdigit() or not world_size.isdigit():
        return {}
    records = GroupRecords(scratch, rank=int(rank), world_size=int(world_size))
    run_folder = environment.get(contract.ENV_RUN_DIR, scratch)
    trainings = TrainingRecords(run_folder, rank=int(rank), world_size=int(world_size))
    os.register_at_fork(
        after_in_child=records.close
    )  # the recorder is the rank's, not that of processes which it forks
    return {
        "import torch": lambda _: trainings.importing_torch(),
        "torch.autograd": lambda module: watch_backward(module, trainings),
        "torch.distributed.rendezvous": bind_store,
        "torch.distributed.distributed_c10d": lambda module: wrap_collectives(
            module, records, joining=trainings.joining, joined=trainings.joined
        ),
        "torch.nn.parallel.distributed": lambda module: wrap_data_parallel(module, records),
        "torch": lambda _: trainings.imported_torch(),
    }
