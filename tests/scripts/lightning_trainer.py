"""Lightning's Trainer; `--bad-rank R` has one rank fail in `training_step`, `--folder F` keeps checkpoints and resumes."""

import argparse
import os
import pathlib

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self, bad_rank):
        super().__init__()
        self.bad_rank, self.losses = bad_rank, []
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        if self.global_rank == self.bad_rank and self.current_epoch == 1 and index == 3:
            raise ValueError("this batch cannot be used")
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad-rank", type=int)
    parser.add_argument("--folder", type=pathlib.Path)
    given = parser.parse_args()
    seed_everything(0, verbose=False)
    x = torch.randn(96, 8)
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=8)
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    keep = [ModelCheckpoint(given.folder, save_last=True)] if given.folder else []
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]) // nodes,
        num_nodes=nodes,
        max_epochs=2,
        callbacks=keep,
        logger=False,
        enable_checkpointing=bool(keep),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = given.folder / "last.ckpt" if given.folder else None
    resumed = last is not None and last.exists()
    model = Model(None if resumed else given.bad_rank)
    trainer.fit(model, loader, ckpt_path=last if resumed else None)
    if trainer.is_global_zero:
        print("losses", trainer.world_size, *[loss.hex() for loss in model.losses], flush=True)


if __name__ == "__main__":
    main()
