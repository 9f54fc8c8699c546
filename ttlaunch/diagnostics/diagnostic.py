"""One mistake, said once: severity, stable code, a sentence, labels on the places that take part, notes, hints."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics.span import Span


class Severity(StrEnum):
    """How bad it is. Only an error keeps a run from starting."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Label:
    """A place that takes part in the mistake, and what is wrong or relevant there."""

    span: Span
    text: str = ""


@dataclass(frozen=True)
class Diagnostic:
    """One mistake.

    Attributes:
        code: Letter and three digits; stable, never reused, `ttlaunch explain CODE` has its page.
        message: The first line; makes sense alone and holds the wrong value.
        primary: The smallest wrong text; None when no file is at fault (a host, a missing program).
        secondary: Other places that take part, drawn with `-`.
        notes: Facts.
        hints: Things to type or change.
    """

    code: str
    message: str
    primary: Label | None = None
    secondary: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    severity: Severity = Severity.ERROR

    def as_json(self) -> dict[str, Any]:
        """The diagnostic for other programs; documented in `docs/reference/diagnostics.md`."""
        return {
            "code": self.code,
            "severity": str(self.severity),
            "message": self.message,
            "primary": _label_as_json(self.primary) if self.primary else None,
            "secondary": [_label_as_json(label) for label in self.secondary],
            "notes": list(self.notes),
            "hints": list(self.hints),
        }


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """Whether any of them keeps a run from starting."""
    return any(diagnostic.severity is Severity.ERROR for diagnostic in diagnostics)


def _label_as_json(label: Label) -> dict[str, Any]:
    return {
        "file": label.span.source.name,
        "line": label.span.line,
        "column": label.span.column,
        "length": label.span.length,
        "label": label.text,
    }


_COMMAND_LINE_CODES = {
    "C017",
    "P001",
    "P004",
    "P005",
    "P009",
    "P015",
    "P030",
    "P032",
    "P035",
    "P036",
    "P037",
    "P038",
    "P039",
    "P040",
    "P041",
    "P042",
    "P043",
    "P046",
    "P047",
}


def exit_status(diagnostics: Iterable[Diagnostic]) -> int:
    """0 without errors; 4 if hosts are at fault, 5 if only copying to them is, 2 if only the command line is, else 3."""
    codes = {d.code for d in diagnostics if d.severity is Severity.ERROR}
    if not codes:
        return contract.STATUS_DONE
    if all(code.startswith(("H", "S")) for code in codes):
        return contract.STATUS_HOST if any(code.startswith("H") for code in codes) else contract.STATUS_SYNC
    if codes <= _COMMAND_LINE_CODES:
        return contract.STATUS_USAGE
    return contract.STATUS_DESCRIPTION
