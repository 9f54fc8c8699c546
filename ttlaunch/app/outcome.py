"""The result of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttlaunch.running.report import Report
    from ttlaunch.running.runs.facts import RunFacts
    from ttlaunch.running.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Outcome:
    """A run that has come to its end.

    Attributes:
        scratch: Its folder in shared memory on every host, which is gone by now; None where only its folder was read.
    """

    report: "Report"
    facts: "RunFacts"
    folder: "RunFolder"
    scratch: Path | None = None
