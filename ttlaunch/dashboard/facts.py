"""Everything that is known of one run but its numbers and its output, as the page shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.app.cut_off import cut_off
from ttlaunch.app.measured import report_as_json, report_diagnostics, why_no_telemetry
from ttlaunch.app.run_diagnostics import run_diagnostics
from ttlaunch.dashboard.catalogue import summary_as_json
from ttlaunch.dashboard.live import rank_as_json
from ttlaunch.dashboard.numbers import finite
from ttlaunch.diagnostics import Diagnostic, render
from ttlaunch.diagnostics.explain import load_page
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.running.readers.differences import find_differences
from ttlaunch.running.readers.recorded import Recorded, read_run
from ttlaunch.running.report import read_report
from ttlaunch.running.runs.facts import facts_in, read_facts
from ttlaunch.running.runs.files import read_object_if_any, read_text_if_any, size_of
from ttlaunch.running.runs.overview import summarise
from ttlaunch.running.runs.run_folder import RunFolder, read_events, supervisor_file
from ttlaunch.running.watch import RankState

_LONGEST_CONFIGURATION = 256 << 10
_MOST_EVENTS = 500
_MOST_MESSAGES = 200


def run_as_json(
    path: Path, *, ranks: Sequence[RankState] | None = None, measured: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what the page shows of a run.

    Args:
        path: The run's folder.
        ranks: The states of its ranks; None to read their records.
        measured: The parts of its report that its telemetry tells, as `make_index` has kept them, empty if nothing was kept; None to read
            the telemetry.

    Raises:
        OSError: The run's folder cannot be read.
        ValueError: The file of its plan or of its report has another content.
    """
    recorded = read_run(path, ranks=ranks, with_telemetry=measured is None)
    (summary,) = summarise([path])
    found = diagnostics_of(recorded)
    return {
        **summary_as_json(summary),
        "folder": str(path),
        "topology": clean(str(recorded.plan.get("topology", "?"))),
        "is_recipe": recorded.plan.get("recipe") is not None,
        "is_serving": facts_in(recorded.plan).is_serving,
        "is_elastic": bool(recorded.plan.get("elastic")),
        "report": finite(report_as_json(recorded)) | dict(measured or {}),
        "no_telemetry": _why_no_telemetry(recorded, measured),
        "results": _results(recorded),
        "rank_states": [rank_as_json(state) | _end_of_rank(recorded, state.row.rank) for state in recorded.ranks],
        "diagnostics": [{"code": one.code, "severity": str(one.severity), "text": render([one])} for one in found],
        "pages": {one.code: page.text for one in found if (page := load_page(one.code))},
        "events": _events(path),
        "messages": _messages(path),
        "configuration": read_text_if_any(path / contract.TRAIN_FILE)[:_LONGEST_CONFIGURATION],
        "command": read_text_if_any(path / "command.sh")[:_LONGEST_CONFIGURATION],
        "environment": read_object_if_any(path / contract.ENVIRONMENT_FILE),
        "code": read_object_if_any(path / contract.CODE_FILE),
        "checkpoints": checkpoints_of(path),
    }


def _why_no_telemetry(recorded: Recorded, measured: Mapping[str, Any] | None) -> str | None:
    if measured is None:
        return None if recorded.telemetry is not None else why_no_telemetry(recorded)
    if not measured:
        return "the run is long, and is being read"
    return None if measured.get("times") else why_no_telemetry(recorded)


def diagnostics_of(recorded: Recorded) -> list[Diagnostic]:
    """Return the diagnostics that the terminal shows at the end of a run, the cause of a failure first."""
    if recorded.report is None:
        return [] if recorded.is_running else [cut_off(recorded.path, None)]
    try:
        report = read_report(recorded.path)
    except ValueError:  # an older version wrote it
        return report_diagnostics(recorded)
    return run_diagnostics(report, read_facts(recorded.path), RunFolder(recorded.path.name, recorded.path))


def checkpoints_of(path: Path) -> list[dict[str, Any]]:
    """Return the checkpoints that are complete, newest first."""
    found = []
    try:
        folders = list((path / contract.CHECKPOINTS_DIR).iterdir())
    except OSError:
        return []
    for folder in folders:
        step = folder.name.removeprefix("step-")
        if step.isascii() and step.isdecimal() and (folder / contract.CHECKPOINT_MANIFEST).is_file():
            files = [one for one in folder.iterdir() if one.is_file()]
            manifest = read_object_if_any(folder / contract.CHECKPOINT_MANIFEST)
            found.append(
                {
                    "step": int(step),
                    "bytes": sum(map(size_of, files)),
                    "files": len(files),
                    "time": (folder / contract.CHECKPOINT_MANIFEST).stat().st_mtime,
                    "sha256": str(manifest.get("sha256", "")),
                }
            )
    return sorted(found, key=lambda one: -one["step"])


def differences_as_json(left: Path, right: Path) -> dict[str, Any]:
    """Return what `ttlaunch diff --format json` prints.

    Raises:
        OSError, ValueError: As `find_differences`.
    """
    found = find_differences(left, right)
    return {
        "runs": [left.name, right.name],
        "same": found.same,
        "compared": dict(found.compared),
        "differences": [asdict(difference) for difference in found.differences],
        "losses": [finite(asdict(loss)) for loss in found.losses],
    }


def _results(recorded: Recorded) -> dict[str, Any]:
    report = recorded.report or {}
    names = ("duration_s", "startup_s", "first_validation", "last_validation", "last_perplexity", "parameters_sha256")
    return {name: report.get(name) for name in (*names, "parameters_agree", "began_from", "results", "exit_status")}


def _end_of_rank(recorded: Recorded, rank: int) -> dict[str, Any]:
    """Return how a rank ended, from the report of its run."""
    rows = (recorded.report or {}).get("ranks") or ()
    row: Mapping[str, Any] = next((one for one in rows if one["rank"] == rank), {})
    ended = {"state": clean(str(row["state"]))} if row.get("state") else {}
    last = row.get("last_operation") or {}
    names = ("text", "operation", "verb", "peer", "bytes", "step", "began_s", "ended_s")
    return {
        **ended,
        "status": row.get("status"),
        "signal": row.get("signal"),
        "peak_memory_bytes": row.get("peak_memory_bytes"),
        "last_operation": {name: last.get(name) for name in names} if last else None,
    }


def _events(path: Path) -> list[dict[str, Any]]:
    """Return the launcher's history: when, what, and the rest as text."""
    found = []
    for event in read_events(path)[-_MOST_EVENTS:]:
        rest = {name: value for name, value in event.items() if name not in {"time", "event", "marks"}}
        text = ", ".join(f"{clean(str(name))} {clean(str(value))[:200]}" for name, value in rest.items())
        found.append({"time": event["time"], "event": clean(str(event.get("event"))), "text": text})
    return found


def _messages(path: Path) -> list[str]:
    """Return the last messages of the supervisor."""
    text = read_text_if_any(path / supervisor_file("stderr"))
    return [clean(line) for line in text.splitlines()[-_MOST_MESSAGES:]]
