"""Torch's own data parallelism around a model, which `reduction: fast` uses; in a timeline its all-reduces have a name."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ttlaunch.runtime.context import RankContext


def replicate(ctx: RankContext, model: nn.Module) -> DistributedDataParallel:
    """Wrap a model so that every backward pass averages its gradients over the ranks of torch's process group.

    Args:
        ctx: The rank; only where it traces, its all-reduces go through a hook that notes when they began and ended.
        model: Equal on all ranks.
    """
    replica = DistributedDataParallel(model)
    trace = ctx.ledger.trace
    if trace is None:
        return replica
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (  # noqa: PLC0415  it imports a lot
        allreduce_hook,
    )

    def traced(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]  # torch re-exports it without saying so
        began, facts = time.monotonic_ns(), {"bucket": bucket.index(), "bytes": bucket.buffer().nbytes}

        def note(done: torch.futures.Future[Tensor]) -> Tensor:
            trace.span("all_reduce (torch)", "collective", began, time.monotonic_ns(), **facts)
            return done.value()

        return allreduce_hook(state, bucket).then(note)

    replica.register_comm_hook(None, traced)
    return replica
