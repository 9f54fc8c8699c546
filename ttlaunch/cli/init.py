"""`ttlaunch init`: write the files of a new configuration, which validates as it stands."""

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.run_spec import LOCAL
from ttlaunch.cli.console import print_json, print_lines
from ttlaunch.cli.options import PlainFormat
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, did_you_mean, file_error, listed, shown, usage_mistake

EXAMPLES = """\
[bold]ttlaunch init lab --hosts box-01,box-02:2[/bold]   writes configurations/lab/, one slot on box-01, two on box-02

[bold]ttlaunch init lab --plain --hosts box-01:2,box-02:2[/bold]   machines without Tenstorrent devices
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
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="For machines without Tenstorrent devices: write hosts.txt alone, without meshes."
        ),
    ] = False,
    device_shape: Annotated[
        str | None,
        typer.Option("--device-shape", metavar="ROWSxCOLUMNS", help="Devices that one rank drives. Default: 1x8."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch", help="Architecture of the devices, such as wormhole_b0, cpu or cuda. Default: wormhole_b0."
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder in which to create the configuration's folder.")
    ] = Path("configurations"),
    form: PlainFormat = Format.FULL,
) -> None:
    """Write a new configuration: hosts.txt, and with meshes of devices also mgd.yaml and rank_bindings.yaml."""
    from ttlaunch.spec.topology.scaffold import parse_host_list, scaffold, scaffold_plain

    parsed = parse_host_list(hosts)
    rows, _, columns = (device_shape or "1x8").lower().partition("x")
    mistakes = [*([parsed] if isinstance(parsed, Diagnostic) else []), *_wrong_devices(device_shape, arch, plain=plain)]
    if "/" in name or name in {"", ".", ".."} or not name.isprintable() or len(name) > _LONGEST_NAME:
        mistakes.append(usage_mistake(f"`{shown(name)}` is no name for a configuration", "use `--out` for the place"))
    target = folder / name
    if not mistakes and target.exists():
        mistakes.append(usage_mistake(f"{target} already exists; nothing was written", "choose another name"))
    if mistakes or isinstance(parsed, Diagnostic):
        raise LaunchError(mistakes, status=contract.STATUS_USAGE)
    if plain:
        files = scaffold_plain(name, parsed)
    else:
        files = scaffold(name, parsed, device_shape=(int(rows), int(columns)), arch=arch or "wormhole_b0")
    _write(files, target)
    if form is Format.JSON:
        print_json({"files": [str(target / file_name) for file_name in files]}, schema="init")
        return
    print_lines([f"wrote {target / file_name}" for file_name in files])
    where = name if folder == Path("configurations") else str(target)
    print_lines([f"check it with: ttlaunch validate {shlex.quote(where)}"])
    _note_hidden(name, target)


def _wrong_devices(device_shape: str | None, arch: str | None, *, plain: bool) -> Iterator[Diagnostic]:
    """Report mistakes in the options about devices, which `--plain` machines do not have."""
    from ttlaunch.spec.topology.mesh_graph import ARCHITECTURES

    for option, value in (("--device-shape", device_shape), ("--arch", arch)):
        if plain and value is not None:
            message = f"`{option}` describes devices, and `--plain` machines without any"
            yield usage_mistake(message, f"leave out `--plain` or `{option}`")
    if device_shape is not None:
        rows, _, columns = device_shape.lower().partition("x")
        if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
            yield usage_mistake(f"`--device-shape {shown(device_shape)}` is not ROWSxCOLUMNS, such as `1x8`")
    if arch is not None and arch not in ARCHITECTURES:
        message = f"`--arch {shown(arch)}` is not known; {listed(ARCHITECTURES)} was expected"
        yield usage_mistake(message, *did_you_mean(arch, ARCHITECTURES))


def _note_hidden(name: str, target: Path) -> None:
    """Say so if commands will now take the new configuration for a built-in one of the same name."""
    from ttlaunch.spec.topology.discovery import find_configuration

    found = find_configuration(name, working_folder=Path.cwd())
    if isinstance(found, Diagnostic) or not found.hides or found.folder.resolve() != target.resolve():
        return
    without_on = ", and commands without `--on` use it" if name == LOCAL else ""
    print_lines([f"note: it hides the built-in configuration `{name}`{without_on}"], to=sys.stderr)


def _write(files: Mapping[str, str], folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise file_error(folder, error) from error
