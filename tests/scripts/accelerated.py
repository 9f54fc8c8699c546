"""Hugging Face Accelerate; `--bad-rank R` has one rank meet a bad sample."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def collate(samples):
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    if torch.isnan(x).any():
        raise ValueError("a sample is not a number")
    return x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad-rank", type=int)
    bad_rank = parser.parse_args().bad_rank
    accelerator = Accelerator()
    set_seed(0)
    x = torch.randn(96, 8)
    y = x.square().sum(1, keepdim=True)
    if accelerator.process_index == bad_rank:
        x[40:56] = float("nan")
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    if accelerator.is_main_process:
        print("losses", accelerator.num_processes, *[loss.hex() for loss in losses], flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
