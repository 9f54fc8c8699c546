"""Which ranks write checkpoints where servers have the weights: also workers, if training needs their state."""

from typing import Literal

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.parallel.compression.saved import remembers
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import CompressionConfig


def owners_of_checkpoints(
    ctx: RankContext, cfg: CompressionConfig, *, straggler: Literal["wait", "drop", "fail"]
) -> tuple[Rank, ...]:
    """Return the servers, and also the workers if their codecs have a state and every step waits for all workers.

    With `drop`, no step waits for a late worker. A checkpoint with the workers' codec states would have to wait for it, so checkpoints
    leave these states out, as they do with an asynchronous server.
    """
    servers, keeps = ctx.ranks("server"), remembers(cfg) and straggler != "drop"
    return (*ctx.ranks("worker"), *servers) if keeps else servers


def note_lost_remainders(ctx: RankContext, cfg: CompressionConfig) -> None:
    """Note in a resumed run that the checkpoint lacks the remainders of workers' codecs; only the first worker does so."""
    if ctx.steps_done and remembers(cfg) and not ctx.position("worker"):
        ctx.note(
            "checkpoints of this run wait for no worker, so they lack the remainders of workers' codecs, which begin at 0"
        )
