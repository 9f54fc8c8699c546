"""How close the pipeline recipe comes to the bound of its own schedule: 1F1B, 2 stages, 8 micro-batches.

    python benchmarks/pipeline_bubble.py

The bound is what the schedule would take if messages cost nothing: the passes of every stage are timed without any
message, all stages at once because they share the machine's memory and caches in the pipeline too, and the 1F1B schedule
is run on paper with those times, each pass starting as soon as the pass it depends on has ended. With equal stages this
is (m + p - 1) / m of one stage's work. Rounds of both measurements alternate; medians are compared, and the fastest
round of each, which other programs on the machine disturb least. Each rank computes with one thread on its own core.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STAGES, MICRO_BATCHES, ROUNDS, WARM_UP = 2, 8, 20, 2
CONFIG = {
    "training_config": {"batch_size": 32, "micro_batch_size": 32 // MICRO_BATCHES},
    "transformer_config": {"num_blocks": 4, "num_heads": 4, "embedding_dim": 256, "max_sequence_length": 128},
    "multihost_config": {"pipeline_parallel_config": {"blocks_per_rank": [2, 2]}},
}
ROOT = Path(__file__).resolve().parents[1]


def start() -> int:
    """Run this file again as the ranks."""
    mpirun = Path(sys.executable).with_name("mpirun")
    mca = ["--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    command = [str(mpirun), *mca, "-n", str(STAGES), sys.executable, __file__, "rank"]
    return subprocess.run(command, env=os.environ | as_root, check=False).returncode


def scheduled_time(forward: list[list[float]], backward: list[list[float]]) -> float:
    """When the last pass ends, for the time of each pass by stage and micro-batch, if messages took no time."""
    from ttlaunch.runtime.schedules import one_f_one_b

    stages, count = len(forward), len(forward[0])
    orders = [one_f_one_b(stage, num_stages=stages, num_micro_batches=count) for stage in range(stages)]
    ended: dict[tuple[int, str], float] = {}
    clock, at = [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                source = stage - 1 if action.kind == "F" else stage + 1
                ready = 0.0 if not 0 <= source < stages else ended.get((source, str(action)))
                if ready is None:
                    break
                took = (forward if action.kind == "F" else backward)[stage][action.micro_batch]
                clock[stage] = max(clock[stage], ready) + took
                ended[stage, str(action)] = clock[stage]
                at[stage] += 1
    return max(clock)


def rank_main() -> None:
    """Measure, as one stage; the last one prints."""
    import torch
    from mpi4py import MPI

    from ttlaunch.runtime import build_model
    from ttlaunch.runtime.entry import import_from
    from ttlaunch.runtime.mpi import MpiSocket
    from ttlaunch.runtime.world import Rank, World

    comm = MPI.COMM_WORLD
    rank, cores = Rank(comm.rank), sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    hosts, places = ("localhost",) * STAGES, tuple(range(STAGES))
    world = World("pipeline", ROOT, "", ("stage",) * STAGES, hosts, places, {}, None, None)
    socket = MpiSocket(comm, world=world, rank=rank)
    if len(cores) >= STAGES:
        os.sched_setaffinity(0, {cores[rank]})
    recipe, trainer = (import_from(ROOT / "recipes" / "pipeline_parallel", name) for name in ("recipe", "trainer"))
    cfg = recipe.Config.model_validate(CONFIG)
    ctx = _context(world, rank, socket)
    model = build_model(cfg, ctx, stage=rank, blocks_per_stage=[2, 2])
    sums = ctx.gradient_tree(model.weights_N)
    bounds, measured = [], []
    for step in range(1, ROUNDS + WARM_UP + 1):
        socket.barrier()
        passes = comm.allgather(_time_passes(cfg, ctx, model, sums, trainer, step))
        socket.barrier()
        began = time.perf_counter()
        trainer._run_1f1b(cfg, ctx, model, sums, step)  # noqa: SLF001  the recipe's step is what is measured
        measured.append(max(comm.allgather(time.perf_counter() - began)))
        bounds.append(scheduled_time([times[0] for times in passes], [times[1] for times in passes]))
        sums.mean(model.grads_N, micro_batches=MICRO_BATCHES)
        model.zero_grad()
    if rank == STAGES - 1:
        _report(bounds[WARM_UP:], measured[WARM_UP:])


def _context(world, rank, socket):  # noqa: ANN001, ANN202
    import torch

    from ttlaunch.recipe.corpus import read_corpus
    from ttlaunch.runtime import RankContext
    from ttlaunch.runtime.records import ProgressWriter

    records = ProgressWriter(Path(tempfile.mkdtemp(prefix="bubble-")), rank)
    device = torch.device("cpu")
    return RankContext(world=world, rank=rank, socket=socket, records=records, device=device, corpus=read_corpus(None))


def _time_passes(cfg, ctx, model, sums, trainer, step):  # noqa: ANN001, ANN202
    """Forward and backward time of each micro-batch on this stage alone, with random values from its neighbours."""
    import torch

    from ttlaunch.runtime import micro_batches, summed_loss

    first, last = ctx.previous("stage") is None, ctx.next("stage") is None
    forward, backward = [], []
    for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
        value = x_BT if first else torch.randn_like(trainer._boundary(cfg, x_BT)).requires_grad_()  # noqa: SLF001
        grad = torch.randn_like(trainer._boundary(cfg, x_BT))  # noqa: SLF001
        began = time.perf_counter()
        out = model(value, model.masks(step, index))
        out = summed_loss(out, y_BT) if last else out
        forward.append(time.perf_counter() - began)
        began = time.perf_counter()
        out.backward(None if last else grad)
        sums.add(index, model.take_gradients(), tokens=y_BT.numel(), loss=0.0)
        model.zero_grad()
        backward.append(time.perf_counter() - began)
    sums.clear()
    return forward, backward


def _report(bounds: list[float], measured: list[float]) -> None:
    ratios = sorted(bound / took for bound, took in zip(bounds, measured, strict=True))
    print(f"{STAGES} stages, {MICRO_BATCHES} micro-batches, {len(measured)} rounds")
    print(f"bound from the stages' own passes: {statistics.median(bounds) * 1e3:.1f} ms (median)")
    print(f"measured 1F1B step:                {statistics.median(measured) * 1e3:.1f} ms (median)")
    print(f"bound / measured, fastest rounds:  {min(bounds) / min(measured):.3f}")
    print(f"bound / measured, medians:         {statistics.median(bounds) / statistics.median(measured):.3f}")
    print(
        f"bound / measured, by round:        {statistics.median(ratios):.3f} (median; {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main()
    else:
        sys.exit(start())
