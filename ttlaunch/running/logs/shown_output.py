"""What is shown of the ranks' output while a run goes on: chosen lines, folded, from the files of the run's folder.

The launcher writes those files; whoever shows them needs nothing else of it.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.logs.fold import Fold, render_line
from ttlaunch.running.logs.merged import Line, MergedLog


class ShownOutput:
    """Lines for a view; each call of `poll` takes what is new."""

    def __init__(
        self, folder: Path, rows: Sequence[RankRow], *, only: Collection[int], streams: Collection[str]
    ) -> None:
        """Begin.

        Args:
            folder: The run's.
            rows: All ranks of the run.
            only: The ranks whose lines are shown.
            streams: Of `stdout` and `stderr`, those that are shown.
        """
        self._log = MergedLog(folder, [row.rank for row in rows])
        self._roles = [row.role for row in rows]
        self._only = only
        self._streams = streams
        self._fold = Fold(len(only))

    def poll(self) -> list[tuple[str, bytes]]:
        """The stream of each line that is due, and the line."""
        self._fold.add(line for line in self._log.poll() if self._is_shown(line))
        return self._take(everything=False)

    def finish(self, *, rest: bool = False) -> list[tuple[str, bytes]]:
        """Everything that is left; with `rest` also what the launcher did not get to put in order."""
        self._fold.add(line for line in self._log.poll() if self._is_shown(line))
        if rest:
            self._fold.add(line for line in self._log.rest() if self._is_shown(line))
        return self._take(everything=True)

    def _is_shown(self, line: Line) -> bool:
        return line.rank in self._only and line.stream in self._streams

    def _take(self, *, everything: bool) -> list[tuple[str, bytes]]:
        taken = self._fold.take(everything=everything)
        return [(line.stream, render_line(line, ranks, roles=self._roles)) for line, ranks in taken]
