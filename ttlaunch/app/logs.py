"""Choose ranks and streams of a run's output, and read their lines."""

import time
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from ttlaunch.diagnostics import did_you_mean, listed, shown, usage_error
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.logs.fold import only_choices, parse_only
from ttlaunch.running.logs.merged import Line, MergedLog
from ttlaunch.running.runs.launcher import is_running

_TICK_S = 0.1
_TOGETHER = 1024
STREAMS = ("stdout", "stderr")


def chosen_ranks(only: Collection[str], rows: "Collection[RankRow]") -> frozenset[int]:
    """Return the ranks that `--only` names, or all of them if it is empty.

    Raises:
        LaunchError: One of the values names no rank.
    """
    chosen = parse_only(list(only), list(rows))
    if isinstance(chosen, str):
        known = only_choices(list(rows))
        message = f"`--only {shown(chosen)}` names no rank of this run"
        notes = (f"it has {listed(known, last='and')}",)
        raise usage_error(message, *did_you_mean(chosen, known), code="P040", notes=notes)
    return chosen


def chosen_streams(stream: str | None) -> Sequence[str]:
    """Return the named stream, or both if none is named.

    Raises:
        LaunchError: The name is neither `stdout` nor `stderr`.
    """
    if stream is None:
        return STREAMS
    if stream not in STREAMS:
        message = f"`--stream {shown(stream)}` is neither `stdout` nor `stderr`"
        raise usage_error(message, *did_you_mean(stream, STREAMS), code="P041")
    return (stream,)


def read_lines(
    folder: Path, rows: "Sequence[RankRow]", *, only: Collection[int], streams: Collection[str], follow: bool
) -> Iterator[list[Line]]:
    """Yield the lines of some ranks and streams in the order in which they were printed, a list at a time.

    Args:
        folder: The run's folder.
        rows: The rows of all ranks.
        only: The ranks whose lines are read.
        streams: The streams that are read.
        follow: Whether to continue until the run has ended.
    """
    log = MergedLog(folder, [row.rank for row in rows])
    while True:
        is_active = is_running(folder)  # asked first: a run that ends now may still have lines to read
        lines = chain(log.poll(), [] if is_active else log.rest())
        chosen = (line for line in lines if line.rank in only and line.stream in streams)
        while some := list(islice(chosen, _TOGETHER)):
            yield some
        if not is_active or not follow:
            return
        time.sleep(_TICK_S)
