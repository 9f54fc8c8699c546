"""`ttlaunch explain CODE`: what a diagnostic checks, why it matters, an example and the repair."""

import sys
from typing import Annotated

import typer

from ttlaunch.cli.console import print_json, print_lines, print_text, rich_console
from ttlaunch.cli.options import PlainFormat
from ttlaunch.diagnostics import Format, did_you_mean, shown, usage_error

EXAMPLES = """\
[bold]ttlaunch explain T011[/bold]   one code

[bold]ttlaunch explain[/bold]   all codes
"""


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="A code such as T011. Default: list all codes.")
    ] = None,
    *,
    form: PlainFormat = Format.FULL,
) -> None:
    """Explain the code of a diagnostic."""
    from ttlaunch.diagnostics.explain import known_codes, load_page

    if code is None:
        pages = [page for known in known_codes() if (page := load_page(known))]
        if form is Format.JSON:
            print_json({"pages": [{"code": page.code, "title": page.title} for page in pages]}, schema="explain")
        else:
            print_lines([f"{page.code}  {page.title}" for page in pages])
        return
    page = load_page(code.upper())
    if page is None:
        hints = did_you_mean(code.upper(), known_codes())
        raise usage_error(f"there is no code `{shown(code)}`", *hints, "`ttlaunch explain` lists all")
    if form is Format.JSON:
        print_json({"pages": [{"code": page.code, "title": page.title, "text": page.text}]}, schema="explain")
    elif form is Format.CONCISE or not sys.stdout.isatty():
        print_text(page.text.rstrip())
    else:
        from rich.markdown import Markdown

        rich_console(sys.stdout).print(Markdown(page.text))
