"""`deepspeed.initialize` with ZeRO 1 over gloo on CPUs; `--bad-rank R` has one rank's model get a sample of the wrong size."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad-rank", type=int)
    bad_rank = parser.parse_args().bad_rank
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank + 1)
    losses = []
    for step in range(6):
        x = torch.randn(8, 7 if rank == bad_rank and step == 3 else 8)
        loss = (engine(x) - x.square().sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / world)
    if rank == 0:
        print("losses", world, *[loss.hex() for loss in losses], flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
