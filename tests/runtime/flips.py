"""Flips one bit of a tensor that several ranks hold, in any recipe that has such tensors; all ranks run in this process."""

from contextlib import contextmanager

import torch

from tests.runtime.layouts import train_recipe, watch_records
from ttlaunch.runtime.context import RankContext

STEPS = 4
SMALL = {
    "training_config": {"steps": STEPS, "verify_interval": 2, "validation_interval": STEPS, "validation_sequences": 4},
    "transformer_config": {"num_blocks": 2, "embedding_dim": 16, "num_heads": 4, "max_sequence_length": 16},
}
TWO_STAGES = {"blocks_per_rank": [1, 1]}
KINDS = {
    "data_parallel": (["worker"] * 3, {}),
    "data_parallel with a codec": (["worker"] * 3, {"compression_config": {"kind": "int8"}}),
    "classic_dp": (["worker"] * 3, {"classic_dp_config": {"staleness_bound": 2}}),
    "zero": (["worker"] * 3, {"zero_config": {"stage": 0}}),
    "zero stage 2": (["worker"] * 3, {"zero_config": {"stage": 2}}),
    "sync_ps": (["worker"] * 3 + ["server"] * 2, {}),
    "hierarchical_parallel": (["worker"] * 2 + ["aggregator", "optimizer"], {}),
    "pipeline_parallel": (
        ["stage"] * 6,
        {"multihost_config": {"pipeline_parallel_config": TWO_STAGES | {"replicas": 3}}},
    ),
    "tensor_parallel": (["worker"] * 6, {"tensor_parallel_config": {"ranks": 2, "replicas": 3}}),
    "local_sgd": (["worker"] * 3, {"local_sgd_config": {"every": 2}}),
    "diloco": (["worker"] * 3, {"diloco_config": {"every": 2}}),
}
"""Recipes with tensors that several ranks hold, each with its roles and what its configuration needs."""


class Trainings:
    """Trains one of `KINDS` again and again, and returns what the launcher sees of the ranks' digests.

    Attributes:
        last: What it saw of the last training.
    """

    def __init__(self, kind, folder, *, data=None, **training):
        self.roles, sections = KINDS[kind]
        self._recipe, self._folder, self._data, self._count = kind.split()[0], folder, data, 0
        self._config = {**SMALL, **sections, "training_config": SMALL["training_config"] | training}

    def run(self):
        self._count += 1
        run_dir = self._folder / f"training-{self._count}"
        train_recipe(self._recipe, self.roles, run_dir, self._config, data=self._data)
        watch = watch_records(run_dir, len(self.roles))
        watch.replicas.settle({})
        self.last = watch.replicas
        return self.last

    def shared_tensors(self, step=2):
        """The ranks that hold each tensor that several ranks hold."""
        seen, holders = {}, {}
        with comparing(lambda ctx, at, held: seen.update({ctx.rank: dict(held())}) if at == step and held() else None):
            self.run()
        for rank, tensors in sorted(seen.items()):
            for name in tensors:
                holders.setdefault(name, []).append(int(rank))
        return {name: ranks for name, ranks in holders.items() if len(ranks) > 1}


@contextmanager
def comparing(before):
    """Let `before(ctx, step, held)` run before every comparison of replicas."""
    compare = RankContext.compare

    def compare_after(ctx, step, held):
        before(ctx, step, held)
        compare(ctx, step, held)

    RankContext.compare = compare_after
    try:
        yield
    finally:
        RankContext.compare = compare


@torch.no_grad()
def flip_bit(tensor, place, bit):
    """Flip one bit of a value of a float32 tensor, at a place between 0 and 1; bit 31 is the sign."""
    index = torch.unravel_index(torch.tensor(int(place * tensor.numel())), tensor.shape)
    words = tensor[index].reshape(1).view(torch.int32) ^ (1 << bit if bit < 31 else -(2**31))
    tensor[index] = words.view(torch.float32)[0]


def flipping(rank, name, draw, *, step=2):
    """Flip a drawn bit of a tensor of one rank after the update of a step, before the comparison."""
    place, bit = draw.random(), draw.randrange(32)

    def flip(ctx, at, held):
        tensor = dict(held()).get(name) if (ctx.rank, at) == (rank, step) else None
        if tensor is not None:
            flip_bit(tensor.detach(), place, bit)

    return comparing(flip)
