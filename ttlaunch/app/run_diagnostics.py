"""Make the diagnostics of a run that has ended: the first failure, and everything else that went wrong."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.app.run_spec import short_name
from ttlaunch.diagnostics import Diagnostic, Label, Severity, Source, counted, shown
from ttlaunch.records.regular_files import read_regular
from ttlaunch.running.checkpoints.complete import newest_step
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import render_cascade
from ttlaunch.running.metrics.traffic import TOLERANCE, Edge, Settlement
from ttlaunch.running.report import Report
from ttlaunch.running.runs.facts import RunFacts
from ttlaunch.running.runs.files import read_object_if_any
from ttlaunch.running.runs.run_folder import RunFolder, read_events
from ttlaunch.spec.named_folders import built_in_folder

_MOST_RANKS = 5
_MOST_STEPS = 20
_MOST_REASONS = 3
_MOST_UNKEPT = 5
_MOST_EDGES = 4
_MOST_DIGITS = 9
_LONGEST_SOURCE = 4 * 1024 * 1024
_OF_RELEASE = re.compile(f".*/{contract.RELEASES_DIR}/[0-9a-f]{{64}}/{contract.PROJECT_DIR}/(?P<path>.+)")
"""The path that a file of the current folder has in a release on another host."""


def bad_record_diagnostics(folder: RunFolder) -> list[Diagnostic]:
    """Warn if records of ranks could not be used, with the first one of each file."""
    found = [event for event in read_events(folder.path) if event.get("event") == "bad_record"]
    if not found:
        return []
    notes = [f"{event.get('file')}: {event.get('reason')}" for event in found[:_MOST_REASONS]]
    notes += [f"and {len(found) - _MOST_REASONS} more files"] if len(found) > _MOST_REASONS else []
    message = f"{counted(len(found), 'file')} of the run had records that could not be used; all else counts"
    return [Diagnostic("R063", message, notes=tuple(notes), severity=Severity.WARNING)]


def run_diagnostics(report: Report, facts: RunFacts, folder: RunFolder) -> list[Diagnostic]:
    """Return all diagnostics of a run, the cause of a failure first."""
    failure = failure_diagnostic(report, folder)
    is_done = report.status == "done"  # after a failure, missing bytes are its consequence
    return [
        *([failure] if failure else []),
        *outstayed_diagnostics(report, folder),
        *checkpoint_diagnostics(report),
        *lost_output_diagnostics(report.ranks),
        *bad_record_diagnostics(folder),
        *spike_diagnostics(report, folder),
        *(traffic_diagnostics(report.traffic, [row.role for row in facts.ranks]) if is_done else []),
    ]


def spike_diagnostics(report: Report, folder: RunFolder) -> list[Diagnostic]:
    """Note the first steps whose loss was far above those before, and how to look at them."""
    if not report.loss_spikes:
        return []
    first, *others = report.loss_spikes
    message = f"the loss of step {first['step']} was {first['loss']:.4g}, far above the {first['median']:.4g} of the steps before"
    notes = [
        f"the bound was {first['bound']:.4g}: the median of the last losses and ten of their median absolute deviations"
    ]
    notes += [f"so were those of step {', '.join(str(one['step']) for one in others)}"] if others else []
    is_recipe = read_object_if_any(folder.file(contract.PLAN_FILE)).get("recipe") is not None
    again = f"`ttlaunch replay {report.run_id} --step {first['step']}` shows the texts, gradients and activations of that step"
    return [
        Diagnostic("R088", message, notes=tuple(notes), hints=(again,) if is_recipe else (), severity=Severity.WARNING)
    ]


def failure_diagnostic(report: Report, folder: RunFolder, *, programs: Sequence[Path] = ()) -> Diagnostic | None:
    """Describe the first failure of a run: rank, cause, line, last output, followers and next step; None if nothing failed.

    Args:
        report: The run's report.
        folder: The run's folder.
        programs: Folders of the program that ranks ran, besides those that the plan in the folder names.
    """
    failure = report.failure
    if failure is None:
        return None
    is_hung = failure.kind is Cause.HUNG
    texts = ("it is here",) if is_hung else failure.evidence
    label = _source_label(failure.place, texts, programs=[*programs, *_program_folders(folder)])
    notes = [] if label else [*filter(None, [failure.place])]
    notes += failure.evidence[1:] if label and not is_hung else failure.evidence
    hints = [failure.next_step] if failure.next_step else []
    if is_hung and folder.file(contract.STACKS_DIR).is_dir():
        hints.append(f"what every rank was doing: {short_name(folder.path, Path.cwd())}/{contract.STACKS_DIR}/")
    if failure.kind is Cause.AUDITED:
        hints += _resume_hint(report, folder, whose="the newest checkpoint that the last clean audit covers")
    elif failure.kind is Cause.DIFFERS:  # what the rank did last, and its log, show nothing about its tensors
        hints += _resume_hint(report, folder, whose="the last checkpoint whose digests agreed")
    elif failure.rank is not None:
        last = next((one for one in report.ranks if one["rank"] == failure.rank), {}).get("last_operation")
        notes += [f"its last operation: {last['text']}"] if last and not is_hung else []
        # The last lines on stderr would repeat the message.
        is_complete = failure.place or failure.kind in {Cause.CHECKPOINT, Cause.DIVERGED}
        notes += [] if is_complete else _stderr_tail(failure.last_lines)
        cascade = render_cascade(failure.followers)
        notes += [f"the first rank to fail; {cascade}"] if cascade else []
        hints.append(f"full log: {short_name(folder.path, Path.cwd())}/{contract.stderr_file(failure.rank)}")
    return Diagnostic(failure.code, failure.message, label, notes=tuple(notes), hints=tuple(hints))


def _resume_hint(report: Report, folder: RunFolder, *, whose: str) -> list[str]:
    newest = newest_step(folder.path)
    if newest is None:
        return []
    return [f"`--resume {report.run_id}` continues from step {newest}, {whose}"]


def _source_label(place: str | None, evidence: Sequence[str], *, programs: Sequence[Path]) -> Label | None:
    """Label the line that raised the exception, in the original file if a host has a copy; None if it may not be quoted."""
    if place is None:
        return None
    name, _, number = place.rpartition(":")
    if not number.isdecimal() or len(number) > _MOST_DIGITS:
        return None
    copied = _OF_RELEASE.fullmatch(name)
    if copied:
        name = str(Path.cwd() / copied["path"])
    return line_label(name, int(number), " ".join(evidence[:1]).replace("`", ""), programs=programs)


def line_label(name: str, number: int, text: str, *, programs: Sequence[Path] = ()) -> Label | None:
    """Label a whole line of a Python file; None if the file may not be quoted or cannot be read here.

    A rank or a host names the file, so only files that it has anyway are quoted: Python files below the current folder, the
    folders of the run's program, the built-in recipes and this package.

    Args:
        name: The path that the rank or host reports.
        number: The line, from 1.
        text: The text of the label.
        programs: The folders of the recipe or script that ranks run.
    """
    folders = [Path.cwd(), *programs, Path(contract.__file__).parent, built_in_folder("recipes")]
    lexical = os.path.normpath(Path.cwd() / name)
    # Compare the text of the path first: even asking the system about a path can mount a network folder.
    if not name.endswith(".py") or "\0" in name or not _is_below(lexical, folders):
        return None
    path = os.path.realpath(lexical)
    if not path.endswith(".py") or not _is_below(path, [folder.resolve() for folder in folders]):
        return None
    try:
        content = read_regular(path, most=_LONGEST_SOURCE).decode("utf-8", "replace")
    except OSError:
        return None
    source = Source(short_name(Path(lexical), Path.cwd()), content)
    line = source.line(number)
    return Label(source.span(number, len(line) - len(line.lstrip()) + 1, max(1, len(line.strip()))), text)


def _is_below(path: str, folders: Sequence[Path]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _program_folders(folder: RunFolder) -> list[Path]:
    """Return the folders of the recipe or of the scripts that a run's plan names."""
    plan = read_object_if_any(folder.file(contract.PLAN_FILE))
    recipe, command = plan.get("recipe"), plan.get("command")
    named = [Path(str(recipe.get("folder")))] if isinstance(recipe, dict) else []
    argv = command.get("command") if isinstance(command, dict) else None
    scripts = [one for one in argv if isinstance(one, str) and one.endswith(".py")] if isinstance(argv, list) else []
    # Somebody else may have written the plan, so only a folder with a `recipe.py` counts as a recipe's.
    return [path for path in named if (path / "recipe.py").is_file()] + [
        Path(script).absolute().parent for script in scripts
    ]


def _stderr_tail(lines: Sequence[str]) -> list[str]:
    """Return the last lines of a log as notes; a single line becomes part of a sentence."""
    if len(lines) < 2:  # noqa: PLR2004 - one line
        return [f"its last line on stderr: `{line.strip()}`" for line in lines]
    return ["its last lines on stderr:", *(f"  {line}" for line in lines)]


def outstayed_diagnostics(report: Report, folder: RunFolder) -> list[Diagnostic]:
    """Warn about ranks that were killed because they did not end within the grace period."""
    late = (report.stopped or {}).get("outstayed") or []
    if not late:
        return []
    rows = {row["rank"]: row for row in report.ranks}
    who = [f"{one['rank']} ({rows[one['rank']]['role']}, {rows[one['rank']]['host']})" for one in late]
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


def checkpoint_diagnostics(report: Report) -> list[Diagnostic]:
    """Warn about steps whose checkpoint was lost; empty if there are none."""
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
    """Name the first steps without a checkpoint, and count the others."""
    steps = [str(step) for step in report.lost_checkpoints]
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return ", ".join(steps[:_MOST_STEPS]) + more


def lost_output_diagnostics(ranks: Sequence[Mapping[str, Any]]) -> list[Diagnostic]:
    """Warn about output of ranks that could not be kept; empty if all output was kept.

    Args:
        ranks: The list `ranks` of `report.json`.
    """
    parts = [
        (rank, f"{counted(length, 'byte')} of rank {rank['rank']}'s {stream}")
        for rank in ranks
        for stream, length in _lengths(rank.get("unkept_output")).items()
    ]
    if not parts:
        return []
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    notes = [f"{text} on {rank['host']}: {_reason(rank)}" for rank, text in parts[:_MOST_UNKEPT]]
    notes += [f"and {len(parts) - _MOST_UNKEPT} more; `report.json` has all"] if len(parts) > _MOST_UNKEPT else []
    hint = "make room there; `remote_folder:` in cluster.yaml and `--runs-dir` choose another place"
    message = f"{parts[0][1]} could not be kept{more}"
    return [Diagnostic("R056", message, notes=tuple(notes), hints=(hint,), severity=Severity.WARNING)]


def _lengths(unkept: Any) -> dict[str, int]:
    found = unkept if isinstance(unkept, dict) else {}
    return {str(stream): length for stream, length in found.items() if isinstance(length, int)}


def _reason(rank: Mapping[str, Any]) -> str:
    return shown(rank.get("unkept_reason") or "unknown").lower()


def traffic_diagnostics(settlement: Settlement | None, roles: Sequence[str]) -> list[Diagnostic]:
    """Warn about each operation whose bytes differ from the formula, or about a formula that cannot be used."""
    if settlement is None:
        return []
    if settlement.is_mistaken:
        message = f"the bytes of this run were compared with nothing: {settlement.reason}"
        return [Diagnostic("R046", message, severity=Severity.WARNING)]
    by_operation = groupby(settlement.differing, key=lambda edge: edge.operation)
    return [_difference(list(edges), settlement, roles) for _, edges in by_operation]


def _difference(edges: list[Edge], settlement: Settlement, roles: Sequence[str]) -> Diagnostic:
    first, *others = edges
    message = f"`{first.operation}` moved {first.size:,} bytes from {_ends(first, roles)}, and the formula says {first.expected:,}"
    notes = [f"in {counted(settlement.steps, 'step')} and {counted(settlement.validations, 'validation')}"]
    notes += [f"{one.size:,} bytes from {_ends(one, roles)}, expected {one.expected:,}" for one in others[:_MOST_EDGES]]
    left = len(others) - _MOST_EDGES
    notes += [f"and over {counted(left, 'further edge')}"] if left > 0 else []
    notes.append(f"a difference up to {TOLERANCE:.1%} counts as headers")
    hint = "`ttlaunch report` shows all edges; the formula is `traffic` in the recipe's `recipe.py`"
    return Diagnostic("R045", message, notes=tuple(notes), hints=(hint,), severity=Severity.WARNING)


def _ends(edge: Edge, roles: Sequence[str]) -> str:
    return f"rank {edge.source} ({roles[edge.source]}) to rank {edge.dest} ({roles[edge.dest]})"
