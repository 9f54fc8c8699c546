"""A script with DistributedDataParallel over gloo for `benchmarks/attribution.py`; `fault.json` says which rank breaks when."""

import torch
import torch.distributed as dist
from faults import break_if_due, clean_up, skips_backward
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_STEPS = 40


def main() -> None:
    """Train a small model, and break where it was ordered."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    replica = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    try:
        for step in range(1, _STEPS + 1):
            loss = replica(torch.ones(4, 64)).square().mean()
            break_if_due(rank=rank, role="rank", step=step)
            if not skips_backward(rank=rank, step=step):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    finally:
        # torch 2.13 can hang for ever if DistributedDataParallel is the last to let go of a gloo group, whatever starts the ranks.
        replica = optimizer = loss = None


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
        clean_up()
