"""Results as small tables for notebooks; every text is escaped, since a host or a stranger's file may have written it."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def facts_html(facts: Mapping[str, object]) -> str:
    """Write names and values as a table, one pair a row; what is None is left out."""
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
    """Write text as it stands, such as rendered diagnostics."""
    return f"<pre>{escape(text)}</pre>"
