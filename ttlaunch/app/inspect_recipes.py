"""Inspect all recipes that can be named, for commands such as `ttlaunch recipes list`, whose user has named none.

To inspect a recipe, its `recipe.py` must run. A recipe in `./recipes` may come from somebody else, so it runs in a process of
its own with a time limit, and only the process's answer is used. A process is no sandbox: the code has the user's rights.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ttlaunch
from ttlaunch.diagnostics import Diagnostic, shown
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.named_folders import NamedFolder
from ttlaunch.spec.recipe.discovery import list_recipes, load_recipe

LIMIT_S = 10.0
"""How long the `recipe.py` of a recipe that the user has not named may run."""

_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import ttlaunch; del sys.path[0]; "
    "from ttlaunch.app.inspect_recipes import answer; answer(*sys.argv[2:])"
)
_AT_ONCE = 4
_LARGEST_ANSWER = 4 * 1024 * 1024
_LONGEST_SUMMARY = 500


@dataclass(frozen=True)
class InspectedRecipe:
    """What a `recipe.py` declares.

    Attributes:
        found: The recipe's name and folder.
        summary: A sentence about the recipe; empty if `recipe.py` cannot be used.
        uses_data: Whether the recipe trains a model on text.
        schema: The JSON Schema of the training file; None unless it was requested.
        mistake: Why `recipe.py` cannot be used; empty if it can.
    """

    found: NamedFolder
    summary: str = ""
    uses_data: bool = False
    schema: dict[str, Any] | None = None
    mistake: str = ""


def inspect_recipes(
    working_folder: Path, *, with_schema: bool = False, limit_s: float = LIMIT_S
) -> list[InspectedRecipe]:
    """Inspect all recipes: built-in ones in this process, and each recipe of the current folder in a process of its own."""

    def inspect(found: NamedFolder) -> InspectedRecipe:
        if found.built_in:
            return _inspected(found, _describe(found, with_schema=with_schema))
        return _inspected(found, _ask_process(found, with_schema=with_schema, limit_s=limit_s))

    recipes = list_recipes(working_folder)
    with ThreadPoolExecutor(_AT_ONCE) as workers:
        own = {found.name: workers.submit(inspect, found) for found in recipes if not found.built_in}
        return [inspect(found) if found.built_in else own[found.name].result() for found in recipes]


def answer(name: str, folder: str, with_schema: str) -> None:
    """Write what a recipe declares to standard output, as JSON; what its own code prints goes to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)
    described = _describe(NamedFolder(name, Path(folder), built_in=False), with_schema=bool(with_schema))
    os.write(output, json.dumps(described).encode())


def _describe(found: NamedFolder, *, with_schema: bool) -> dict[str, Any]:
    from ttlaunch.spec.located.json_schema import json_schema

    recipe = load_recipe(found)
    if isinstance(recipe, Diagnostic):
        return {"mistake": recipe.message}
    schema = None
    if with_schema:
        schema = json_schema(recipe.config, title=f"training file of {found.name}", unread=recipe.unread)
    return {"summary": recipe.summary, "uses_data": recipe.uses_data, "schema": schema}


def _ask_process(found: NamedFolder, *, with_schema: bool, limit_s: float) -> dict[str, Any]:
    """Return what a recipe declares, as a new process reports it."""
    home = str(Path(ttlaunch.__file__).parents[1])
    arguments = [home, found.name, str(found.folder), "yes" * with_schema]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"mistake": f"recipe `{found.name}` cannot be read: recipe.py did not end within {limit_s:g} s"}
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends processes that the recipe's code has started
            process.wait()
        output.seek(0)
        with contextlib.suppress(ValueError, RecursionError):
            described = json.loads(output.read(_LARGEST_ANSWER))
            if isinstance(described, dict):
                return described
    return {"mistake": f"recipe `{found.name}` cannot be read: recipe.py ended its process with status {status}"}


def _inspected(found: NamedFolder, described: dict[str, Any]) -> InspectedRecipe:
    schema = described.get("schema")
    return InspectedRecipe(
        found,
        summary=shown(described.get("summary", ""), longest=_LONGEST_SUMMARY),
        uses_data=described.get("uses_data") is True,
        schema=schema if isinstance(schema, dict) else None,
        mistake=shown(described.get("mistake", ""), longest=_LONGEST_SUMMARY),
    )
