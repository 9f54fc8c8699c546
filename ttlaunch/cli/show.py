"""`ttlaunch show`: draw a cluster in the terminal or as SVG, with its ranks and roles."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import print_json, print_lines, print_text, show_diagnostics, tabbed, write_picture
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import OutputFormat, Verbose, asks_for, complete_configurations, complete_recipes
from ttlaunch.diagnostics import Format, LaunchError

if TYPE_CHECKING:
    from ttlaunch.draw.scene import Scene

EXAMPLES = """\
[bold]ttlaunch show 5loudboxes[/bold]   hosts, meshes and links

[bold]ttlaunch show 5loudboxes --recipe fabric_minimal --out cluster.svg[/bold]   with roles, as a picture
"""
_NARROWEST, _WIDEST = 80, 120


@asks_for("config_file", "overrides", "ranks", "naive", "hostfile", "rank_bindings")
def show(
    configuration: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A configuration's name or folder.", autocompletion=complete_configurations
        ),
    ] = "local",
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="RECIPE", help="Show this recipe's roles on the ranks.", autocompletion=complete_recipes
        ),
    ] = None,
    spec: RunSpec,
    svg: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the picture to an SVG file.")
    ] = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Draw the hosts and meshes of a cluster, their links, and the ranks on them."""
    from ttlaunch.draw.scene import make_scene

    spec = replace(spec, target=recipe, on=configuration)
    found = resolve(spec, dialogue=TerminalDialogue(form, verbose=verbose))
    if not found.ok or found.topology is None:
        raise LaunchError(found.diagnostics)
    show_diagnostics(found.diagnostics, form=form, verbose=verbose)
    scene = make_scene(found.topology, found.layout, recipe=found.name)
    if svg is not None:
        _write(scene, svg, form)
    elif form is not Format.JSON:
        _print(scene, form)
    if form is Format.JSON:
        print_json(_as_json(scene), schema="show")


def _print(scene: "Scene", form: Format) -> None:
    if form is Format.CONCISE:
        for number, box in enumerate(scene.boxes):
            linked = ",".join(scene.boxes[other].name for other, _ in scene.neighbours(number))
            ranks = ",".join(map(str, box.occupants))
            print_lines([tabbed((box.name, box.detail, ",".join(box.hosts), ranks, linked))])
        return
    from ttlaunch.draw.terminal import render_terminal

    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((_NARROWEST, 24)).columns))
    print_text(render_terminal(scene, width=width))


def _write(scene: "Scene", path: Path, form: Format) -> None:
    from ttlaunch.draw.svg import render_svg

    write_picture(path, render_svg(scene))
    if form is not Format.JSON:
        print_lines([f"wrote {path}"])


def _as_json(scene: "Scene") -> dict[str, Any]:
    boxes = [
        {
            "name": box.name,
            "shape": box.shape,
            "host_shape": box.host_shape,
            "ranks": [{"rank": each.rank, "host": each.host, "role": each.role or None} for each in box.occupants],
        }
        for box in scene.boxes
    ]
    links = [
        {"a": scene.boxes[wire.a].name, "b": scene.boxes[wire.b].name, "channels": wire.channels}
        for wire in scene.wires
    ]
    return {"topology": scene.title, "boxes": boxes, "links": links}
