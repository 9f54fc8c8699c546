"""Draw diagnostics as text: `full` with the lines of the files and marks under them, `concise` with one line each.

Both are plain text with optional ANSI colours; words carry the meaning and colour repeats it. Tests under `tests/` compare
the text word for word. Other programs should read `json`. `github` writes the annotations of a GitHub workflow.
"""

from collections.abc import Iterable
from enum import StrEnum

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, Severity
from ttlaunch.diagnostics.terminal_text import clean

_COLOURS = {Severity.ERROR: "1;31", Severity.WARNING: "1;33", Severity.NOTE: "1;36"}
_WIDEST_LINE = 160
_LEFT_OF_MARK = 60
_TAB = "    "
_SOURCES_WITHOUT_FILE = {
    "--set",
    "--plan",
    "--ranks",
    "--hosts",
    "--mpi-args",
    "--mpi-args --host",
    "standard input",
    "this machine",
}


class Format(StrEnum):
    """How diagnostics and results are written."""

    FULL = "full"
    CONCISE = "concise"
    JSON = "json"
    GITHUB = "github"


def render(diagnostics: Iterable[Diagnostic], *, form: Format = Format.FULL, colour: bool = False) -> str:
    """Write all diagnostics as one text, without a final line end; empty for none.

    Every text of a diagnostic stays in its line; characters that control a terminal are shown as escapes.
    """
    if form is Format.JSON:
        return render_json(diagnostics)
    if form is Format.GITHUB:
        return "\n".join(_github(diagnostic) for diagnostic in diagnostics)
    if form is Format.CONCISE:
        return "\n".join(_concise(diagnostic, colour=colour) for diagnostic in diagnostics)
    return "\n\n".join(_full(diagnostic, colour=colour) for diagnostic in diagnostics)


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """Write all diagnostics as a JSON list."""
    import json  # noqa: PLC0415 - nothing else here needs it

    return json.dumps([diagnostic.as_json() for diagnostic in diagnostics], indent=2)


def _github(diagnostic: Diagnostic) -> str:
    """Write one line with a workflow command, which GitHub shows as an annotation at the diagnostic's place in the file."""
    command = "notice" if diagnostic.severity is Severity.NOTE else str(diagnostic.severity)
    label, where = diagnostic.primary, ""
    name = label.span.source.name if label else ""
    if label and name not in _SOURCES_WITHOUT_FILE and not name.startswith("$"):  # `$NAME` is a variable
        where = f"file={_escape_property(name)},line={label.span.line},col={label.span.column},"
    lines = [diagnostic.message, *([label.text] if label and label.text else [])]
    lines += [f"{other.span}: {other.text}".removesuffix(": ") for other in diagnostic.secondary]
    lines += [f"note: {note}" for note in diagnostic.notes] + [f"hint: {hint}" for hint in diagnostic.hints]
    return f"::{command} {where}title={_escape_property(diagnostic.code)}::{_escape_data(chr(10).join(lines))}"


def _escape_data(text: str) -> str:
    return clean(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _concise(diagnostic: Diagnostic, *, colour: bool) -> str:
    place = clean(f"{diagnostic.primary.span}: ") if diagnostic.primary else ""
    return f"{place}{_headline(diagnostic, colour=colour)}"


def _headline(diagnostic: Diagnostic, *, colour: bool) -> str:
    tag = _paint(f"{diagnostic.severity}[{diagnostic.code}]", _COLOURS[diagnostic.severity], colour=colour)
    return f"{tag}: {clean(diagnostic.message)}"


def _full(diagnostic: Diagnostic, *, colour: bool) -> str:
    labels = [(label, "^") for label in [diagnostic.primary] if label]
    labels += [(label, "-") for label in diagnostic.secondary]
    gutter = max((len(str(label.span.line)) for label, _ in labels), default=0)
    lines = [_headline(diagnostic, colour=colour)]
    for label, mark in labels:
        paint = _COLOURS[diagnostic.severity] if mark == "^" else "36"
        lines += _snippet(label, mark=mark, gutter=gutter, paint=paint, colour=colour)
    lines += [f"{' ' * gutter} = note: {clean(note)}" for note in diagnostic.notes]
    for hint in diagnostic.hints:
        lines += ["", f"{_paint('hint', '1;32', colour=colour)}: {clean(hint)}"]
    return "\n".join(lines)


def _snippet(label: Label, *, mark: str, gutter: int, paint: str, colour: bool) -> list[str]:
    span = label.span
    text, column, length = _window(span.source.line(span.line), span.column, span.length)
    marks = " " * (column - 1) + _paint(f"{mark * length} {clean(label.text)}".rstrip(), paint, colour=colour)
    return [
        f"{' ' * gutter}--> {clean(str(span))}",
        f"{' ' * gutter} |",
        f"{span.line:>{gutter}} | {text}".rstrip(),
        f"{' ' * gutter} | {marks}",
    ]


def _window(text: str, column: int, length: int) -> tuple[str, int, int]:
    """Cut a very long line around the mark, widen tabs, show control characters, and move the mark along with it."""
    start = 0
    if len(text) > _WIDEST_LINE:
        start = max(0, column - 1 - _LEFT_OF_MARK)
        end = start + _WIDEST_LINE
        text = ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
        column += (1 if start else 0) - start
    before, marked, after = text[: column - 1], text[column - 1 : column - 1 + length], text[column - 1 + length :]
    return _shown(before) + _shown(marked) + _shown(after), len(_shown(before)) + 1, max(1, len(_shown(marked)))


def _shown(text: str) -> str:
    return _TAB.join(map(clean, text.split("\t")))


def _paint(text: str, code: str, *, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text
