"""Say of each checkpoint that a run loses that it is lost, once and at once, and remove what there is of it in the end."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ttlaunch.running.checkpoints.complete import remove_unfinished
from ttlaunch.running.logs.output import View
from ttlaunch.running.watch import RankState


class LostCheckpoints:
    """The checkpoints that a run lost, where the configuration says that it goes on without them.

    Attributes:
        reasons: Which file could not be written, and why, by step.
    """

    def __init__(self, view: View) -> None:
        self.reasons: dict[int, str] = {}
        self._view = view

    def notice(self, ranks: Iterable[RankState], uncompleted: Mapping[int, str]) -> None:
        """Say what is new.

        Args:
            ranks: Which know of shards that they could not write; several of one checkpoint are one loss.
            uncompleted: Reasons by step, of checkpoints whose shards had arrived.
        """
        for losses in (*(state.lost_checkpoints for state in ranks), uncompleted):
            for step, reason in dict(losses).items():
                if step not in self.reasons:
                    self.reasons[step] = reason
                    line = f"warning[R032]: step {step} has no checkpoint: {reason}"
                    self._view.output("stderr", line.encode("utf-8", "replace"))

    def clean_up(self, run_folder: Path) -> dict[int, str]:
        """Remove the unfinished folders of lost checkpoints; the reasons in order of steps."""
        remove_unfinished(run_folder, steps=self.reasons)
        return dict(sorted(self.reasons.items()))
