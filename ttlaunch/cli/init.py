"""`ttlaunch init`: write the three files of a new configuration, which validates as it stands."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ttlaunch import contract
from ttlaunch.cli.console import print_json, print_lines
from ttlaunch.cli.options import PlainFormat
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, did_you_mean, file_error, listed, shown, usage_mistake

EXAMPLES = """\
[bold]ttlaunch init lab --hosts box-01,box-02:2[/bold]   writes configurations/lab/, one slot on box-01, two on box-02
"""

_LONGEST_NAME = 100


def init(
    name: Annotated[str, typer.Argument(help="Name of the configuration.", show_default=False)],
    *,
    hosts: Annotated[
        str,
        typer.Option(
            "--hosts",
            metavar="a,b:2,c",
            help="Hosts, each optionally with its number of slots after a colon (default 1).",
        ),
    ],
    device_shape: Annotated[
        str, typer.Option("--device-shape", metavar="ROWSxCOLUMNS", help="Devices that one rank drives.")
    ] = "1x8",
    arch: Annotated[
        str, typer.Option("--arch", help="Architecture of the devices, such as wormhole_b0, cpu or cuda.")
    ] = "wormhole_b0",
    folder: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder in which to create the configuration's folder.")
    ] = Path("configurations"),
    form: PlainFormat = Format.FULL,
) -> None:
    """Write a new configuration: hosts.txt, mgd.yaml and rank_bindings.yaml."""
    from ttlaunch.spec.topology.mesh_graph import ARCHITECTURES
    from ttlaunch.spec.topology.scaffold import parse_host_list, scaffold

    parsed = parse_host_list(hosts)
    mistakes = [parsed] if isinstance(parsed, Diagnostic) else []
    rows, _, columns = device_shape.lower().partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        message = f"`--device-shape {shown(device_shape)}` is not ROWSxCOLUMNS, such as `1x8`"
        mistakes.append(usage_mistake(message))
    if arch not in ARCHITECTURES:
        message = f"`--arch {shown(arch)}` is not known; {listed(ARCHITECTURES)} was expected"
        mistakes.append(usage_mistake(message, *did_you_mean(arch, ARCHITECTURES)))
    if "/" in name or name in {"", ".", ".."} or not name.isprintable() or len(name) > _LONGEST_NAME:
        mistakes.append(usage_mistake(f"`{shown(name)}` is no name for a configuration", "use `--out` for the place"))
    target = folder / name
    if not mistakes and target.exists():
        mistakes.append(usage_mistake(f"{target} already exists; nothing was written", "choose another name"))
    if mistakes or isinstance(parsed, Diagnostic):
        raise LaunchError(mistakes, status=contract.STATUS_USAGE)
    files = scaffold(name, parsed, device_shape=(int(rows), int(columns)), arch=arch)
    try:
        target.mkdir(parents=True)
        for file_name, text in files.items():
            (target / file_name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise file_error(target, error) from error
    if form is Format.JSON:
        print_json({"files": [str(target / file_name) for file_name in files]}, schema="init")
        return
    print_lines([f"wrote {target / file_name}" for file_name in files])
    where = name if folder == Path("configurations") else str(target)
    print_lines([f"check it with: ttlaunch validate {shlex.quote(where)}"])
