"""Which ranks write checkpoints where servers have the weights: the workers, too, if something of theirs goes on with training."""

from typing import Literal

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.parallel.compression.saved import remembers
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import CompressionConfig


def owners_of_checkpoints(
    ctx: RankContext, cfg: CompressionConfig, *, straggler: Literal["wait", "drop", "fail"]
) -> tuple[Rank, ...]:
    """The servers; and the workers where their codecs remember something, and every step waits for all of them anyway.

    With `drop` nobody waits for a late worker, and no checkpoint does: it would be whole only when that one is back. So
    there, as with an asynchronous server, what workers owe is not kept.
    """
    servers, keeps = ctx.ranks("server"), remembers(cfg) and straggler != "drop"
    return (*ctx.ranks("worker"), *servers) if keeps else servers


def note_what_is_not_kept(ctx: RankContext, cfg: CompressionConfig) -> None:
    """Tell the user of a run that goes on from a checkpoint which had to do without the workers; the first of them does."""
    if ctx.steps_done and remembers(cfg) and not ctx.position("worker"):
        ctx.note(
            "checkpoints here wait for no worker, so what workers' codecs still owed is not kept: they owe nothing now"
        )
