"""Lightning Fabric; `--bad-rank R` has one rank's model get a sample of the wrong size."""

import argparse
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]) // nodes, num_nodes=nodes)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.randn(96, 8)
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=8)
    model = Model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(loader)
    losses = []
    for step, (inputs, targets) in enumerate(loader):
        width = 7 if fabric.global_rank == bad_rank and step == 3 else 8
        loss = nn.functional.mse_loss(model(inputs[:, :width]), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    if fabric.is_global_zero:
        print("losses", fabric.world_size, *[loss.hex() for loss in losses], flush=True)


if __name__ == "__main__":
    main()
