"""What the hooks in a plain PyTorch script cost a rank: `PYTHONPATH=. python benchmarks/torch_hooks.py [--step-ms MS]`.

A group of one rank calls functions of torch with and without the hooks, in turns; the difference in processor time of this thread, medians over the
rounds, is what a call costs in isolation. The script `benchmarks/plain_ddp/train.py` makes two recorded calls in each step, a backward pass of
DistributedDataParallel and an all-reduce. To be met: their cost together is at most 1 % of a step's time without hooks, as two ranks
under torchrun take it; `--step-ms` gives this time, if it has been measured.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from plain_ddp import _with_torchrun
from torch.nn.parallel import DistributedDataParallel, distributed

from ttlaunch.torch_hooks.collectives import wrap_collectives
from ttlaunch.torch_hooks.data_parallel import wrap_data_parallel
from ttlaunch.torch_hooks.group_records import GroupRecords

ROUNDS, CALLS, LIMIT = 41, 200, 0.01


def main() -> int:
    """Print what each call costs, and the share of a step; status 1 if the limit is missed."""
    parser = argparse.ArgumentParser(description="Measure the hooks in plain PyTorch scripts.")
    parser.add_argument("--step-ms", type=float)
    step_ms = parser.parse_args().step_ms or _with_torchrun() * 1e3
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="ttl-box-", dir="/dev/shm") as scratch:
        records = GroupRecords(scratch, rank=0, world_size=1)
        records.open()
        tensor = torch.zeros(4)
        # The function itself does nothing here: what it takes varies by more than the hook adds.
        plain = SimpleNamespace(all_reduce=_nothing)
        hooked = SimpleNamespace(all_reduce=_nothing)
        wrap_collectives(hooked, records)  # type: ignore[arg-type]
        reduce_us = _median(lambda: hooked.all_reduce(tensor)) - _median(lambda: plain.all_reduce(tensor))
        replica = DistributedDataParallel(torch.nn.Linear(4, 4))
        wrap_data_parallel(distributed, records)
        backward_us = _added(records, lambda: replica(tensor).sum().backward())
    share = (reduce_us + backward_us) / 1e3 / step_ms
    verdict = "met" if share <= LIMIT else "MISSED"
    print(f"load {os.getloadavg()[0]:.1f}; a step without hooks {step_ms:.1f} ms")
    print(f"all_reduce           {reduce_us:8.2f} µs")
    print(f"DDP's backward pass  {backward_us:8.2f} µs")
    print(f"share of a step      {share:8.3%}   (at most {LIMIT:.0%}: {verdict})")
    return 0 if share <= LIMIT else 1


def _nothing(tensor, op=None, group=None, async_op=False) -> None:  # noqa: ANN001, ARG001, FBT002  torch's parameters
    return None


def _added(records: GroupRecords, act) -> float:  # noqa: ANN001  a pass
    """Return what the records add to an act; rounds with and without them take turns."""
    added = []
    for _ in range(ROUNDS):
        records.close()
        before = _time_us(act)
        records.open()
        added.append(_time_us(act) - before)
    return statistics.median(added)


def _median(act) -> float:  # noqa: ANN001  a call
    return statistics.median(_time_us(act) for _ in range(ROUNDS))


def _time_us(act) -> float:  # noqa: ANN001  likewise
    began = time.thread_time()
    for _ in range(CALLS):
        act()
    return (time.thread_time() - began) / CALLS * 1e6


if __name__ == "__main__":
    sys.exit(main())
