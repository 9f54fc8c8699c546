"""The diagnostics of one file, collected while it is read."""

from collections.abc import Collection
from dataclasses import field

from ttlaunch.diagnostics.diagnostic import Diagnostic, Severity, given_twice, mistake_at
from ttlaunch.diagnostics.span import Span
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.located.nodes import Key, Node, span_of

Place = Span | tuple[Key, ...]
"""A place of a file: its span, or the keys and indices that lead to it."""


@dataclass
class Findings:
    """The mistakes in one file, in the order in which they were found.

    Attributes:
        root: The tree of the file, in which `add` looks up the places of keys and indices.
    """

    root: Node
    found: list[Diagnostic] = field(default_factory=list)

    def add(
        self,
        code: str,
        message: str,
        place: Place,
        *,
        label: str = "",
        other: tuple[Place, str] | None = None,
        hint: str = "",
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Add a diagnostic at a place, with at most one other place and one hint."""
        second = (self.span(other[0]), other[1]) if other else None
        span = self.span(place)
        self.found.append(mistake_at(code, message, span, label=label, other=second, hint=hint, severity=severity))

    def twice(self, code: str, message: str, place: Place, *, first: Place, verb: str = "given") -> None:
        """Add the diagnostic for something that the file has twice; `verb` completes the label `first … here`."""
        self.found.append(given_twice(code, message, self.span(place), first=self.span(first), verb=verb))

    def span(self, place: Place) -> Span:
        return place if isinstance(place, Span) else span_of(self.root, place)


def first_gap(numbers: Collection[int]) -> tuple[int, int] | None:
    """Return the first number from 0 that is missing among distinct numbers, and the next one that is present.

    >>> first_gap({0, 1, 4})
    (2, 4)
    """
    missing = next((number for number in range(len(numbers)) if number not in numbers), None)
    return None if missing is None else (missing, min(number for number in numbers if number > missing))
