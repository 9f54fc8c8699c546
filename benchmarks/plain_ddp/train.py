"""A training as one writes it first, with torch alone: DistributedDataParallel around a GPT, started by torchrun.

    torchrun --nproc_per_node 2 benchmarks/plain_ddp/train.py '{"steps": 40, ...}'

`benchmarks/plain_ddp.py` measures `data_parallel` against it. Model, batch, optimizer and clipping are those of the recipe;
gradients are reduced in the backward pass of the last micro-batch only. The first rank prints when each
step was done. Nothing of ttlaunch is imported.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, before each of them a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(self.norm_1(x)).chunk(3, dim=-1)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.feed_forward(self.norm_2(x))
        return out


class GPT(nn.Module):
    """Token and position embeddings, blocks, a head with weights of its own."""

    def __init__(self, *, vocabulary: int, width: int, heads: int, blocks: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def main() -> None:
    """Train on the source text of this Python's argparse, whose bytes are the tokens."""
    parser = argparse.ArgumentParser(description="Train a GPT with torch's DistributedDataParallel.")
    parser.add_argument("settings", type=json.loads)
    wanted = parser.parse_args().settings
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(**wanted["model"])
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    length, micro_batch = wanted["model"]["length"], wanted["micro_batch"]
    passes = wanted["batch"] // micro_batch // dist.get_world_size()
    offsets = torch.Generator().manual_seed(dist.get_rank())
    ends = []
    for _ in range(wanted["steps"]):
        summed = 0.0
        for at in range(passes):
            starts = torch.randint(len(text) - length - 1, (micro_batch,), generator=offsets)
            rows = torch.stack([text[start : start + length + 1] for start in starts])
            with nullcontext() if at == passes - 1 else replica.no_sync():
                scores = replica(rows[:, :-1])
                loss = functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten()) / passes
                loss.backward()
            summed += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(summed)
        dist.all_reduce(mean)
        ends.append(time.time())
    if dist.get_rank() == 0:
        print(json.dumps(ends))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
