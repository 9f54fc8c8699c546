"""`transformers.Trainer` with a model of its own kind, made from a configuration; `--bad-rank R` has one rank meet a bad sample."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Tokens(Dataset):
    def __init__(self, bad):
        self.bad = bad
        self.tokens = torch.randint(0, 64, (48, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        if self.bad and index % 16 == 7:
            raise ValueError(f"sample {index} is corrupt")
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class KeepLosses(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad-rank", type=int)
    bad_rank = parser.parse_args().bad_rank
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    kept = KeepLosses()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=5,
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = Tokens(bad=arguments.process_index == bad_rank)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[kept])
        trainer.train()
    if trainer.is_world_process_zero():
        print("losses", arguments.world_size, *[loss.hex() for loss in kept.losses], flush=True)


if __name__ == "__main__":
    main()
