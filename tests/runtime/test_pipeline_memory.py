"""B10: a pipeline stage keeps the activations of as many micro-batches as the theory of its schedule says, and no more."""

import shutil

import pytest

from ttlaunch.runtime.parallel.pipeline.schedules import order_of_passes

from .layouts import RECIPES
from .pipelines import PipelineRuns, most_in_flight

BLOCKS, MICRO_BATCHES = 12, 8
METER = """

from collections import Counter
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    # What autograd keeps of a forward pass; a storage that several operations keep counts once.

    def __init__(self, meter, tensor):
        self.meter, self.tensor, self.storage = meter, tensor, tensor.untyped_storage()
        address = self.storage.data_ptr()
        meter.holders[address] += 1
        if meter.holders[address] == 1 and address != meter.weights:
            meter.bytes += self.storage.nbytes()
            meter.peak_bytes = max(meter.peak_bytes, meter.bytes)

    def __del__(self):
        address = self.storage.data_ptr()
        self.meter.holders[address] -= 1
        if not self.meter.holders[address] and address != self.meter.weights:
            self.meter.bytes -= self.storage.nbytes()


class MeteredPart(PipelinePart):
    # Counts the bytes that the graphs of transformer blocks keep; embedding and head are on some stages only.

    def __init__(self, cfg, ctx, grid, *, schedule):
        super().__init__(cfg, ctx, grid, schedule=schedule)
        self.bytes = self.peak_bytes = 0
        self.holders = Counter()
        self.weights = self.model.weights_N.untyped_storage().data_ptr()
        ctx.meter = self
        for block in self.model.blocks.values():
            block.register_forward_pre_hook(self.enter)
            block.register_forward_hook(self.leave)

    def enter(self, *_):
        self.hooks = saved_tensors_hooks(lambda tensor: Kept(self, tensor), lambda kept: kept.tensor)
        self.hooks.__enter__()

    def leave(self, *_):
        self.hooks.__exit__(None, None, None)


PipelinePart = MeteredPart
_stage = stage


def stage(cfg, ctx):
    _stage(cfg, ctx)
    ctx.result(f"kept_bytes_{ctx.rank}", ctx.meter.peak_bytes)
    ctx.result(f"left_bytes_{ctx.rank}", ctx.meter.bytes)
"""


@pytest.fixture(scope="module")
def kept_bytes(tmp_path_factory):
    """`kept_bytes(pipeline, ranks, micro_batches)`: the most that each rank's blocks keep."""
    folder = tmp_path_factory.mktemp("metered")
    (folder / "text.txt").write_text("a lazy dog rests while a quick brown fox jumps. " * 40)
    recipe = folder / "pipeline_parallel"
    shutil.copytree(RECIPES / "pipeline_parallel", recipe, ignore=shutil.ignore_patterns("__pycache__"))
    with (recipe / "trainer.py").open("a") as trainer:
        trainer.write(METER)
    runs = PipelineRuns(folder, folder / "text.txt")

    def run(pipeline, ranks, micro_batches):
        training = {"steps": 2, "batch_size": micro_batches, "validation_sequences": 3}
        trained = runs(
            pipeline, ranks=ranks, recipe=recipe, training_config=training, transformer_config={"num_blocks": BLOCKS}
        )
        assert [0] * ranks == [trained.result(f"left_bytes_{rank}") for rank in range(ranks)]
        return [trained.result(f"kept_bytes_{rank}") for rank in range(ranks)]

    return run


@pytest.fixture(scope="module")
def block_bytes(kept_bytes):
    """What one block keeps of one micro-batch."""
    (all_blocks,) = kept_bytes({"blocks_per_rank": [BLOCKS]}, 1, 1)
    assert all_blocks % BLOCKS == 0
    return all_blocks // BLOCKS


@pytest.mark.parametrize(
    ("schedule", "blocks", "chunks"),
    [
        ("gpipe", [4, 4, 4], 1),
        ("1f1b", [4, 4, 4], 1),
        ("1f1b", [3, 3, 3, 3], 1),
        ("interleaved", [6, 6], 3),
        ("interleaved", [4, 4, 4], 2),
    ],
)
def test_a_stage_keeps_what_the_theory_says(kept_bytes, block_bytes, schedule, blocks, chunks):
    """GPipe m micro-batches of its blocks, 1F1B p - stage, interleaved so many of one chunk; to the byte."""
    stages = len(blocks)
    pipeline = {"blocks_per_rank": blocks, "schedule": schedule, "chunks_per_rank": chunks}
    sizes = {"num_stages": stages, "num_micro_batches": MICRO_BATCHES, "num_chunks": chunks}
    in_flight = [most_in_flight(order_of_passes(schedule, stage, **sizes)) for stage in range(stages)]
    expected = [count * (blocks[stage] // chunks) * block_bytes for stage, count in enumerate(in_flight)]
    assert expected == kept_bytes(pipeline, stages, MICRO_BATCHES)


def test_more_micro_batches_need_more_memory_with_gpipe_only(kept_bytes):
    found = {
        (schedule, count): kept_bytes({"blocks_per_rank": [6, 6], "schedule": schedule}, 2, count)
        for schedule in ("gpipe", "1f1b")
        for count in (4, 8)
    }
    assert found["1f1b", 4] == found["1f1b", 8]
    assert [2 * size for size in found["gpipe", 4]] == found["gpipe", 8]
