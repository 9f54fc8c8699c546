"""The result of a run."""

from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.running.report import Report
    from ttlaunch.running.runs.facts import RunFacts
    from ttlaunch.running.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Outcome:
    """A run that has ended.

    Attributes:
        scratch: The path of the run's former folder in shared memory; None if the outcome was read from the run's folder.
    """

    report: "Report"
    facts: "RunFacts"
    folder: "RunFolder"
    scratch: Path | None = None
