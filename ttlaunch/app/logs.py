"""Which ranks and streams somebody wants to see of what a run prints."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ttlaunch.diagnostics import did_you_mean, listed, shown, usage_error
from ttlaunch.running.logs.fold import only_choices, parse_only

if TYPE_CHECKING:
    from ttlaunch.planning.launch_plan import RankRow

STREAMS = ("stdout", "stderr")


def chosen_ranks(only: Collection[str], rows: "Collection[RankRow]") -> frozenset[int]:
    """The ranks that `--only` names; all of them if it names nothing.

    Raises:
        LaunchError: One of its words names no rank.
    """
    chosen = parse_only(list(only), list(rows))
    if isinstance(chosen, str):
        known = only_choices(list(rows))
        message = f"`--only {shown(chosen)}` names no rank of this run"
        notes = (f"it has {listed(known, last='and')}",)
        raise usage_error(message, *did_you_mean(chosen, known), code="P040", notes=notes)
    return chosen


def chosen_streams(stream: str | None) -> Sequence[str]:
    """The one that is named, or both.

    Raises:
        LaunchError: It is neither.
    """
    if stream is None:
        return STREAMS
    if stream not in STREAMS:
        message = f"`--stream {shown(stream)}` is neither `stdout` nor `stderr`"
        raise usage_error(message, *did_you_mean(stream, STREAMS), code="P041")
    return (stream,)
