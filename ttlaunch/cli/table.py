"""Lay out a table as plain text: columns as wide as their widest cell, numbers to the right."""

from collections.abc import Iterable, Sequence

from ttlaunch.diagnostics.terminal_text import clean


def render_table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), indent: str = "") -> list[str]:
    """Return the lines of a table.

    Args:
        rows: The rows of cells; the first one is the heading.
        right: The columns that are aligned to the right.
        indent: The text at the beginning of each line.
    """
    rows = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = set(right)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if at in ends else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
