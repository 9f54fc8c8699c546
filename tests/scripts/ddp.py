"""DistributedDataParallel, as a user of torchrun writes it.

`--bad-rank R` has one rank meet a bad sample, `--folder F` keeps a checkpoint of each epoch and goes on from it without one.
"""

import argparse
import pathlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset):
    def __init__(self, bad):
        self.bad = bad
        self.x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"sample {index} is corrupt")
        return self.x[index], self.x[index].square().sum(0, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad-rank", type=int)
    parser.add_argument("--folder", type=pathlib.Path)
    given = parser.parse_args()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept = given.folder / "epoch-0.pt" if given.folder else None
    resumed = kept is not None and kept.exists()
    if resumed:
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    data = Squares(range(40, 44) if rank == given.bad_rank and not resumed else ())
    losses = []
    for epoch in range(int(resumed), 2):
        samples = data if epoch else Squares(())
        for x, y in DataLoader(samples, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / world)
        if kept is not None and epoch == 0 and rank == 0:
            kept.parent.mkdir()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    if rank == 0:
        print("losses", world, *[loss.hex() for loss in losses], flush=True)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    # After the replica: torch 2.13 can hang for ever if DistributedDataParallel is the last to let go of a gloo group.
    dist.destroy_process_group()
