"""Makes a model known to its rank: its passes stand in the books, and what becomes of its loss scale is told."""

from typing import TYPE_CHECKING

from ttlaunch.runtime.context import RankContext

if TYPE_CHECKING:
    from ttlaunch.runtime.model.model import Model


def introduce(model: "Model", ctx: RankContext, *, values: int) -> None:
    """Let a model enter its passes in the rank's books, and say what becomes of its loss scale."""
    if model.loss_scaler.is_on:
        is_teller = ctx.position(ctx.role) == 0  # of ranks that update alike, one tells the user
        model.loss_scaler.tell(
            ctx.result, note=(lambda text: ctx.note(f"step {ctx.step}: {text}")) if is_teller else None
        )
    model.ledger = ctx.watch(model, values=values)
