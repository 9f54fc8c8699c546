"""`ttlaunch recipes`: list what can be run, show one recipe, copy one to change it."""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.cli.console import print_json, print_lines, print_text
from ttlaunch.cli.listing import print_listing
from ttlaunch.cli.options import PlainFormat, complete_recipes
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, file_error, usage_error

if TYPE_CHECKING:
    from ttlaunch.spec.named_folders import NamedFolder
    from ttlaunch.spec.recipe.declare import Layout, Recipe

app = typer.Typer(help="List, show and copy recipes.", no_args_is_help=True)

_Name = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe's name or folder.", autocompletion=complete_recipes, show_default=False
    ),
]


@app.command("list")
def list_(*, form: PlainFormat = Format.FULL) -> None:
    """List every recipe. A recipe in ./recipes hides a built-in one of the same name.

    To know its summary, ttlaunch runs the recipe.py of each folder in ./recipes, in a process of its own for at most 10 s.
    """
    from ttlaunch.app.inspect_recipes import inspect_recipes

    rows = []
    for recipe in inspect_recipes(Path.cwd()):
        found, about = recipe.found, recipe.summary
        if recipe.mistake:
            about = f"cannot be read: {recipe.mistake}"
        if found.hides and form is not Format.JSON:
            about = f"(./recipes/{found.name}, which hides the built-in one) {about}"
        rows.append({"name": found.name, "summary": about, "folder": str(found.folder), "built_in": found.built_in})
        rows[-1]["hides_built_in"] = found.hides
    print_listing(rows, about="summary", schema="recipes", form=form)


@app.command()
def show(name: _Name, *, form: PlainFormat = Format.FULL) -> None:
    """Show a recipe's layouts, flows and training file."""
    from ttlaunch.spec.recipe.declare import Pattern
    from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe

    found = find_recipe(name, working_folder=Path.cwd())
    if isinstance(found, Diagnostic):
        raise _refusal(found)
    recipe = load_recipe(found)
    if isinstance(recipe, Diagnostic):
        raise _refusal(recipe)
    layouts, naive = _layouts(recipe.layouts), None if recipe.naive is None else _layouts(recipe.naive.layouts)
    flows = [
        f"{flow.source} - {flow.target}" + (f" ({flow.pattern})" if flow.pattern is not Pattern.ALL else "")
        for flow in recipe.flows_in([r for x in layouts.values() for r in x])
    ]
    if form is Format.JSON:
        print_json(
            {
                "name": found.name,
                "summary": recipe.summary,
                "folder": str(found.folder),
                "layouts": layouts,
                "naive": naive,
                "flows": flows,
            },
            schema="recipe",
        )
        return
    print_lines([f"{found.name}: {recipe.summary}", f"folder: {found.folder}"])
    for layout_name, roles in layouts.items():
        print_lines([f"layout {layout_name}: {_counts(roles)}"])
    for roles in (naive or {}).values():
        print_lines([f"naive form, with --naive: {_counts(roles)}"])
    print_lines([f"flow {flow}" for flow in flows])
    if found.train_file.is_file():
        text = _every_key(recipe, found) if found.built_in else found.train_file.read_text(encoding="utf-8")
        print_text(f"\n# {found.train_file.name}\n{text}")


@app.command()
def copy(
    name: _Name,
    target: Annotated[
        Path | None, typer.Argument(metavar="[TO]", help="New folder. Default: ./recipes/<name>.")
    ] = None,
) -> None:
    """Copy a recipe's folder so that you can change it. A copy under ./recipes hides the built-in recipe."""
    from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe

    found = find_recipe(name, working_folder=Path.cwd())
    if isinstance(found, Diagnostic):
        raise _refusal(found)
    folder = target or Path("recipes") / found.name
    if folder.exists():
        raise usage_error(f"{folder} already exists; nothing was written", "name another folder")
    # A built-in training file has only values that differ from the defaults; a user who changes a copy needs every key.
    recipe = load_recipe(found) if found.built_in else None
    if isinstance(recipe, Diagnostic):
        raise _refusal(recipe)
    try:
        shutil.copytree(found.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
        if recipe is not None and found.train_file.is_file():
            (folder / found.train_file.name).write_text(_every_key(recipe, found), encoding="utf-8")
    except OSError as error:
        raise file_error(folder, error) from error
    print_lines([f"copied {found.name} to {folder}", f"run it with: ttlaunch run {shlex.quote(str(folder))}"])


def _layouts(layouts: "Sequence[Layout]") -> dict[str, dict[str, str | int]]:
    from ttlaunch.spec.recipe.declare import Per

    return {
        layout.name: {role: str(n) if isinstance(n, Per) else n or "any number" for role, n in layout.roles.items()}
        for layout in layouts
    }


def _counts(roles: Mapping[str, str | int]) -> str:
    return ", ".join(f"{role} × {count}" for role, count in roles.items())


def _every_key(recipe: "Recipe", found: "NamedFolder") -> str:
    """Render the recipe's training file with every key, defaults included, and the meaning of each."""
    from ttlaunch.spec.recipe.config import load_config, render_commented

    return render_commented(recipe, load_config(recipe, found.train_file))


def _refusal(mistake: Diagnostic) -> LaunchError:
    """Exit with the status of the command line, also if the mistake is in the recipe's own file."""
    return LaunchError([mistake], status=contract.STATUS_USAGE)
