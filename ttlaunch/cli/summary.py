"""The end of a run in a few lines, and its failure as a diagnostic that names who broke first."""

from typing import TextIO

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.launch.report import Report
from ttlaunch.launch.run_folder import RunFolder
from ttlaunch.plan.launch_plan import LaunchPlan

_LAST_LINES = 3
_PATIENCE_OF_LINES = 400


def show_summary(report: Report, plan: LaunchPlan, folder: RunFolder, *, stream: TextIO) -> None:
    """What came out."""
    layout = f" ({report.layout})" if report.layout else ""
    lines = [
        f"{report.status}: {report.name}{layout} on {plan.topology}, {report.world_size} ranks, {report.duration_s:.1f} s"
    ]
    if report.steps:
        lines.append(f"  steps            {report.steps}")
    if report.first_validation is not None and report.last_validation is not None:
        change = (report.last_validation / report.first_validation - 1) * 100
        lines.append(
            f"  validation loss  {report.first_validation:.4f} first, {report.last_validation:.4f} last ({change:+.0f} %)"
        )
    if report.tokens_per_s:
        lines.append(f"  speed            {report.tokens_per_s:,.0f} tokens/s")
    lines += [f"  {name:16} {_plain(value)}" for name, value in report.results.items()]
    if report.parameters_sha256:
        agree = "" if report.parameters_agree else " (ranks DISAGREE)"
        lines.append(f"  parameters       sha256 {report.parameters_sha256}{agree}")
    if report.leftovers:
        lines.append(f"  left behind      {report.leftovers} processes, killed")
    lines.append(f"  run folder       {_short(folder)}")
    stream.write("\n".join(lines) + "\n")
    stream.flush()


def failure_diagnostic(report: Report, folder: RunFolder) -> Diagnostic | None:
    """Who broke first, how, its last words and where the whole log is; None if nobody did."""
    failure = report.failure
    if failure is None:
        return None
    notes = list(failure.evidence)
    if failure.rank is not None and report.world_size > 1:
        notes.append(f"the first rank to fail; mpirun then stopped the other {report.world_size - 1}")
    hints = []
    if failure.rank is not None:
        log = folder.file(contract.stderr_file(failure.rank))
        words = _last_words(log)
        if words and not failure.place:
            notes.append(f"its last words: `{words}`")
        hints.append(f"full log: {_short(folder)}/{contract.stderr_file(failure.rank)}")
    return Diagnostic(failure.code, failure.message, notes=tuple(notes), hints=tuple(hints))


def _last_words(log: "object") -> str:
    from pathlib import Path

    try:
        data = Path(str(log)).read_bytes()[-65536:]
    except OSError:
        return ""
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:_PATIENCE_OF_LINES] if lines else ""


def _short(folder: RunFolder) -> str:
    from pathlib import Path

    try:
        return str(folder.path.relative_to(Path.cwd()))
    except ValueError:
        return str(folder.path)


def _plain(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
