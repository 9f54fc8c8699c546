"""`ttlaunch convert`: write a mesh graph descriptor as the other version, and say what that cannot hold."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from ttlaunch.cli.console import refuse, refuse_file, show_diagnostics
from ttlaunch.diagnostics import Blame, Diagnostic, Format, shown

if TYPE_CHECKING:
    from ttlaunch.diagnostics.span import Source

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
    from ttlaunch.diagnostics import has_errors
    from ttlaunch.spec.topology.convert import convert as convert_descriptor
    from ttlaunch.spec.topology.convert import version_of

    if to not in {None, "yaml", "textproto"}:
        _refuse(f"`--to {shown(to)}` is not a version; `yaml` or `textproto` was expected", form)
    source, found = _source(read)
    if source is None or has_errors(found):
        refuse(found, form=form)
    own = version_of(source)
    wanted = _SUFFIXES.get(Path(write).suffix.lower()) if write != "-" else None
    if wanted and to and wanted != to:
        _refuse(f"`--to {to}` contradicts the name {shown(write)}", form)
    if write != "-" and not wanted and not to:
        message = f"the name {shown(write)} does not say which version to write"
        _refuse(message, form, hint="end it with .yaml or .textproto, or give `--to`")
    target: Literal["yaml", "textproto"] = "yaml" if own == "textproto" else "textproto"
    target = wanted or ("yaml" if to == "yaml" else "textproto" if to == "textproto" else target)
    result = convert_descriptor(source, to=target)
    if result.text is None:
        refuse(found + result.diagnostics, form=form)
    show_diagnostics(found + result.diagnostics, form=Format.FULL if form is Format.JSON else form)
    _write(write, result.text, force=force, form=form)
    sys.stderr.write("".join(f"note: {note}\n" for note in result.notes))
    if write != "-":
        sys.stdout.write(f"wrote {write}\n")


def _source(name: str) -> "tuple[Source | None, list[Diagnostic]]":
    from ttlaunch.spec.located.codes import TOPOLOGY
    from ttlaunch.spec.located.source import read_source, source_from_bytes

    if name == "-":
        return source_from_bytes(sys.stdin.buffer.read(), codes=TOPOLOGY, what=_WHAT, name="standard input")
    return read_source(Path(name), codes=TOPOLOGY, what=_WHAT)


def _write(name: str, text: str, *, force: bool, form: Format) -> None:
    if name == "-":
        sys.stdout.write(text)
        return
    path = Path(name)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        _refuse(f"{shown(name)} exists already", form, hint="`--force` overwrites it")
    except OSError as error:
        refuse_file(path, error, form=form)


def _refuse(message: str, form: Format, *, hint: str = "") -> NoReturn:
    refuse([Diagnostic("P009", message, hints=(hint,) if hint else (), blame=Blame.COMMAND_LINE)], form=form)
