"""The order of a replay, and what it leaves of the step that it shows, as files of its folder."""

import json
from collections.abc import Iterable
from pathlib import Path

from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.replay import ORDER_FILE, ReplayEnd, ReplayOrder, as_json, cut, file_of_piece
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.replay.replayed_context import ReplayedContext


def read_order(run_dir: Path) -> ReplayOrder | None:
    """Return what is to be replayed; None if the folder is no replay's.

    Raises:
        ValueError: The file cannot be used.
    """
    try:
        content = (run_dir / ORDER_FILE).read_bytes()
    except FileNotFoundError:
        return None
    order = read(ReplayOrder, content)
    if isinstance(order, BadRecord):
        raise ValueError(f"{ORDER_FILE}: {order.reason}")  # noqa: TRY004 - the file is wrong, not the caller
    return order


def write_shown(run_dir: Path, order: ReplayOrder, contexts: Iterable[RankContext]) -> None:
    """Write what all ranks had in the step that is shown."""
    ranks = sorted((ctx for ctx in contexts if isinstance(ctx, ReplayedContext)), key=lambda ctx: ctx.rank)
    end = ReplayEnd(step=order.step, ranks=tuple(ctx.shown() for ctx in ranks))
    for number, piece in enumerate(cut(end)):
        (run_dir / file_of_piece(number)).write_text(json.dumps(as_json(piece)) + "\n", encoding="utf-8")
