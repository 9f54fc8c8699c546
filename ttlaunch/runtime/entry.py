"""Owns a rank from its first line to its last: checks the world, calls the role's function, records how it ended.

A plain exception in one rank would leave the others waiting for ever, so every way out of here is deliberate: exit
status 0 after the role has returned everywhere, else an error record, the traceback on standard error, and `os._exit`.
"""

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ttlaunch import contract, flight_recorder
from ttlaunch.flight_recorder_writer import FlightRecorder, open_flight_recorder
from ttlaunch.rank_exceptions.watch import ExceptionWatch
from ttlaunch.runtime.freed_memory import keep_if_unlimited
from ttlaunch.runtime.stop_order import StopOrder, hold_stop_signals, take_stop_signals
from ttlaunch.runtime.telemetry.records import ProgressWriter, print_error, write_error
from ttlaunch.runtime.world import Rank, World, read_world
from ttlaunch.spec.recipe.corpus import Corpus, CorpusError, CorpusReason
from ttlaunch.spec.recipe.data import read_data
from ttlaunch.spec.recipe.declare import Recipe
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.sections import ConfigFile, DeviceConfig, TrainingFile

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from ttlaunch.runtime.checkpoint.checkpoints import Checkpoints
    from ttlaunch.runtime.checkpoint.digests import ReplicaDigests
    from ttlaunch.runtime.comm.fabric import FabricCommunicator
    from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator
    from ttlaunch.runtime.comm.mpi import MpiCommunicator
    from ttlaunch.runtime.context import RankContext
    from ttlaunch.runtime.elastic.life import ElasticLife
    from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter

_THIS_FILE = "/ttlaunch/runtime/entry.py"
"""Any exception that comes as far as this file ends the rank."""


def main() -> None:
    """Run the rank that the environment describes; ends the process with status 1 if anything goes wrong."""
    faulthandler.enable()
    gc.disable()  # what is imported stays: looking for garbage in it takes a tenth of the time
    atexit.register(gc.freeze)  # so does taking it apart at the end, which takes torch half a second
    if os.environ[contract.ENV_RUN_ID] != contract.BY_HAND:  # else no launcher chooses the step to stop after
        hold_stop_signals()
    rank_run = _RankRun(os.environ)
    try:
        with _stacks_on_demand(rank_run.run_dir / contract.stacks_file(rank_run.rank)):
            rank_run.run()
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt end a rank just as early
        rank_run.fail(error)
    if rank_run.talks_over_grpc:
        end_without_teardown()


def end_without_teardown() -> NoReturn:
    """End this process with status 0, after all that its own code still wants to do, but take no library apart.

    gRPC's threads live as long as the process. One of them may still be at work when Python frees what it works on, and gRPC then
    aborts the process (https://github.com/grpc/grpc/issues/39942), although the rank has done all of its work. Call this while
    the transport is still referred to.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  what Python itself calls: it waits for threads
    atexit._run_exitfuncs()  # noqa: SLF001  so it does with these functions
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        ctypes.CDLL(None).fflush(None)  # what extension modules have printed
    finally:
        os._exit(0)


@contextmanager
def _stacks_on_demand(path: Path) -> Iterator[None]:
    """Write what all threads are doing to a file at every SIGUSR2, also while the main thread waits in MPI or in C."""
    contract.make_private_folder(path.parent)
    with open(path, "ab", buffering=0, opener=contract.open_private) as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR2)


class WorldSizeError(RuntimeError):
    """The world that MPI gives this rank is not the one that was planned."""


class _RankRun:
    """One rank's life. What a failure record needs is kept here, because a failure may come at any line."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.run_dir = Path(environment[contract.ENV_RUN_DIR])
        self.rank = Rank(int(environment[contract.ENV_RANK]))
        self.role = environment.get(contract.ENV_ROLE, "")
        self.plan_file = Path(environment[contract.ENV_PLAN])
        self.recipe_folder: Path | None = None
        self.context: Any = None
        self.talks_over_grpc = False
        self.records: ProgressWriter
        self.exceptions = ExceptionWatch(
            str(self.run_dir / contract.exceptions_file(self.rank)), opener=contract.open_private, last=_THIS_FILE
        )

    def run(self) -> None:
        self.exceptions.start()
        keep_if_unlimited(os.environ)
        world = read_world(self.plan_file)
        self.role, self.recipe_folder = world.roles[self.rank], world.recipe_folder
        self.talks_over_grpc = not world.uses_mpi
        recorder = open_flight_recorder(os.environ, rank=self.rank)
        self.records = ProgressWriter(self.run_dir, self.rank)
        joining, reading, importing, _ = contract.START_STAGES
        self._begin(joining)
        comm = None
        if world.uses_mpi:
            with recorder.meeting("MPI_Init"):
                comm = _join_world(world, self.rank)
        recipe = import_recipe_module(world.recipe_folder, "recipe").RECIPE
        cfg = read_config(recipe, world.config)
        if recipe.uses_data:
            self._begin(reading)
        corpus = read_checked_corpus(recipe, world)
        if "torch" not in sys.modules:  # else this rank is a fork of a process that has imported it
            self._begin(importing)
        self._call_role(world, comm, cfg, corpus=corpus, recorder=recorder)
        if comm is not None:
            _leave_world()

    def _begin(self, stage: str) -> None:
        """Report a stage of the start-up, so that the launcher can say what a slow start waits for."""
        self.records.write(contract.KIND_STARTING, stage=stage)

    def _call_role(
        self,
        world: World,
        comm: "MPI.Intracomm | None",
        cfg: ConfigFile,
        *,
        corpus: Corpus | None,
        recorder: FlightRecorder,
    ) -> None:
        """Open the transport, call the role's function, and close the transport when all ranks have returned."""
        from ttlaunch.runtime.comm.clocks import clocks_compared  # noqa: PLC0415
        from ttlaunch.runtime.early_stop import make_early_stop  # noqa: PLC0415

        device = choose_device(cfg.device_config, local_rank=world.local_ranks[self.rank])
        function = self._function(world)
        self._begin(contract.START_STAGES[-1])
        records, traffic = self.records, self._open_traffic(world, recorder)
        stop_order = self._stop_order(world, records)
        life = self._open_elastic(world, traffic=traffic, stop_order=stop_order) if world.is_elastic else None
        with recorder.meeting("opening of the transport"):
            opened = None if life is None else life.communicator
            communicator = opened or _open_communicator(cfg, comm, world, rank=self.rank, device=device)
        self.context = _context_class(os.environ)(
            world=world,
            rank=self.rank,
            communicator=communicator,
            records=records,
            device=device,
            corpus=corpus,
            checkpoints=self._checkpoints(world, cfg, records),
            digests=self._digests(cfg),
            early_stop=make_early_stop(cfg, world.start),
            stop_order=stop_order,
            traffic=traffic,
            elastic=None if life is None else life.member,
        )
        ready = {"total_steps": self.context.data(cfg).total_steps} if corpus else {}
        records.write(contract.KIND_READY, **ready)
        role = partial(function, cfg, self.context)
        with clocks_compared(traffic.trace, communicator, world_size=world.size):
            role() if life is None else life.run(role)
            self.context.finish()
            recorder.announce(flight_recorder.DONE)
        records.write(contract.KIND_DONE)
        if life is None:
            communicator.barrier()  # MPI's own wait for the last rank, in Finalize, would burn a core
        communicator.close()

    def _open_traffic(self, world: World, recorder: FlightRecorder) -> "TrafficCounter":
        from ttlaunch.runtime.telemetry.profile import open_profile  # noqa: PLC0415
        from ttlaunch.runtime.telemetry.trace import open_trace  # noqa: PLC0415
        from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter  # noqa: PLC0415

        profile = open_profile(self.run_dir, rank=self.rank)
        trace = None if world.is_elastic else open_trace(self.run_dir, self.rank)  # later ranks compare no clocks
        counted = self.run_dir / contract.traffic_file(self.rank)
        return TrafficCounter(counted, trace=trace, recorder=recorder, profile=profile)

    def _function(self, world: World) -> Callable[..., object]:
        """Return the function of this rank's role."""
        trainer = import_recipe_module(world.recipe_folder, world.trainer)
        function: Callable[..., object] | None = getattr(trainer, self.role, None)
        if function is None:
            raise AttributeError(f"{trainer.__file__} has no function `{self.role}` for the role of that name")
        gc.freeze()  # torch and all else is imported by now, and no collection looks at it again
        gc.enable()
        return function

    def _open_elastic(self, world: World, *, traffic: "TrafficCounter", stop_order: StopOrder) -> "ElasticLife":
        from ttlaunch.runtime.elastic.life import ElasticLife  # noqa: PLC0415  gRPC takes its time

        return ElasticLife(world, self.rank, os.environ, records=self.records, traffic=traffic, stop_order=stop_order)

    def _stop_order(self, world: World, records: ProgressWriter) -> StopOrder:
        order = StopOrder(steps_done=int(world.start["step"]) if world.start else 0)
        if os.environ[contract.ENV_RUN_ID] != contract.BY_HAND:

            def answer(step: int) -> None:
                records.write(contract.KIND_STOPPING, step=step)

            take_stop_signals(order, run_dir=self.run_dir, answer=answer)
        return order

    def _digests(self, cfg: ConfigFile) -> "ReplicaDigests | None":
        from ttlaunch.runtime.checkpoint.digests import make_digests  # noqa: PLC0415

        return make_digests(cfg, self.records)

    def _checkpoints(self, world: World, cfg: ConfigFile, records: ProgressWriter) -> "Checkpoints | None":
        from ttlaunch.runtime.checkpoint.checkpoints import Checkpoints  # noqa: PLC0415

        if not isinstance(cfg, TrainingFile):
            return None
        return Checkpoints(
            cfg.checkpoint_config,
            run_dir=self.run_dir,
            rank=self.rank,
            start=world.start,
            lose=lambda step, reason: records.write(contract.KIND_LOST_CHECKPOINT, step=step, reason=reason),
        )

    def fail(self, error: BaseException) -> NoReturn:
        """Record the error for the launcher and on standard error, and end the process at once, without waiting for any peer."""
        try:
            self.exceptions.note(error)
            print_error(error)
            step = self.context.step if self.context is not None else 0
            if self.context is not None:
                self.context.traffic.close()
            write_error(
                self.run_dir,
                self.rank,
                error,
                role=self.role,
                step=step,
                recipe_folder=self.recipe_folder,
                seen=self.exceptions.first_seen(error),
            )
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(contract.STATUS_RANK_FAILED)


def _context_class(environment: Mapping[str, str]) -> "Callable[..., RankContext]":
    """Return what makes the context of a rank: under `ttlaunch chaos`, one may flip a bit."""
    from ttlaunch.runtime.context import RankContext  # noqa: PLC0415  torch is imported after the world is checked

    if contract.ENV_FLIP not in environment:
        return RankContext
    from ttlaunch.runtime.flipped_bit import context_that_flips  # noqa: PLC0415  no other run needs it

    return context_that_flips(environment[contract.ENV_FLIP])


def read_config(recipe: Recipe, values: Mapping[str, Any]) -> ConfigFile:
    """Validate the configuration again, with the class that the recipe on this host declares, and secrets filled in.

    Raises:
        KeyError: The value of an `env:NAME` did not reach this rank.
        pydantic.ValidationError: The host's recipe has other keys than the launching machine's.
    """
    return recipe.config.model_validate_json(json.dumps(_with_secrets(values)))


def _with_secrets(value: Any) -> Any:
    """The configuration with the values that its `env:NAME` stand for."""
    if isinstance(value, Mapping):
        return {key: _with_secrets(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_secrets(part) for part in value]
    name = contract.referred_variable(value) if isinstance(value, str) else None
    return value if name is None else os.environ[name]


def _join_world(world: World, rank: Rank) -> "MPI.Intracomm":
    """Start MPI and check that the world is the plan's.

    With `mpirun` of one MPI and the library of another, N worlds of one rank come up and each would train alone.
    """
    import mpi4py  # noqa: PLC0415  starting MPI is this function's job

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI  # noqa: PLC0415

    # Gradients of a GPU are sent by the thread in which autograd computes them, while this one waits for it.
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    comm = MPI.COMM_WORLD
    if world.size != comm.size:
        library = MPI.Get_library_version().split(",")[0].strip("\0")
        noun = "rank" if comm.size == 1 else "ranks"
        raise WorldSizeError(
            f"the MPI world has {comm.size} {noun}, the plan has {world.size}; the program that started this rank does "
            f"not belong to the MPI library it uses ({library})"
        )
    if rank != comm.rank:
        raise WorldSizeError(f"MPI says this is rank {comm.rank}, its environment says rank {rank}")
    return comm


def _open_communicator(
    cfg: ConfigFile, comm: "MPI.Intracomm | None", world: World, *, rank: Rank, device: "torch.device"
) -> "FabricCommunicator | GrpcCommunicator | MpiCommunicator":
    """Open the transport that `multihost_config.socket_type` asks for. Collective."""
    if comm is None:
        from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator  # noqa: PLC0415  gRPC takes its time
        from ttlaunch.runtime.comm.grpc.directory import read_directory  # noqa: PLC0415

        return GrpcCommunicator(read_directory(world, os.environ), rank=rank)
    from ttlaunch.runtime.comm.mpi import MpiCommunicator  # noqa: PLC0415  after the world is checked

    over_mpi = MpiCommunicator(comm, world=world, rank=rank)
    if cfg.multihost_config.socket_type == "mpi":
        return over_mpi
    from ttlaunch.runtime.comm.fabric import FabricCommunicator  # noqa: PLC0415  torch.distributed takes its time

    return FabricCommunicator(over_mpi, world=world, device=device)


def _leave_world() -> None:
    from mpi4py import MPI  # noqa: PLC0415

    MPI.Finalize()


def read_checked_corpus(recipe: Recipe, world: World) -> Corpus | None:
    """The training text, the same as the launching machine's; None for a recipe that reads none."""
    if not recipe.uses_data:
        return None
    corpus = read_data(world.data_path)
    if world.data_sha256 not in {None, corpus.sha256}:
        raise CorpusError(
            CorpusReason.UNREADABLE,
            f"{corpus.name} differs from the launching machine's: SHA-256 {corpus.sha256[:12]}…, "
            f"expected {str(world.data_sha256)[:12]}…",
            path=world.data_path,
        )
    return corpus


def choose_device(cfg: DeviceConfig, *, local_rank: int) -> "torch.device":
    """What a rank computes on; sets torch's threads, and for a CUDA device also this thread's device and which kernels are allowed."""
    import torch  # noqa: PLC0415  after the world is checked

    torch.set_num_threads(cfg.threads_per_rank)
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    if not cuda:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        raise RuntimeError(f"`device_config.device` is cuda, and torch finds no CUDA device on this host{why}")
    if cfg.deterministic:
        # The backward pass of attention adds with atomics otherwise, and products may divide their sums by what other streams do.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is a property
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
