"""Gradients of a GPU that leave during the backward pass: a step of `data_parallel` ÷ the same step without messages.

    PYTHONPATH=. python benchmarks/cuda_overlap.py [--ranks 2] [--rounds 7] [--bucket-megabytes 25]

For a machine with a GPU, which the ranks share if there are fewer GPUs than ranks; takes under a minute. A GPT of 85 million
parameters in bf16 trains on one micro-batch a rank and step. Three ways take turns, step by step, with the same model:

    alone    no messages: each rank is a world of its own
    staged   the communicator as it is: copies beside the computation, into pinned memory that is kept
    plain    as simple as possible: a send copies with `tensor.cpu()`, a receive copies back when it is waited for

`CUDA_OVERLAP_WAYS`, such as `alone,staged`, chooses some of them. Medians over the rounds of the time of a step, of the longest rank;
how long a rank was inside of `isend` and inside of waits in a step; and whether the gradients of both ways have the same bits.
`--device cpu --small` shows on any machine that the benchmark works.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("alone", "staged", "plain")
WARM_UP = 2
SIZES = {
    "training_config": {"micro_batch_size": 32, "precision": "bf16"},
    "transformer_config": {"num_blocks": 12, "num_heads": 12, "embedding_dim": 768, "max_sequence_length": 512},
}
SMALL = {
    "training_config": {"micro_batch_size": 2, "precision": "bf16"},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 64, "max_sequence_length": 32},
}


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description="Measure how far messages of a GPU overlap with its computation.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-megabytes", type=float, default=25.0)
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options)
        return
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.is_file() else shutil.which("mpirun") or "mpirun"
    mca = ["--bind-to", "none", "--map-by", ":oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpirun, *mca, "-n", str(options.ranks), sys.executable, __file__, *sys.argv[1:], "--rank"]
    sys.exit(subprocess.run(command, env=os.environ | as_root, check=False).returncode)


class Timed:
    """A communicator that notes how long its rank is inside of `isend`, and inside of waits."""

    def __init__(self, communicator) -> None:  # noqa: ANN001
        self.rank = communicator.rank
        self.inside: dict[str, float] = defaultdict(float)
        self._communicator = communicator

    def isend(self, tensor, **where):  # noqa: ANN001, ANN003, ANN201
        """Begin to send."""
        began = time.perf_counter()
        pending = self._communicator.isend(tensor, **where)
        self.inside["isend"] += time.perf_counter() - began
        return _TimedPending(pending, self.inside)

    def irecv(self, tensor, **where):  # noqa: ANN001, ANN003, ANN201
        """Begin to receive."""
        return _TimedPending(self._communicator.irecv(tensor, **where), self.inside)

    def recv(self, tensor, **where) -> None:  # noqa: ANN001, ANN003
        """Receive and wait."""
        self.irecv(tensor, **where).wait()


class _TimedPending:
    def __init__(self, pending, inside) -> None:  # noqa: ANN001
        self._pending, self._inside = pending, inside

    def wait(self) -> None:
        began = time.perf_counter()
        self._pending.wait()
        self._inside["wait"] += time.perf_counter() - began


class Plain:
    """Messages of a device through host memory in the simplest way."""

    def __init__(self, communicator) -> None:  # noqa: ANN001
        self.rank = communicator.rank
        self._communicator = communicator

    def isend(self, tensor, **where):  # noqa: ANN001, ANN003, ANN201
        """Copy, and begin to send."""
        return self._communicator.isend(tensor.detach().cpu(), **where)

    def irecv(self, tensor, **where):  # noqa: ANN001, ANN003, ANN201
        """Begin to receive into new memory."""
        host = tensor.detach().cpu()
        return _PlainReceive(self._communicator.irecv(host, **where), tensor, host)


class _PlainReceive:
    def __init__(self, pending, tensor, host) -> None:  # noqa: ANN001
        self._pending, self._tensor, self._host = pending, tensor, host

    def wait(self) -> None:
        self._pending.wait()
        if self._host is not self._tensor:
            self._tensor.detach().copy_(self._host)


def measure(options: argparse.Namespace) -> None:
    """Take the ways in turns; rank 0 prints."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_FUNNELED)
    import torch

    from ttlaunch.runtime.comm.mpi import MpiCommunicator
    from ttlaunch.runtime.entry import choose_device
    from ttlaunch.runtime.world import Rank, World
    from ttlaunch.spec.recipe.sections import DeviceConfig

    plain = MPI.COMM_WORLD
    torch.set_num_threads(1)
    # As a run does, which also leaves out the kernels that add in another order each time.
    device = choose_device(DeviceConfig(device=options.device), local_rank=plain.rank)
    count = plain.size
    world = World(ROOT, "", ("worker",) * count, ("here",) * count, tuple(range(count)), {}, None, None)
    made = {way: MpiCommunicator(plain, world=world, rank=Rank(plain.rank)) for way in WAYS}
    sockets = {"alone": made["alone"], "staged": made["staged"], "plain": Plain(made["plain"])}
    chosen = [way for way in os.environ.get("CUDA_OVERLAP_WAYS", ",".join(WAYS)).split(",") if way in WAYS]
    training = Training(options, world, Rank(plain.rank), made["staged"], device=device)
    ways = {way: training.way(Timed(sockets[way]), is_alone=way == "alone") for way in chosen}
    digests = {way: plain.allgather(one.digest()) for way, one in ways.items()}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in range(2, options.rounds + WARM_UP + 2):
        for way, one in ways.items():
            plain.Barrier()
            took = plain.allgather(one.time_step(step))
            for kind in took[0]:
                times[way, kind].append(max(each[kind] for each in took))
    if plain.rank == 0:
        found = {key: statistics.median(values[WARM_UP:]) * 1e3 for key, values in times.items()}
        _report(options, training, found, digests)
    MPI.Finalize()


class Training:
    """The model, its data and its optimizer, which all ways share."""

    def __init__(self, options, world, rank, socket, *, device) -> None:  # noqa: ANN001
        from ttlaunch.runtime.telemetry.records import ProgressWriter
        from ttlaunch.spec.recipe.corpus import read_corpus
        from ttlaunch.spec.recipe.importing import import_recipe_module
        from ttlaunch.train import RankContext, build_model, build_optimizer

        recipe = import_recipe_module(ROOT / "recipes" / "data_parallel", "recipe")
        sizes = SMALL if options.small else SIZES
        self.own = options.micro_batches
        self.all = self.own * options.ranks
        batch = {"batch_size": self.all * sizes["training_config"]["micro_batch_size"]}
        self.cfg = recipe.Config.model_validate(sizes | {"training_config": sizes["training_config"] | batch})
        records = ProgressWriter(Path(tempfile.mkdtemp(prefix="overlap-")), rank)
        corpus = read_corpus(None)
        self.ctx = RankContext(
            world=world, rank=rank, communicator=socket, records=records, device=device, corpus=corpus
        )
        self.model = build_model(self.cfg, self.ctx)
        self.optimizer = build_optimizer(self.cfg, self.model, total_steps=100)
        self.device = device
        self.bucket_megabytes = options.bucket_megabytes

    def way(self, communicator: Timed, *, is_alone: bool) -> "Way":
        """Return one of the ways, over a communicator."""
        return Way(self, communicator, is_alone=is_alone)


class Way:
    """Steps over one communicator."""

    def __init__(self, training: Training, communicator: Timed, *, is_alone: bool) -> None:
        from ttlaunch.train import GradientExchange

        ranks = list(training.ctx.ranks("worker"))
        self._training = training
        self._communicator = communicator
        self._exchange = GradientExchange(
            training.model.parameters(),
            ctx=communicator,
            among=[communicator.rank] if is_alone else ranks,
            micro_batches=training.own if is_alone else training.all,
            bucket_megabytes=training.bucket_megabytes,
        )

    def digest(self) -> str:
        """Return the digest of the mean gradient of step 1, which changes no weight."""
        self._mean_gradient(1)
        found = hashlib.sha256(self._training.model.grads_N.cpu().numpy().tobytes()).hexdigest()
        self._training.model.zero_grad()
        return found

    def time_step(self, step: int) -> dict[str, float]:
        """Make a step; return its seconds, and those inside of the communicator."""
        from ttlaunch.runtime.training.optimizers import global_norm

        training, inside = self._training, self._communicator.inside
        self._synchronize()
        inside.update(isend=0.0, wait=0.0)
        began = time.perf_counter()
        self._mean_gradient(step)
        gradient_s = time.perf_counter() - began
        norm = global_norm(training.optimizer.squared_norms())
        training.optimizer.step(step, norm=norm)
        self._synchronize()
        return {"step": time.perf_counter() - began, "gradient": gradient_s, **inside}

    def _mean_gradient(self, step: int) -> None:
        from ttlaunch.train import differentiate

        model, exchange, ctx = self._training.model, self._exchange, self._training.ctx
        for index in exchange.block:
            _, x_BT, y_BT = ctx.data(self._training.cfg).training_batch(step, index)
            x_BT, y_BT = x_BT.to(self._training.device), y_BT.to(self._training.device)
            before = partial(exchange.expect, index)
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=before)
            exchange.accumulate(index, tokens=tokens, loss=loss)
        exchange.finish()

    def _synchronize(self) -> None:
        import torch

        if self._training.device.type == "cuda":
            torch.cuda.synchronize()


def _report(options, training, found, digests) -> None:  # noqa: ANN001
    import torch

    name = torch.cuda.get_device_name() if training.device.type == "cuda" else "CPU"
    values = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"{options.ranks} ranks, {name}, torch {torch.__version__}, {values / 1e6:.1f} million parameters, bf16")
    print(f"{'ms a step, medians':20}{'step':>9}{'÷ alone':>9}{'gradient':>10}{'in isend':>10}{'in waits':>10}")
    for way in digests:
        step, gradient, isend, wait = (found[way, kind] for kind in ("step", "gradient", "isend", "wait"))
        ratio = f"{step / found['alone', 'step']:9.3f}" if "alone" in digests else f"{'-':>9}"
        print(f"{way:20}{step:9.1f}{ratio}{gradient:10.1f}{isend:10.2f}{wait:10.1f}")
    shared = [digest for way, all_ranks in digests.items() if way != "alone" for digest in all_ranks]
    print(f"gradients of all ranks and ways: {'the same bits' if len(set(shared)) == 1 else 'DIFFERENT BITS'}")


if __name__ == "__main__":
    main()
