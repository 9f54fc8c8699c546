"""The sinks of a run's metrics: parse them, start them, and report one that failed or is slow."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.app.run_spec import short_name
from ttlaunch.diagnostics import Diagnostic, LaunchError, Severity, usage_mistake

if TYPE_CHECKING:
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.running.metrics.export import SinkRecord
    from ttlaunch.running.metrics.sinks import SinkChoice
    from ttlaunch.running.runs.run_folder import RunFolder

_PATIENCE_S = 5.0
"""How long a command waits at the end of a run for its sinks to write their last data."""


def parse_sinks(given: Sequence[str], *, option: str) -> "tuple[SinkChoice, ...]":
    """Parse the values of an option that names sinks.

    Raises:
        LaunchError: A sink is not known, its library is missing, or it is named twice.
    """
    if not given:
        return ()
    from ttlaunch.running.metrics.sinks import parse_sink

    found = [parse_sink(text, option=option, working_folder=Path.cwd()) for text in given]
    mistakes = [one for one in found if isinstance(one, Diagnostic)]
    choices = tuple(one for one in found if not isinstance(one, Diagnostic))
    kinds = [choice.kind for choice in choices]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        mistakes.append(usage_mistake(f"the sink {twice} is given twice", "one place is enough", code="P046"))
    if mistakes:
        raise LaunchError(mistakes)
    return choices


def parse_log_sinks(given: Sequence[str], *, option: str) -> "tuple[SinkChoice, ...]":
    """Parse the values of an option that names sinks for lines.

    Raises:
        LaunchError: As for `parse_sinks`, or a sink takes only metrics.
    """
    from ttlaunch.running.metrics.sinks import LOG_SINKS

    choices = parse_sinks(given, option=option)
    other = next((choice for choice in choices if choice.kind not in LOG_SINKS), None)
    if other is not None:
        message = f"the sink {other.kind} takes metrics and no lines"
        raise LaunchError([usage_mistake(message, f"`ttlaunch metrics RUN {option} {other.kind}=…`", code="P046")])
    return choices


def with_sinks(choices: "Sequence[SinkChoice]", begun: "Callable[[RunFolder], None]") -> "Callable[[RunFolder], None]":
    """Return a function that calls `begun` with a run's folder and then starts a process for each sink."""

    def start(folder: "RunFolder") -> None:
        begun(folder)
        if choices:
            from ttlaunch.running.metrics.export import start_sinks

            start_sinks(folder.path, choices)

    return start


def judge_sinks(outcome: "Outcome") -> list[Diagnostic]:
    """Warn about sinks of an ended run that have failed or not finished, after waiting some seconds for them."""
    path = outcome.folder.path
    if not (path / contract.SINKS_DIR).is_dir():  # most runs have none, and need no client of HTTP to say so
        return []
    from ttlaunch.running.metrics.export import wait_for_sinks

    return sink_diagnostics(wait_for_sinks(path, patience_s=_PATIENCE_S), path)


def sink_diagnostics(records: "Sequence[SinkRecord]", path: Path) -> list[Diagnostic]:
    """Warn about each sink that has failed, and about each that is still writing."""
    from ttlaunch.running.metrics.export import SinkState

    return [_diagnostic(record, path) for record in records if record.state is not SinkState.DONE]


def _diagnostic(record: "SinkRecord", path: Path) -> Diagnostic:
    from ttlaunch.running.metrics.export import SinkState

    again = _again(record, path)
    if record.state is SinkState.FAILED:
        message = f"the sink {record.kind} has stopped: {record.error}"
        untouched = "training was not touched, and its own log has everything"
        return Diagnostic("R060", message, notes=(untouched,), hints=(again,), severity=Severity.WARNING)
    log = f"{short_name(path, Path.cwd())}/{contract.SINKS_DIR}/{record.kind}.log"
    message = f"the sink {record.kind} has not finished yet; it continues in the background"
    notes = (record.error,) if record.error else ()
    hints = (f"what it prints is in {log}", again)
    return Diagnostic("R061", message, notes=notes, hints=hints, severity=Severity.WARNING)


def _again(record: "SinkRecord", path: Path) -> str:
    """Say which command exports everything again; what a log server has already, it does not take twice."""
    from ttlaunch.running.metrics.sinks import CONTINUED, LOG_SINKS

    command = "logs" if record.kind in LOG_SINKS else "metrics"
    place = shlex.quote(f"{record.kind}={record.place}")
    once = "sends what is missing" if record.kind in CONTINUED else "writes everything once more"
    return f"`ttlaunch {command} {path.name} --to {place}` {once}"
