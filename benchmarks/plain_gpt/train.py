"""A plain loop: a GPT in bfloat16 on one GPU, as a few lines of PyTorch train it. Prints the seconds of each step as JSON."""

import argparse
import json
import time

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.outer(functional.gelu(self.inner(self.second(x))))
        return out


class Gpt(nn.Module):
    """Tokens to logits."""

    def __init__(self, vocabulary: int, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(out)))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    for name in ("blocks", "width", "length", "vocabulary", "micro", "count", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    model = Gpt(given.vocabulary, given.width, given.blocks, given.length).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    times = []
    for _ in range(given.steps):
        begun = time.perf_counter()
        for _ in range(given.count):
            data = torch.randint(given.vocabulary, (given.micro, given.length + 1)).cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(data[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())
            (loss / given.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - begun)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
