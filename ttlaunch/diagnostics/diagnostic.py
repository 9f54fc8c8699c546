"""The report of one mistake: severity, stable code, a sentence, labels on the places that take part, notes, hints."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import listed
from ttlaunch.quick_dataclass import dataclass


class Severity(StrEnum):
    """How serious a diagnostic is; only an error keeps a run from starting."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Blame(StrEnum):
    """What is at fault: it decides the exit status of a command that refuses to start."""

    DESCRIPTION = "description"  # the files that describe the cluster or the training
    COMMAND_LINE = "command line"  # what was typed, and the files and folders that it names
    HOSTS = "hosts"  # a machine that is not ready
    CODE_SYNC = "code sync"  # code that cannot be brought to a host


class KeyMistake(StrEnum):
    """A mistake in a key itself, not in its value; some readers of files add a hint to it."""

    UNKNOWN = "unknown"
    MISSING = "missing"


@dataclass(frozen=True)
class Label:
    """A place that takes part in the mistake, and what is wrong or relevant there."""

    span: Span
    text: str = ""


@dataclass(frozen=True)
class Diagnostic:
    """One mistake.

    Attributes:
        code: A letter and three digits, stable and never reused; `ttlaunch explain CODE` shows its page.
        message: The first line; makes sense alone and holds the wrong value.
        primary: The smallest wrong text; None when no file is at fault (a host, a missing program).
        secondary: Other places that the mistake involves, drawn with `-`.
        notes: Facts that explain the mistake.
        hints: Things to type or change.
        blame: What is at fault; set where the diagnostic is made, and never derived from `code`.
        key_mistake: Set where a key is unknown or missing, None for every other mistake.
    """

    code: str
    message: str
    primary: Label | None = None
    secondary: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    severity: Severity = Severity.ERROR
    blame: Blame = Blame.DESCRIPTION
    key_mistake: KeyMistake | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the diagnostic for other programs; documented in `docs/reference/diagnostics.md`."""
        return {
            "code": self.code,
            "severity": str(self.severity),
            "message": self.message,
            "primary": _label_as_json(self.primary) if self.primary else None,
            "secondary": [_label_as_json(label) for label in self.secondary],
            "notes": list(self.notes),
            "hints": list(self.hints),
        }


def mistake_at(
    code: str,
    message: str,
    span: Span,
    *,
    label: str = "",
    other: tuple[Span, str] | None = None,
    note: str = "",
    hint: str = "",
    severity: Severity = Severity.ERROR,
    blame: Blame = Blame.DESCRIPTION,
) -> Diagnostic:
    """Build a diagnostic at one place of a file, with at most one other place, one note and one hint."""
    secondary = (Label(*other),) if other else ()
    notes, hints = ((text,) if text else () for text in (note, hint))
    primary = Label(span, label)
    return Diagnostic(code, message, primary, secondary, notes=notes, hints=hints, severity=severity, blame=blame)


def given_twice(code: str, message: str, span: Span, *, first: Span, verb: str = "given") -> Diagnostic:
    """Build the diagnostic for something that a file has twice; `verb` completes the label `first … here`."""
    return mistake_at(code, message, span, label="and again here", other=(first, f"first {verb} here"))


def fold_repeats(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Make one diagnostic of all that say the same about one file: the first one, with the lines of the others in a note.

    A name that is wrong where it is defined is reported wherever it is used; for the user that is one mistake.
    """
    found: dict[tuple[str, Severity, int | None], list[Diagnostic]] = {}
    for diagnostic in diagnostics:
        source = id(diagnostic.primary.span.source) if diagnostic.primary else None
        found.setdefault((diagnostic.message, diagnostic.severity, source), []).append(diagnostic)
    return [_folded(group) for group in found.values()]


def _folded(group: Sequence[Diagnostic]) -> Diagnostic:
    first = group[0]
    lines = dict.fromkeys(each.primary.span.line for each in group[1:] if each.primary)
    if not lines:
        return first
    note = f"the same again in line{'s' if len(lines) > 1 else ''} {listed(lines, last='and', quote='')}"
    return replace(first, notes=(*first.notes, note))


def place_of(diagnostic: Diagnostic) -> tuple[int, int]:
    """Return line and column, to sort the diagnostics of a file by."""
    return (diagnostic.primary.span.line, diagnostic.primary.span.column) if diagnostic.primary else (0, 0)


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """Return whether any of the diagnostics keeps a run from starting."""
    return any(diagnostic.severity is Severity.ERROR for diagnostic in diagnostics)


def exit_status(diagnostics: Iterable[Diagnostic]) -> int:
    """Return the status of a command that refuses to go on because of these diagnostics.

    Returns:
        0 without errors; 2 if only the command line is at fault; 4 if only hosts, or hosts and code sync; 5 if only code
        sync; otherwise 3.
    """
    from ttlaunch import contract  # noqa: PLC0415 - it imports json, which reading a hostfile does not need

    blamed = {diagnostic.blame for diagnostic in diagnostics if diagnostic.severity is Severity.ERROR}
    if not blamed:
        return contract.STATUS_DONE
    if blamed <= {Blame.HOSTS, Blame.CODE_SYNC}:
        # A host that is not ready explains why the code could not be brought to it, not the other way round.
        return contract.STATUS_HOST if Blame.HOSTS in blamed else contract.STATUS_SYNC
    return contract.STATUS_USAGE if blamed == {Blame.COMMAND_LINE} else contract.STATUS_DESCRIPTION


def _label_as_json(label: Label) -> dict[str, Any]:
    return {
        "file": label.span.source.name,
        "line": label.span.line,
        "column": label.span.column,
        "length": label.span.length,
        "label": label.text,
    }
