"""`python -m ttlaunch.runtime.simulate`: run all ranks of a plan in this process, and check the messages between them.

The simulation writes the records that ranks write, and `simulation.json` with the mistakes in the messages, the bytes between each
pair of ranks and the memory used. With `--checkpoints` it also writes the shards of checkpoints. If the folder has
`replay-order.json`, it replays a run up to a step, and writes what the ranks had there to `replay.json`.
"""

import faulthandler
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

from ttlaunch import contract
from ttlaunch.records.replay import ReplayOrder
from ttlaunch.runtime.checkpoint.checkpoints import Checkpoints
from ttlaunch.runtime.checkpoint.digests import make_digests
from ttlaunch.runtime.comm.in_process import InProcessWorld, Outcome
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.early_stop import make_early_stop
from ttlaunch.runtime.entry import choose_device, read_checked_corpus, read_config
from ttlaunch.runtime.replay.replayed_context import ReplayedContext, WatchedTraffic, is_left
from ttlaunch.runtime.replay.result import read_order, write_shown
from ttlaunch.runtime.resident import peak_resident_bytes
from ttlaunch.runtime.telemetry.records import ProgressWriter, print_error, write_error
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.world import Rank, World, read_world
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.sections import ConfigFile, TrainingFile


def main() -> None:
    """Run the world that the environment names; status 1 if a rank failed or its messages are wrong."""
    faulthandler.enable()
    run_dir = Path(os.environ[contract.ENV_RUN_DIR])
    world = read_world(Path(os.environ[contract.ENV_PLAN]))
    order = read_order(run_dir)
    try:
        outcome, contexts = simulate_ranks(world, run_dir, saves="--checkpoints" in sys.argv[1:], order=order)
        if order is not None and order.shown:
            write_shown(run_dir, order, contexts.values())
    except Exception as error:  # noqa: BLE001  whatever keeps ranks from starting is reported as their failure
        print_error(error)
        write_error(run_dir, 0, error, role=world.roles[0], step=0, recipe_folder=world.recipe_folder)
        sys.exit(contract.STATUS_RANK_FAILED)
    if any(map(is_left, outcome.errors.values())):
        return  # somebody has left the debugger, and nothing is wrong
    if outcome.errors or outcome.findings:
        sys.exit(contract.STATUS_RANK_FAILED)


def simulate(world: World, run_dir: Path, *, saves: bool) -> Outcome:
    """Run every role to its end, or to the first failure, and leave the records in `run_dir`; shards too if it `saves`."""
    return simulate_ranks(world, run_dir, saves=saves)[0]


def simulate_ranks(
    world: World, run_dir: Path, *, saves: bool = False, order: ReplayOrder | None = None
) -> tuple[Outcome, dict[Rank, RankContext]]:
    """Run every role to its end, to the step of an order, or to the first failure, and leave the records in `run_dir`.

    Returns:
        How the world ended, and the contexts of all ranks, which are `ReplayedContext` if there is an order.
    """
    recipe = import_recipe_module(world.recipe_folder, "recipe").RECIPE
    cfg = read_config(recipe, world.config)
    corpus = read_checked_corpus(recipe, world)
    trainer = import_recipe_module(world.recipe_folder, world.trainer)
    ranks = [Rank(rank) for rank in range(world.size)]
    in_process = InProcessWorld(world.roles)
    contexts: dict[Rank, RankContext] = {}
    lives = {
        rank: partial(
            _live,
            cfg,
            world,
            rank,
            in_process=in_process,
            trainer=trainer,
            corpus=corpus,
            run_dir=run_dir,
            saves=saves,
            order=order,
            contexts=contexts,
        )
        for rank in ranks
    }
    outcome = in_process.run(lives)
    for rank, error in outcome.errors.items():
        if is_left(error):
            continue
        if not (
            isinstance(error, CommunicationError) and outcome.findings
        ):  # else the finding reports it, with both sides
            print_error(error)
        step = contexts[rank].step if rank in contexts else 0
        write_error(run_dir, rank, error, role=world.roles[rank], step=step, recipe_folder=world.recipe_folder)
    (run_dir / contract.SIMULATION_FILE).write_text(json.dumps(_as_json(outcome), indent=1) + "\n", encoding="utf-8")
    return outcome, contexts


def _live(
    cfg: ConfigFile,
    world: World,
    rank: Rank,
    *,
    in_process: InProcessWorld,
    trainer: ModuleType,
    corpus: Corpus | None,
    run_dir: Path,
    saves: bool,
    order: ReplayOrder | None,
    contexts: dict[Rank, RankContext],
) -> None:
    """One rank from its first line to its last, as `entry.py` does it for a process."""
    role = world.roles[rank]
    function = getattr(trainer, role, None)
    if function is None:
        raise AttributeError(f"{trainer.__file__} has no function `{role}` for the role of that name")
    device = choose_device(cfg.device_config, local_rank=world.local_ranks[rank])
    records = ProgressWriter(run_dir, rank)
    checkpoints = _checkpoints(cfg, world, rank, run_dir=run_dir, saves=saves, records=records)
    make_context = RankContext if order is None else partial(ReplayedContext, order)
    make_traffic = TrafficCounter if order is None else WatchedTraffic
    ctx = make_context(
        world=world,
        rank=rank,
        communicator=in_process.communicator(rank),
        records=records,
        device=device,
        corpus=corpus,
        checkpoints=checkpoints,
        digests=make_digests(cfg, records),
        early_stop=make_early_stop(cfg, world.start),
        traffic=make_traffic(run_dir / contract.traffic_file(rank)),
    )
    contexts[rank] = ctx
    records.write(
        contract.KIND_READY, **({"total_steps": ctx.data(cfg).total_steps} if isinstance(cfg, TrainingFile) else {})
    )
    function(cfg, ctx)
    ctx.finish()
    records.write(contract.KIND_DONE)
    records.close()


def _checkpoints(
    cfg: ConfigFile,
    world: World,
    rank: Rank,
    *,
    run_dir: Path,
    saves: bool,
    records: ProgressWriter,
) -> Checkpoints | None:
    """Make the checkpoints of a rank: it begins from the same state as in a run, and saves only if the simulation keeps its results."""
    if not isinstance(cfg, TrainingFile):
        return None
    config = cfg.checkpoint_config if saves else cfg.checkpoint_config.model_copy(update={"interval": None})
    return Checkpoints(
        config,
        run_dir=run_dir,
        rank=rank,
        start=world.start,
        lose=lambda step, reason: records.write(contract.KIND_LOST_CHECKPOINT, step=step, reason=reason),
    )


def _as_json(outcome: Outcome) -> dict[str, object]:
    edges = [
        {"source": source, "dest": dest, "messages": count, "bytes": outcome.message_bytes[source, dest]}
        for (source, dest), count in sorted(outcome.messages.items())
    ]
    findings = [finding.as_json() for finding in outcome.findings]
    return {"findings": findings, "edges": edges, "peak_memory_bytes": peak_resident_bytes()}


if __name__ == "__main__":
    main()
