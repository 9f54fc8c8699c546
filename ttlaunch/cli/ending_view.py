"""What came of an ordered end: the step that was saved, the command that goes on from it, and ranks that would not leave."""

from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.resolve import short_name
from ttlaunch.diagnostics import Diagnostic, Severity
from ttlaunch.running.report import Report
from ttlaunch.running.runs.run_folder import RunFolder

_MOST_RANKS = 5


def render_stop(report: Report) -> list[str]:
    """Lines for the summary; none where no end was ordered or nothing could be saved."""
    stop = report.stopped or {}
    saved, again = stop.get("saved_step"), stop.get("resume")
    lines = [f"  saved            step {saved}"] if saved is not None else []
    return [*lines, f"  go on with       {again}"] if again else lines


def outstayed_diagnostics(report: Report, folder: RunFolder) -> list[Diagnostic]:
    """A warning about ranks that had to be killed because they were still there when their grace was over."""
    late = (report.stopped or {}).get("outstayed") or []
    if not late:
        return []
    who = [f"{one['rank']} ({report.ranks[one['rank']]['role']}, {report.ranks[one['rank']]['host']})" for one in late]
    more = [f"{len(who) - _MOST_RANKS} more"] if len(who) > _MOST_RANKS else []
    noun, was = ("rank", "was") if len(who) == 1 else ("ranks", "were")
    names = ", ".join([*who[:_MOST_RANKS], *more])
    message = f"{noun} {names} had not left after {late[0]['after_s']:g} s and {was} killed"
    stacks = [name for one in late if _has_text(folder.file(name := contract.stacks_file(one["rank"])))]
    notes = [f"what it was doing: {short_name(folder.path, Path.cwd())}/{name}" for name in stacks[:_MOST_RANKS]]
    hint = "`--grace SECONDS` gives ranks more time to finish their step"
    return [Diagnostic("R018", message, notes=tuple(notes), hints=(hint,), severity=Severity.WARNING)]


def _has_text(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
