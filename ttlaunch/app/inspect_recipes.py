"""Look into every recipe that a name can mean, although nobody named it, as `ttlaunch recipes list` does.

To know a recipe, its `recipe.py` must run. Those in `./recipes` may come from a stranger, so each runs in a process of its
own that has a time limit, and only what it answers is used. A process is no sandbox: the code has the rights of the user.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ttlaunch
from ttlaunch.diagnostics import Diagnostic, shown
from ttlaunch.spec.named_folders import NamedFolder
from ttlaunch.spec.recipe.discovery import list_recipes, load_recipe

LIMIT_S = 10.0
"""How long a `recipe.py` may take that nobody named."""

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
        summary: Its sentence; empty if it cannot be read.
        uses_data: Whether it trains a model on text.
        schema: The JSON Schema of its training file; None if it was not asked for.
        mistake: Why it cannot be read; empty if it can.
    """

    found: NamedFolder
    summary: str = ""
    uses_data: bool = False
    schema: dict[str, Any] | None = None
    mistake: str = ""


def inspect_recipes(
    working_folder: Path, *, with_schema: bool = False, limit_s: float = LIMIT_S
) -> list[InspectedRecipe]:
    """Inspect every recipe that a name can mean: built-in ones here, those of the current folder each in a process of its own."""

    def inspect(found: NamedFolder) -> InspectedRecipe:
        if found.built_in:
            return _inspected(found, _describe(found, with_schema=with_schema))
        return _inspected(found, _ask_process(found, with_schema=with_schema, limit_s=limit_s))

    recipes = list_recipes(working_folder)
    with ThreadPoolExecutor(_AT_ONCE) as workers:
        own = {found.name: workers.submit(inspect, found) for found in recipes if not found.built_in}
        return [inspect(found) if found.built_in else own[found.name].result() for found in recipes]


def answer(name: str, folder: str, with_schema: str) -> None:
    """Write what a recipe declares to standard output, as JSON; what its code prints meanwhile goes nowhere."""
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
    """Return what a process of its own says about a recipe."""
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
                os.killpg(process.pid, signal.SIGKILL)  # with whatever the code has started
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
