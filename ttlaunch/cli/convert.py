"""`ttlaunch convert`: write a mesh graph descriptor as the other version, and say what that cannot hold."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ttlaunch.cli.console import print_json, print_lines, print_text, show_diagnostics, write_file
from ttlaunch.diagnostics import Blame, Diagnostic, Format, LaunchError, Source, has_errors, shown, usage_error

EXAMPLES = """\
[bold]ttlaunch convert mgd.yaml mgd.textproto[/bold]   for releases since 0.64.5

[bold]ttlaunch convert mgd.textproto - | less[/bold]   to standard output
"""
_SUFFIXES: dict[str, Literal["yaml", "textproto"]] = {".yaml": "yaml", ".yml": "yaml", ".textproto": "textproto"}
_WHAT = "a mesh graph descriptor"


def convert(
    read: Annotated[str, typer.Argument(metavar="FROM", help="The descriptor; - is standard input.")],
    write: Annotated[
        str, typer.Argument(metavar="TO", help="Output file: *.yaml or *.textproto; - is standard output.")
    ],
    *,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="yaml|textproto", help="The version to write, if the file name does not show it."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file.")] = False,
    form: Annotated[
        Format, typer.Option("--format", help="Format of error messages: full, concise or json.")
    ] = Format.FULL,
) -> None:
    """Convert a mesh graph descriptor between YAML (version 1) and textproto (version 2), or older YAML to newer."""
    from ttlaunch.spec.topology.convert import convert as convert_descriptor
    from ttlaunch.spec.topology.convert import version_of

    if to not in {None, "yaml", "textproto"}:
        raise usage_error(f"`--to {shown(to)}` is not a version; `yaml` or `textproto` was expected")
    source, found = _source(read)
    if source is None or has_errors(found):
        raise LaunchError(found)
    own = version_of(source)
    wanted = _SUFFIXES.get(Path(write).suffix.lower()) if write != "-" else None
    if wanted and to and wanted != to:
        raise usage_error(f"`--to {to}` contradicts the name {shown(write)}")
    if write != "-" and not wanted and not to:
        message = f"the name {shown(write)} does not determine which version to write"
        raise usage_error(message, "end it with .yaml or .textproto, or give `--to`")
    target: Literal["yaml", "textproto"] = "yaml" if own == "textproto" else "textproto"
    target = wanted or ("yaml" if to == "yaml" else "textproto" if to == "textproto" else target)
    result = convert_descriptor(source, to=target)
    if result.text is None:
        raise LaunchError(found + result.diagnostics)
    found += result.diagnostics
    if write == "-" or form is not Format.JSON:
        show_diagnostics(found, form=Format.FULL if form is Format.JSON else form)
    if write == "-":
        print_text(result.text)
    else:
        write_file(Path(write), result.text.encode(), force=force)
    if write != "-" and form is Format.JSON:
        content = {"file": write, "notes": list(result.notes), "diagnostics": [one.as_json() for one in found]}
        print_json(content, schema="convert")
        return
    print_lines([f"note: {note}" for note in result.notes], to=sys.stderr)
    if write != "-":
        print_lines([f"wrote {write}"])


def _source(name: str) -> "tuple[Source | None, list[Diagnostic]]":
    from ttlaunch.spec.located.codes import TOPOLOGY
    from ttlaunch.spec.located.source import read_source, source_from_bytes

    if name == "-":
        return source_from_bytes(sys.stdin.buffer.read(), codes=TOPOLOGY, what=_WHAT, name="standard input")
    return read_source(Path(name), codes=TOPOLOGY, what=_WHAT, blame=Blame.COMMAND_LINE)
