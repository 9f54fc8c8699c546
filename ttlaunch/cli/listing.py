"""Print named things with a summary each: as lines, as names alone, or as JSON."""

from collections.abc import Mapping, Sequence

from ttlaunch.cli.console import print_json, print_lines
from ttlaunch.diagnostics import Format


def print_listing(rows: Sequence[Mapping[str, object]], *, about: str, schema: str, form: Format) -> None:
    """Print a list of named things.

    Args:
        rows: The things, each with a `name` and other keys.
        about: The key of the text that is shown beside the name.
        schema: The name of the schema, under which JSON has the list too.
        form: The form of the output; JSON has all keys.
    """
    if form is Format.JSON:
        print_json({schema: rows}, schema=schema)
    elif form is Format.CONCISE:
        print_lines([str(row["name"]) for row in rows])
    else:
        width = max((len(str(row["name"])) for row in rows), default=0)
        print_lines([f"{row['name']:{width}}  {row[about]}" for row in rows])
