"""`ttlaunch validate`: check a configuration, alone or together with a recipe."""

from dataclasses import replace
from typing import Annotated

import typer

from ttlaunch.app.resolve import ResolvedSpec, resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import OutputFormat, Verbose, asks_for, complete_configurations, complete_recipes
from ttlaunch.diagnostics import Format, counted, exit_status

EXAMPLES = """\
[bold]ttlaunch validate 5loudboxes[/bold]   the files of a cluster

[bold]ttlaunch validate my_cluster --recipe hierarchical_parallel -c train.yaml[/bold]   also the recipe that will run there

[bold]ttlaunch validate hosts.txt[/bold]   a single file; - is standard input
"""


@asks_for("config_file", "overrides", "ranks", "naive", "hostfile", "rank_bindings")
def validate(
    configuration: Annotated[
        str,
        typer.Argument(
            metavar="NAME|DIR|FILE",
            help="A configuration's name or folder, or a single file; - is standard input.",
            autocompletion=complete_configurations,
        ),
    ] = "local",
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="Also check that this recipe can run there.",
            autocompletion=complete_recipes,
        ),
    ] = None,
    spec: RunSpec,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", metavar="KIND", help="The kind of a single file: hosts, mgd, bindings, cluster, train or mapping."
        ),
    ] = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Check the files of a cluster, or one file. Each mistake is shown at its place, with its repair."""
    from ttlaunch.cli.validate_file import names_a_file, validate_file

    if spec.hostfile is None and names_a_file(configuration, kind=kind):
        given = {
            "-c": spec.config_file,
            "--ranks": spec.ranks,
            "--naive": spec.naive,
            "--rank-bindings": spec.rank_bindings,
        }
        unused = [name for name, value in given.items() if value]
        validate_file(
            configuration,
            kind=kind,
            recipe=recipe,
            overrides=spec.overrides,
            unused=unused,
            form=form,
            verbose=verbose,
        )
    spec = replace(spec, target=recipe, on=configuration)
    result = resolve(spec, dialogue=TerminalDialogue(form, verbose=verbose))
    if result.ok and result.topology is not None and result.layout is not None and result.choice is not None:
        from ttlaunch.planning.fabric import sends_over_links
        from ttlaunch.planning.place import check_placement

        if sends_over_links(result.choice.loaded):
            result.diagnostics += check_placement(result.topology, result.layout, recipe=result.name)
    _show(result, form=form, verbose=verbose)
    exit_with(exit_status(result.diagnostics))


def _show(result: ResolvedSpec, *, form: Format, verbose: bool) -> None:

    show_diagnostics(result.diagnostics, form=form, verbose=verbose)
    topology = result.topology
    if form is Format.JSON:
        print_json({"valid": result.ok, "diagnostics": [d.as_json() for d in result.diagnostics]}, schema="validate")
    elif result.ok and topology is not None:
        size = f"{counted(topology.world_size, 'rank')} bound" if topology.world_size else "world size open"
        parts = [counted(len(topology.hosts), "host"), counted(len(topology.slots), "slot"), size]
        if topology.meshes:
            from ttlaunch.spec.topology.mesh_graph import counted_parts

            parts += counted_parts(topology)
        print_lines([f"{topology.name} is consistent: {', '.join(parts)}"])
        if verbose:
            found = f" (descriptor found: {result.descriptor_found})" if result.descriptor_found else ""
            print_lines([f"read {', '.join(result.files)}{found}"])
        if result.layout is not None:
            size = counted(result.layout.world_size, "rank")
            print_lines([f"{result.name} fits: layout {result.layout.layout.name}, {size}"])
