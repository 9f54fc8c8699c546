"""What came out of a run, read from its folder and told to the user."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.cli.console import needs_no_reader, print_json, show_diagnostics
from ttlaunch.diagnostics import Diagnostic, Format

if TYPE_CHECKING:
    from ttlaunch.running.report import Report
    from ttlaunch.running.runs.recorded import RunFacts
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


def tell(
    outcome: Outcome,
    *,
    form: Format,
    more: Sequence[Diagnostic] = (),
    restarts: Sequence[Outcome] = (),
    exit_status: int | None = None,
) -> None:
    """Say what came out.

    Args:
        outcome: Of the run; of several starts, the last.
        form: Of what is printed.
        more: What else is to be said of it.
        restarts: The starts before it, which JSON has too.
        exit_status: Of the command, if it is not that of the run.
    """
    from ttlaunch.cli.checkpoint_view import checkpoint_diagnostics
    from ttlaunch.cli.ending_view import outstayed_diagnostics
    from ttlaunch.cli.summary import failure_diagnostic, show_summary
    from ttlaunch.cli.traffic_view import traffic_diagnostics
    from ttlaunch.cli.unkept_view import unkept_diagnostics

    report, facts, folder = outcome.report, outcome.facts, outcome.folder
    failure, lost = failure_diagnostic(report, folder), checkpoint_diagnostics(report)
    is_done = report.status == "done"  # else the first thing named is what broke
    differences = traffic_diagnostics(report.traffic, [row.role for row in facts.ranks]) if is_done else []
    found = [
        *([failure] if failure else []),
        *outstayed_diagnostics(report, folder),
        *lost,
        *unkept_diagnostics(report.ranks),
        *differences,
        *more,
    ]
    if form is Format.JSON:
        earlier = [{"run_id": one.folder.run_id, "failure": one.report.as_json()["failure"]} for one in restarts]
        texts = [diagnostic.as_json() for diagnostic in found]
        status = report.exit_status if exit_status is None else exit_status
        print_json({**report.as_json(), "exit_status": status, "earlier": earlier, "diagnostics": texts})
    else:
        timeline = folder.file(contract.TRACE_FILE)
        with needs_no_reader(sys.stdout):
            show_summary(report, facts, folder, timeline=timeline if timeline.is_file() else None, stream=sys.stdout)
        show_diagnostics(found, form=form)
