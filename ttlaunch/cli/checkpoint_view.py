"""What a run has no checkpoint of, as a diagnostic at its end."""

from ttlaunch.diagnostics import Diagnostic, Severity
from ttlaunch.running.report import Report

_MOST_STEPS = 20
_MOST_REASONS = 3


def checkpoint_diagnostics(report: Report) -> list[Diagnostic]:
    """A warning that names all steps whose checkpoint is lost; empty if none is."""
    lost = report.lost_checkpoints
    if not lost:
        return []
    have = "step {} has" if len(lost) == 1 else "steps {} have"
    notes = [f"step {step}: {reason}" for step, reason in list(lost.items())[:_MOST_REASONS]]
    left = len(lost) - _MOST_REASONS
    notes += [f"and {left} more; `report.json` has all reasons"] if left > 0 else []
    hint = "make room, or put run folders somewhere else with `--runs-dir DIR`"
    message = f"{have.format(lost_steps(report))} no checkpoint"
    return [Diagnostic("R032", message, notes=tuple(notes), hints=(hint,), severity=Severity.WARNING)]


def lost_steps(report: Report) -> str:
    """The first steps without a checkpoint, and how many more there are."""
    steps = [str(step) for step in report.lost_checkpoints]
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return ", ".join(steps[:_MOST_STEPS]) + more
