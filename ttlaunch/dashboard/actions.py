"""Launch, stop and resume runs from the page (`--allow-actions`), as the command line does and after the same checks.

Whoever has the page's key can ask for it, so it cannot ask for everything: it names recipes that are built in or in the folder of
`--actions-from`, configurations by their names, and values that are numbers, truth values or one of a few words. No path, URL, command or
text of any kind comes from the page.
"""

import json
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ttlaunch import contract
from ttlaunch.app.library import start
from ttlaunch.app.named_run import read_launcher_here
from ttlaunch.app.stop import interrupt
from ttlaunch.diagnostics import LaunchError, did_you_mean, shown, usage_error
from ttlaunch.running.runs.files import read_object
from ttlaunch.running.runs.launcher import is_running
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.spec.named_folders import NamedFolder
from ttlaunch.spec.recipe.declare import Recipe
from ttlaunch.spec.recipe.discovery import list_recipes, load_recipe
from ttlaunch.spec.recipe.shared import settable_keys
from ttlaunch.spec.topology.discovery import list_configurations

_MOST_VALUES = 64
_LONGEST = 200
_MOST_RANKS = 1024
_PLAIN: Final = (bool, int, float, type(None))
_HISTORY = "action"


class Actions:
    """What the page may do. Its methods may be called by several threads; each raises `LaunchError` for what is refused."""

    def __init__(self, runs_folder: Path, recipes: Path | None = None) -> None:
        """Allow built-in recipes and those in a folder.

        Args:
            runs_folder: Where runs are made and looked for.
            recipes: A folder of recipes; None for no others than those that are built in.
        """
        self._runs_folder = runs_folder
        self._folder = recipes

    def choices(self) -> dict[str, Any]:
        """Return what the form offers: recipes with the keys that can be set, and configurations."""
        recipes = []
        for name, found in self._recipes().items():
            recipe = load_recipe(found)
            if isinstance(recipe, Recipe) and not recipe.only_weights:
                recipes.append({"name": name, "summary": recipe.summary, "keys": _keys_as_json(recipe)})
        return {"recipes": recipes, "configurations": self._configurations()}

    def launch(self, order: Mapping[str, Any]) -> str:
        """Start a run that goes on without the page, and return its id.

        Args:
            order: `recipe`, a name; `on`, the name of a configuration; `ranks`, a number, if any; `set`, values as texts by key.
        """
        found = self._recipe(order.get("recipe"))
        chosen = _chosen(order.get("set") or {}, found)
        run = start(
            str(found.folder),
            detach=True,
            on=self._configuration(order.get("on") or "local"),
            ranks=_ranks(order.get("ranks")),
            set=[f"{key}={value}" for key, value in chosen.items()],
            runs_dir=self._runs_folder,
        )
        _note(run.folder, "launch")
        return run.folder.name

    def resume(self, path: Path) -> str:
        """Start a run that continues another one, with the configuration of that one, and return its id."""
        plan = _plan(path)
        program = plan.get("recipe")
        if not isinstance(program, dict):
            raise usage_error(f"{path.name} is of a program", f"`ttlaunch run … --resume {path.name}` continues it")
        if is_running(path):
            raise usage_error(f"{path.name} is still running", "stop it first")
        found = self._recipe(program.get("name"))
        if Path(str(program.get("folder"))).resolve() != found.folder:
            message = f"the recipe of {path.name} is another one than the `{found.name}` that the page may start"
            raise usage_error(message, f"`ttlaunch run … --resume {path.name}` continues it")
        rows = plan.get("ranks") or ()
        run = start(
            str(found.folder),
            detach=True,
            on=self._configuration(plan.get("topology")),
            ranks=len(rows) if plan.get("topology") == "local" else None,
            config=path / contract.TRAIN_FILE,
            resume=path,
            runs_dir=self._runs_folder,
        )
        _note(run.folder, "resume")
        return run.folder.name

    def stop(self, path: Path, *, now: bool = False) -> None:
        """Tell a run to end, as Ctrl-C in its terminal does; with `now`, its ranks do not finish their step."""
        launcher = read_launcher_here(path, "stop")
        if launcher is None or not launcher.is_alive or not is_running(path):
            raise usage_error(f"{path.name} is not running here", "it may have ended meanwhile")
        _note(path, "stop at once" if now else "stop")
        Thread(target=interrupt, args=(launcher,), kwargs={"grace_s": None, "now": now}, daemon=True).start()

    def _recipes(self) -> dict[str, NamedFolder]:
        """Return the recipes that may be started, by name; those of the folder hide built-in ones."""
        nowhere = Path("/nonexistent")  # the current folder's recipes are allowed by naming their folder only
        found = {one.name: one for one in list_recipes(nowhere)}
        if self._folder is not None:
            for child in sorted(self._folder.iterdir()):
                if (child / "recipe.py").is_file():
                    found[child.name] = NamedFolder(child.name, child.resolve(), built_in=False)
        return found

    def _recipe(self, name: object) -> NamedFolder:
        known = self._recipes()
        if isinstance(name, str) and name in known:
            return known[name]
        hints = did_you_mean(str(name)[:_LONGEST], known) if name else ()
        others = "other recipes are started on the command line, or allowed by `--actions-from DIR`"
        raise usage_error(f"the page may start no recipe `{shown(str(name)[:_LONGEST])}`", *hints, others)

    def _configurations(self) -> list[str]:
        return [one.name for one in list_configurations(Path.cwd())]

    def _configuration(self, name: object) -> str:
        known = self._configurations()
        if isinstance(name, str) and name in known:
            return name
        raise usage_error(
            f"there is no configuration `{shown(str(name)[:_LONGEST])}`", *did_you_mean(str(name)[:_LONGEST], known)
        )


def takes_plain_values(annotation: object) -> bool:
    """Whether a key of this type takes numbers, truth values, one of a few words, or lists of these, and no text."""
    origin = get_origin(annotation)
    if origin is Literal:
        return True
    if origin is Annotated:
        return takes_plain_values(get_args(annotation)[0])
    if origin in {Union, types.UnionType, list, tuple}:
        return all(one is Ellipsis or takes_plain_values(one) for one in get_args(annotation))
    return annotation in _PLAIN


def _chosen(given: object, found: NamedFolder) -> dict[str, str]:
    """Check that no key is set that the page must not set; whether it exists and suits is for the checks of every run."""
    if not isinstance(given, dict) or len(given) > _MOST_VALUES:
        raise usage_error("the values are no object, or too many")
    recipe = load_recipe(found)
    if not isinstance(recipe, Recipe):
        raise LaunchError([recipe])
    known = settable_keys(recipe)
    chosen = {}
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if len(key) > _LONGEST or len(text) > _LONGEST or "\n" in key + text:
            raise usage_error(f"the value of `{shown(key[:_LONGEST])}` is too long")
        is_section = any(other.startswith(f"{key}.") for other in known)
        if is_section or (key in known and not takes_plain_values(known[key].annotation)):
            message = f"`{shown(key)}` takes {'more than one value' if is_section else 'a text'}, which cannot be set from the page"
            raise usage_error(message, f"`ttlaunch run {found.name} --set {shown(key)}=…` sets it")
        chosen[key] = text
    return chosen


def _keys_as_json(recipe: Recipe) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "description": field.description or "",
            "choices": _choices(field.annotation),
            "default": _default(field),
        }
        for key, field in settable_keys(recipe).items()
        if takes_plain_values(field.annotation)
    ]


def _choices(annotation: object) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(one) for one in get_args(annotation)]
    if annotation is bool:
        return ["true", "false"]
    return _choices(get_args(annotation)[0]) if get_origin(annotation) is Annotated else []


def _default(field: FieldInfo) -> str | None:
    value = None if field.is_required() else field.get_default(call_default_factory=False)
    return None if value is None else json.dumps(value, default=str)


def _ranks(given: object) -> int | None:
    if given is None or given == "":
        return None
    text = str(given)
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 6 and 0 < int(text) <= _MOST_RANKS):  # noqa: PLR2004 - of the largest
        raise usage_error(f"`{shown(text[:_LONGEST])}` is no number of ranks", f"expected 1 to {_MOST_RANKS}")
    return int(text)


def _plan(path: Path) -> Mapping[str, Any]:
    try:
        return read_object(path / contract.PLAN_FILE)
    except (OSError, ValueError) as error:
        raise usage_error(f"{path.name} cannot be read: {error}") from error


def _note(path: Path, what: str) -> None:
    """Write into the history of a run what was done from the page; a history that cannot be written changes nothing."""
    with suppress(OSError):
        append_event(RunFolder(path.name, path), _HISTORY, what=what, by="the dashboard")
