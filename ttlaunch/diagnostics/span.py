"""Where a value stands: a file's text, and a place in it given as line, column and length, all counted from 1."""

from dataclasses import field
from functools import cached_property

from ttlaunch.quick_dataclass import dataclass


@dataclass(frozen=True)
class Source:
    r"""One text that the user gave us: a file, standard input or a command line.

    Attributes:
        name: The path as the user would type it, or a name such as `--set`.
        text: The text without byte-order mark and with `\n` line ends.
    """

    name: str
    text: str = field(repr=False)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    def line(self, number: int) -> str:
        """Return the text of a line, empty past the end of the file."""
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""

    def span(self, line: int, column: int, length: int = 1) -> "Span":
        return Span(self, line, column, length)

    def start(self) -> "Span":
        """Return the place of the file as a whole: its first line that is not blank or a comment, else line 1."""
        for number, text in enumerate(self.lines, start=1):
            stripped = text.strip()
            if stripped and not stripped.startswith("#"):
                return Span(self, number, len(text) - len(text.lstrip()) + 1, len(stripped))
        return Span(self, 1, 1, 1)


@dataclass(frozen=True)
class Span:
    """A stretch of one line.

    Attributes:
        line: Line number, from 1.
        column: First character, from 1.
        length: Characters, at least 1; a value of several lines is marked on its first.
    """

    source: Source
    line: int
    column: int
    length: int = 1

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"
