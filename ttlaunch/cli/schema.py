"""`ttlaunch schema`: print JSON Schemas of the YAML files, for editors."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.cli.console import print_lines, print_text
from ttlaunch.cli.options import complete_recipes
from ttlaunch.diagnostics import Diagnostic, LaunchError, file_error

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.declare import Recipe

EXAMPLES = """\
[bold]ttlaunch schema bindings > bindings.schema.json[/bold]   one file

[bold]ttlaunch schema --out .schemas[/bold]   all schemas, with the lines that connect them to your files
"""


class File(StrEnum):
    """The kind of file that a schema describes."""

    BINDINGS = "bindings"
    SUB_CONTEXTS = "sub-contexts"
    MGD = "mgd"
    CLUSTER = "cluster"
    TRAIN = "train"


def schema(
    file: Annotated[
        File | None, typer.Argument(help="The kind of file. Default: all kinds.", show_default=False)
    ] = None,
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="Use the keys of this recipe: those it adds are included, those it does not read are left out.",
            autocompletion=complete_recipes,
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write each schema to its own file.")
    ] = None,
) -> None:
    """Print JSON Schemas, with which editors complete keys and mark misspelled ones."""
    kinds = [file] if file else list(File)
    schemas: dict[str, dict[str, Any]] = {kind: _cluster_file(kind) for kind in kinds if kind is not File.TRAIN}
    if File.TRAIN in kinds:
        schemas |= _training_files(recipe, every=write is not None)
    if write is not None:
        _write(schemas, write)
    else:
        print_text(json.dumps(schemas[file] if file else schemas, indent=2))


def _cluster_file(kind: File) -> dict[str, Any]:
    from ttlaunch.spec.located.json_schema import json_schema
    from ttlaunch.spec.topology.schema import BindingsFile, ClusterFile, MeshGraphFile, SubContextFilesFile

    if kind is File.BINDINGS:
        return json_schema(BindingsFile, title="rank_bindings.yaml of ttlaunch")
    if kind is File.SUB_CONTEXTS:
        return json_schema(SubContextFilesFile, title="a mapping of sub-contexts to bindings of ttlaunch")
    if kind is File.MGD:
        return json_schema(MeshGraphFile, title="mgd.yaml of ttlaunch")
    return json_schema(ClusterFile, title="cluster.yaml of ttlaunch")


def _training_files(recipe: str | None, *, every: bool) -> dict[str, dict[str, Any]]:
    """Return the schema of one recipe's training file, of every recipe's, or of the sections that recipes share."""
    from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe
    from ttlaunch.spec.recipe.sections import TrainingFile

    if recipe is not None:
        found = find_recipe(recipe, working_folder=Path.cwd())
        declared = found if isinstance(found, Diagnostic) else load_recipe(found)
        if isinstance(found, Diagnostic) or isinstance(declared, Diagnostic):
            raise LaunchError([each for each in (found, declared) if isinstance(each, Diagnostic)][:1])
        return {File.TRAIN: _training_file(declared, found.name)}
    if every:
        from ttlaunch.app.inspect_recipes import inspect_recipes

        recipes = inspect_recipes(Path.cwd(), with_schema=True)
        return {f"{File.TRAIN}.{one.found.name}": one.schema for one in recipes if one.schema is not None}
    from ttlaunch.spec.located.json_schema import json_schema

    return {File.TRAIN: json_schema(TrainingFile, title="training file of ttlaunch")}


def _training_file(declared: "Recipe", name: str) -> dict[str, Any]:
    from ttlaunch.spec.located.json_schema import json_schema

    return json_schema(declared.config, title=f"training file of {name}", unread=declared.unread)


def _write(schemas: dict[str, dict[str, Any]], folder: Path) -> None:
    paths = [folder / f"{name}.schema.json" for name in schemas]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, schemas.values(), strict=True):
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise file_error(folder, error) from error
    print_lines([f"wrote {path}" for path in paths])
    print_lines(["", "An editor with a YAML language server uses one if the first line of a file names it:"])
    print_lines([f"  # yaml-language-server: $schema={paths[0].resolve()}"])
    print_lines(["The path may also be relative to the file."])
