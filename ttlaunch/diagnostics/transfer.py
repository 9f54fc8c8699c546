"""Send diagnostics to another process of the same version, with the texts that they point into."""

from collections.abc import Iterable, Mapping
from typing import Any

from ttlaunch.diagnostics.diagnostic import Blame, Diagnostic, KeyMistake, Label, Severity
from ttlaunch.diagnostics.span import Source, Span


def pack_diagnostics(diagnostics: Iterable[Diagnostic]) -> dict[str, Any]:
    """Return all diagnostics as JSON values, which contain each source text once."""
    sources: dict[Source, int] = {}
    packed = [_pack(diagnostic, sources) for diagnostic in diagnostics]
    return {"sources": [[source.name, source.text] for source in sources], "diagnostics": packed}


def unpack_diagnostics(packed: Mapping[str, Any]) -> list[Diagnostic]:
    """Return the diagnostics that `pack_diagnostics` packed."""
    sources = [Source(name, text) for name, text in packed["sources"]]
    return [_unpack(one, sources) for one in packed["diagnostics"]]


def _pack(diagnostic: Diagnostic, sources: dict[Source, int]) -> dict[str, Any]:
    labels = ([diagnostic.primary] if diagnostic.primary else []) + list(diagnostic.secondary)
    places = [
        [sources.setdefault(one.span.source, len(sources)), one.span.line, one.span.column, one.span.length, one.text]
        for one in labels
    ]
    rest = {name: value for name, value in vars(diagnostic).items() if name not in {"primary", "secondary"}}
    return {**rest, "labels": places, "has_primary": diagnostic.primary is not None}


def _unpack(packed: Mapping[str, Any], sources: list[Source]) -> Diagnostic:
    labels = [
        Label(Span(sources[number], line, column, length), text)
        for number, line, column, length, text in packed["labels"]
    ]
    first = 1 if packed["has_primary"] else 0
    return Diagnostic(
        packed["code"],
        packed["message"],
        labels[0] if first else None,
        tuple(labels[first:]),
        tuple(packed["notes"]),
        tuple(packed["hints"]),
        Severity(packed["severity"]),
        Blame(packed["blame"]),
        KeyMistake(packed["key_mistake"]) if packed["key_mistake"] else None,
    )
