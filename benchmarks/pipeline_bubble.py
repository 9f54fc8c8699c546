"""How close the pipeline recipe comes to the bound of each schedule, and to torch's schedule of the same name.

    PYTHONPATH=. python benchmarks/pipeline_bubble.py

Two stages, eight micro-batches. The bound is what the schedule would take if messages cost nothing: the passes of every
stage are timed without any message, all stages at once because they share the machine's memory and caches in the pipeline
too, and the schedule is run on paper with those times, each pass starting as soon as the pass it depends on has ended.
With equal stages this is (m + p - 1) / m of one stage's work. Torch's schedule (`torch.distributed.pipelining`, over gloo)
runs the same modules on the same micro-batches; it adds gradients up in place, the recipe's in the canonical tree. Neither
updates weights.

In each round everything is measured once, in turns; medians are compared, and the median of the rounds' ratios is the
verdict, because what disturbs a round disturbs both. Each rank computes with one thread on its own core.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

STAGES, MICRO_BATCHES, ROUNDS, WARM_UP = 2, 8, 15, 2
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
BOUND_LIMIT, TORCH_LIMIT = 0.93, 1.0
CONFIG = {
    "training_config": {"batch_size": 32, "micro_batch_size": 32 // MICRO_BATCHES},
    "transformer_config": {"num_blocks": 4, "num_heads": 4, "embedding_dim": 256, "max_sequence_length": 128},
}
ROOT = Path(__file__).resolve().parents[1]


def start() -> int:
    """Run this file again as the ranks."""
    mpirun = Path(sys.executable).with_name("mpirun")
    mca = ["--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    command = [str(mpirun), *mca, "-n", str(STAGES), sys.executable, __file__, "rank"]
    return subprocess.run(command, env=os.environ | as_root, check=False).returncode


def scheduled_time(orders, took) -> float:  # noqa: ANN001
    """When the last pass ends, if messages took no time; `took[stage]` has the time of each pass."""
    stages, chunks = len(orders), 1 + max(action.chunk for action in orders[0])
    ended: dict[tuple[int, str], float] = {}
    clock, at = [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                part = action.chunk * stages + stage - (1 if action.kind == "F" else -1)
                source = (part % stages, action.kind, action.micro_batch, part // stages)
                ready = ended.get(source) if 0 <= part < stages * chunks else 0.0
                if ready is None:
                    break
                clock[stage] = max(clock[stage], ready) + took[stage][action.kind, action.micro_batch, action.chunk]
                ended[stage, action.kind, action.micro_batch, action.chunk] = clock[stage]
                at[stage] += 1
    return max(clock)


class Ours:
    """The recipe's passes under one schedule."""

    def __init__(self, ctx, name, trainer, recipe) -> None:  # noqa: ANN001
        from ttlaunch.runtime.parallel.pipeline.schedules import order_of_passes
        from ttlaunch.train import PipelinePart, place_in_pipeline

        pipeline = {"blocks_per_rank": [2] * STAGES, "schedule": name, "chunks_per_rank": CHUNKS[name]}
        self.cfg = recipe.Config.model_validate(CONFIG | {"multihost_config": {"pipeline_parallel_config": pipeline}})
        self.ctx, self.trainer = ctx, trainer
        self.part = PipelinePart(self.cfg, ctx, place_in_pipeline(ctx, num_stages=STAGES), schedule=name)
        sizes = {"num_stages": STAGES, "num_micro_batches": MICRO_BATCHES, "num_chunks": CHUNKS[name]}
        self.orders = [order_of_passes(name, stage, **sizes) for stage in range(STAGES)]

    def step(self, step: int) -> None:
        """The passes of a step, as the recipe runs them."""
        self.trainer._run_passes(self.cfg, self.ctx, self.part, step)  # noqa: SLF001  this is what is measured

    def clean(self) -> None:
        """Drop the sums."""
        for chunk in self.part.chunks:
            chunk.sums.clear()

    def time_passes(self, step: int) -> dict[tuple[str, int, int], float]:
        """The time of each pass on this stage alone, with random values from its neighbours."""
        import torch

        from ttlaunch.train import count_tokens, micro_batches, summed_loss

        took, part = {}, self.part
        batches = list(micro_batches(self.cfg, self.ctx, step))
        width, kept = self.cfg.transformer_config.embedding_dim, {}
        for action in part.order(len(batches)):
            (index, x_BT, y_BT), chunk = batches[action.micro_batch], part.chunks[action.chunk]
            value, gradient = (torch.randn(*x_BT.shape, width) for _ in range(2))
            value = x_BT if chunk.is_first else value.requires_grad_()
            began = time.perf_counter()
            if action.kind == "F":
                out = part.model(value, part.model.masks(step, index), blocks=chunk.blocks)
                kept[action.micro_batch, action.chunk] = summed_loss(out, y_BT) if chunk.is_last else out
            else:
                out = kept.pop((action.micro_batch, action.chunk))
                out.backward(None if chunk.is_last else gradient)
                loss = out.item() if chunk.is_last else 0.0
                part.add_gradients(chunk, index, tokens=count_tokens(y_BT), loss=loss)
            took[action.kind, action.micro_batch, action.chunk] = time.perf_counter() - began
        self.clean()
        return took


class Torchs:
    """Torch's schedule of the same name over the same modules."""

    def __init__(self, ours: Ours, name: str) -> None:
        import torch
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
        )

        from ttlaunch.train import summed_loss

        class Chunk(torch.nn.Module):
            def __init__(self, model, blocks) -> None:  # noqa: ANN001
                super().__init__()
                self.model, self.blocks = model, blocks

            def forward(self, x):  # noqa: ANN001, ANN202
                return self.model(x, blocks=self.blocks)

        self.ours, device = ours, torch.device("cpu")
        parts = [Chunk(ours.part.model, chunk.blocks) for chunk in ours.part.chunks]
        stages = [
            PipelineStage(part, chunk.part, STAGES * CHUNKS[name], device)
            for part, chunk in zip(parts, ours.part.chunks, strict=True)
        ]
        settings = {"n_microbatches": MICRO_BATCHES, "loss_fn": summed_loss, "scale_grads": False}
        if name == "interleaved":
            self.schedule = ScheduleInterleaved1F1B(stages, **settings)
        else:
            self.schedule = (ScheduleGPipe if name == "gpipe" else Schedule1F1B)(stages[0], **settings)

    def step(self, step: int) -> None:
        """The passes of a step."""
        import torch

        from ttlaunch.train import micro_batches

        _, x, y = zip(*micro_batches(self.ours.cfg, self.ours.ctx, step), strict=True)
        first, last = (self.ours.part.chunks[at] for at in (0, -1))
        losses: list[torch.Tensor] = []
        words = {"target": torch.cat(y), "losses": losses} if last.is_last else {}
        self.schedule.step(*([torch.cat(x)] if first.is_first else []), **words)
        self.ours.part.model.zero_grad()


def rank_main() -> None:
    """Measure, as one stage; the last one prints."""
    import torch
    from mpi4py import MPI

    from ttlaunch.runtime.comm.mpi import MpiCommunicator
    from ttlaunch.runtime.world import Rank, World
    from ttlaunch.spec.recipe.importing import import_recipe_module
    from ttlaunch.train import process_group

    comm = MPI.COMM_WORLD
    rank, cores = Rank(comm.rank), sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    hosts, places = ("localhost",) * STAGES, tuple(range(STAGES))
    world = World(ROOT, "", ("stage",) * STAGES, hosts, places, {}, None, None)
    socket = MpiCommunicator(comm, world=world, rank=rank)
    if len(cores) >= STAGES:
        os.sched_setaffinity(0, {cores[rank]})
    recipe, trainer = (
        import_recipe_module(ROOT / "recipes" / "pipeline_parallel", name) for name in ("recipe", "trainer")
    )
    ctx = _context(world, rank, socket)
    with process_group(ctx, among=[Rank(stage) for stage in range(STAGES)], device=torch.device("cpu")):
        ours = {name: Ours(ctx, name, trainer, recipe) for name in CHUNKS}
        torchs, why = _torchs(ours)
        times = _measure(comm, socket, ours, torchs)
    if rank == STAGES - 1:
        sys.exit(_report(times, why))


def _torchs(ours: dict[str, Ours]) -> tuple[dict[str, Torchs], str]:
    try:
        return {name: Torchs(each, name) for name, each in ours.items()}, ""
    except ImportError as error:
        return {}, f"torch.distributed.pipelining cannot be imported here: {error}"


def _measure(comm, socket, ours, torchs):  # noqa: ANN001, ANN202
    times = defaultdict(list)
    for step in range(1, ROUNDS + WARM_UP + 1):
        for name in CHUNKS:
            socket.barrier()
            passes = comm.allgather(ours[name].time_passes(step))
            times[name, "bound"].append(scheduled_time(ours[name].orders, passes))
            for kind, runs in (("ours", ours), ("torch", torchs)):
                if name not in runs:
                    continue
                socket.barrier()
                began = time.perf_counter()
                runs[name].step(step)
                times[name, kind].append(max(comm.allgather(time.perf_counter() - began)))
            ours[name].clean()
    return {key: found[WARM_UP:] for key, found in times.items()}


def _context(world, rank, socket):  # noqa: ANN001, ANN202
    import torch

    from ttlaunch.runtime.telemetry.records import ProgressWriter
    from ttlaunch.spec.recipe.corpus import read_corpus
    from ttlaunch.train import RankContext

    records = ProgressWriter(Path(tempfile.mkdtemp(prefix="bubble-")), rank)
    device = torch.device("cpu")
    return RankContext(
        world=world, rank=rank, communicator=socket, records=records, device=device, corpus=read_corpus(None)
    )


def _report(times, why: str) -> int:  # noqa: ANN001
    print(f"{STAGES} stages, {MICRO_BATCHES} micro-batches, {ROUNDS} rounds; medians in ms")
    print(
        f"{'schedule':12} {'bound':>7} {'ours':>7} {'torch':>7}   {'bound/ours':>10} limit   {'ours/torch':>10} limit"
    )
    is_good = True
    for name in CHUNKS:
        bound, ours, torchs = (times.get((name, kind), []) for kind in ("bound", "ours", "torch"))
        to_bound = statistics.median(b / o for b, o in zip(bound, ours, strict=True))
        cells = [f"{statistics.median(found) * 1e3:7.1f}" if found else f"{'-':>7}" for found in (bound, ours, torchs)]
        line = f"{name:12} {' '.join(cells)}   {to_bound:10.3f} {BOUND_LIMIT:5.2f}"
        good = to_bound >= BOUND_LIMIT
        if torchs:
            to_torch = statistics.median(o / t for o, t in zip(ours, torchs, strict=True))
            good = good and to_torch <= TORCH_LIMIT
            line += f"   {to_torch:10.3f} {TORCH_LIMIT:5.2f}"
        is_good = is_good and good
        print(f"{line}   {'met' if good else 'MISSED'}")
    if why:
        print(why)
    return 0 if is_good else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main()
    else:
        sys.exit(start())
