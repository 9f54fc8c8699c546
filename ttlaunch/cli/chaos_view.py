"""Show the result of a run with injected faults: as a table, as JSON and as diagnostics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttlaunch.app.outcome import Outcome
from ttlaunch.app.run_spec import short_name
from ttlaunch.cli.console import print_lines
from ttlaunch.cli.summary import show_summary
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import Diagnostic, counted, listed
from ttlaunch.lab.chaos.audit import Leftovers
from ttlaunch.lab.chaos.verdict import Outcome as Fate
from ttlaunch.lab.chaos.verdict import Verdict
from ttlaunch.planning.faults import Fault, render_faults
from ttlaunch.running.checkpoints.complete import newest_step
from ttlaunch.running.report import Report

_HEADINGS = ("fault", "made at", "outcome", "detected", "run over")
_MOST_NAMED = 4


def show_chaos(verdicts: Sequence[Verdict], left: Sequence[Leftovers], outcome: Outcome) -> None:
    """Print the run's summary, a row for each fault, and the lost steps."""
    show_summary(outcome.report, outcome.facts, outcome.folder)
    lines = ["", *render_table([_HEADINGS, *map(_row, verdicts)])]
    failure = outcome.report.failure
    lines.append("")
    lines += [f"  named            {failure.code}: {failure.message}"] if failure else []
    lines += [f"  lost             {_lost_text(outcome)}"] if outcome.report.status != "done" else []
    lines.append(f"  left behind      {_left_text(left)}")
    print_lines(lines)


def chaos_json(
    verdicts: Sequence[Verdict],
    left: Sequence[Leftovers],
    outcome: Outcome,
    *,
    faults: Sequence[Fault],
    found: Sequence[Diagnostic],
    status: int,
) -> dict[str, Any]:
    """Return everything as JSON; the keys are documented in `docs/how-to/inject-faults.md`."""
    return {
        "run_id": outcome.folder.run_id,
        "run_folder": str(outcome.folder.path),
        "plan": render_faults(faults),
        "exit_status": status,
        "faults": [verdict.as_json() for verdict in verdicts],
        "lost": lost_work(outcome),
        "left": [one.as_json() for one in left],
        "report": outcome.report.as_json(),
        "diagnostics": [diagnostic.as_json() for diagnostic in found],
    }


def lost_work(outcome: Outcome) -> dict[str, Any] | None:
    """Count the steps since the checkpoint to resume from; None if the run completed or takes no steps."""
    report = outcome.report
    if report.status == "done" or not report.steps:
        return None
    began = int((report.began_from or {}).get("step") or 0)
    saved = newest_step(outcome.folder.path)
    return {
        "steps": max(0, report.steps - (began if saved is None else saved)),
        "last_step": report.steps,
        "checkpoint_step": saved,
        "resume": None if saved is None else outcome.folder.run_id,
    }


def chaos_diagnostics(verdicts: Sequence[Verdict], left: Sequence[Leftovers], outcome: Outcome) -> list[Diagnostic]:
    """Report faults that were not detected or attributed correctly, and leftovers; empty if there are none."""
    history = f"when each fault was made: {short_name(outcome.folder.path, Path.cwd())}/events.jsonl"
    found = [
        Diagnostic("R058", _complaint(verdict, outcome.report), hints=(history,))
        for verdict in verdicts
        if verdict.outcome.is_wrong
    ]
    if not found and not any(verdict.outcome in {Fate.NAMED, Fate.ENDURED, Fate.REPLACED} for verdict in verdicts):
        found.append(Diagnostic("R058", _nothing_proven(verdicts, outcome.report), hints=(history,)))
    return found + [_left_diagnostic(one) for one in left if not one.is_clean]


def _row(verdict: Verdict) -> tuple[str, ...]:
    if verdict.outcome is Fate.NOT_MADE:
        return (verdict.fault, "", f"not made: {verdict.reason}", "", "")
    moment = [f"step {verdict.step}"] if verdict.step else []
    moment += [f"{verdict.at_s:.1f} s"] if verdict.at_s is not None else []
    after = [f"after {time:.1f} s" if time is not None else "" for time in (verdict.detected_s, verdict.over_s)]
    return (verdict.fault, ", ".join(moment), str(verdict.outcome), *after)


def _lost_text(outcome: Outcome) -> str:
    lost = lost_work(outcome)
    if lost is None:
        return "nothing is known of steps"
    steps = counted(lost["steps"], "step")
    if lost["checkpoint_step"] is None:
        return f"{steps}; there is no checkpoint of this run"
    return f"{steps}; `--resume {lost['resume']}` goes on after step {lost['checkpoint_step']}"


def _left_text(left: Sequence[Leftovers]) -> str:
    unclean = [one for one in left if not one.is_clean]
    if unclean:
        return "; ".join(_left_on(one) for one in unclean)
    slowest = max((one.clean_after_s or 0.0 for one in left), default=0.0)
    hosts = listed([one.host for one in left], last="and", quote="")
    late = f", clean {slowest:.1f} s after the end" if slowest >= 1 else ""
    return f"nothing on {hosts}{late}"


def _left_on(one: Leftovers) -> str:
    if one.error is not None:
        return f"{one.host} could not be asked what is left there: {one.error}"
    things = [counted(len(one.processes), "process").replace("processs", "processes")] if one.processes else []
    things += [counted(len(one.folders), "folder")] if one.folders else []
    return f"{one.host} still has {' and '.join(things)} of the run"


def _left_diagnostic(one: Leftovers) -> Diagnostic:
    notes = [f"process {process['pid']}: {process['name']}" for process in one.processes[:_MOST_NAMED]]
    notes += one.folders[:_MOST_NAMED]
    return Diagnostic("R059", _left_on(one), notes=tuple(notes))


def _nothing_proven(verdicts: Sequence[Verdict], report: Report) -> str:
    reasons = "; ".join(dict.fromkeys(verdict.reason for verdict in verdicts if verdict.reason))
    if report.failure is not None:
        return f"the run broke before any fault could break it: {report.failure.code}, {report.failure.message}"
    return f"no fault was made: {reasons}"


def _complaint(verdict: Verdict, report: Report) -> str:
    if verdict.outcome is Fate.UNNOTICED:
        return f"`{verdict.fault}` was made, and the run ended as if nothing had been"
    told = f"{report.failure.code}, {report.failure.message}" if report.failure else f"it was {report.status}"
    return f"`{verdict.fault}` was made, and the report says: {told}"
