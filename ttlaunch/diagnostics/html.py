"""Results as small tables for notebooks; every text is escaped, because it may come from a host or from somebody else's file."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def facts_html(facts: Mapping[str, object]) -> str:
    """Write names and values as a table, one pair per row; values that are None are left out."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<table>{rows}</table>"


def table_html(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table with a heading."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def text_html(text: str) -> str:
    """Write text with its own spaces and line ends, such as rendered diagnostics."""
    return f"<pre>{escape(text)}</pre>"
