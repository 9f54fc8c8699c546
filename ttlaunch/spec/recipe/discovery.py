"""Find recipes and read their declarations: in the current folder's `recipes/` first, then built in, or by path.

A recipe is a folder with `recipe.py` and `trainer.py`. It is loaded by path, as a package of its own, so that
`from .recipe import Config` works in `trainer.py` wherever the folder lies.
"""

import os
import traceback
from dataclasses import dataclass
from pathlib import Path

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Source, did_you_mean, listed, shown
from ttlaunch.spec.recipe.declare import Recipe
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.trainer_code import check_trainer

_PACKAGE = Path(__file__).parents[2]
_DECLARATION = "recipe.py"
_TRAINER = "trainer.py"
_LONGEST_REASON = 200


@dataclass(frozen=True)
class FoundRecipe:
    """A recipe's folder, before its code is loaded.

    Attributes:
        name: The folder's name.
        built_in: Whether it came with ttlaunch.
    """

    name: str
    folder: Path
    built_in: bool

    @property
    def train_file(self) -> Path:
        return self.folder / "train.yaml"


def built_in_folder(kind: str) -> Path:
    """Where `recipes` or `configurations` lie: inside the wheel, else beside the package in a checkout."""
    packaged = _PACKAGE / f"_{kind}"
    return packaged if packaged.is_dir() else _PACKAGE.parent / kind


def list_recipes(working_folder: Path) -> list[FoundRecipe]:
    """All recipes that a name can mean, one per name: those of the current folder hide built-in ones."""
    found: dict[str, FoundRecipe] = {}
    for folder, built_in in ((built_in_folder("recipes"), True), (working_folder / "recipes", False)):
        if not folder.is_dir() or (not built_in and folder.resolve() == built_in_folder("recipes").resolve()):
            continue
        for child in sorted(folder.iterdir()):
            if (child / _DECLARATION).is_file():
                found[child.name] = FoundRecipe(child.name, child.resolve(), built_in)
    return [found[name] for name in sorted(found)]


def find_recipe(name: str, *, working_folder: Path) -> FoundRecipe | Diagnostic:
    """The recipe that the user means by a name or a path."""
    known = list_recipes(working_folder)
    if not name:
        message = "the name of the recipe is empty"
        return Diagnostic(
            "P001",
            message,
            notes=(f"recipes here: {listed([one.name for one in known], last='and')}",),
            blame=Blame.COMMAND_LINE,
        )
    for recipe in known:
        if recipe.name == name:
            return recipe
    path = working_folder / os.path.expanduser(name)  # noqa: PTH111 - this one never raises, whatever was typed
    if os.path.isdir(path):  # noqa: PTH112 - likewise
        if not (path / _DECLARATION).is_file():
            message = f"the folder {shown(name)} holds no `{_DECLARATION}`, so it is no recipe"
            return Diagnostic(
                "P001",
                message,
                hints=("`ttlaunch recipes copy hierarchical_parallel` makes one to change",),
                blame=Blame.COMMAND_LINE,
            )
        folder = path.resolve()
        return FoundRecipe(folder.name, folder, built_in=False)
    names = [recipe.name for recipe in known]
    return Diagnostic(
        "P001",
        f"there is no recipe `{shown(name)}`",
        notes=(f"recipes here: {listed(names, last='and')}",),
        hints=did_you_mean(name, names) or ("`ttlaunch recipes list` describes them",),
        blame=Blame.COMMAND_LINE,
    )


def load_recipe(found: FoundRecipe) -> Recipe | Diagnostic:
    """Run `recipe.py` and take its `RECIPE`; what is wrong with the file becomes a diagnostic at its line."""
    declaration = found.folder / _DECLARATION
    if not (found.folder / _TRAINER).is_file():
        return Diagnostic("P006", f"recipe `{found.name}` has no `{_TRAINER}`", notes=(f"looked in {found.folder}",))
    try:
        module = import_recipe_module(found.folder, "recipe")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's file raises is reported at its line
        return _load_error(found, declaration, error)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        text = declaration.read_text(encoding="utf-8", errors="replace")
        place = Label(Source(str(declaration), text).start(), "no `RECIPE = Recipe(…)` in this file")
        return Diagnostic("P006", f"recipe `{found.name}` declares nothing", place)
    return check_trainer(found.name, found.folder / _TRAINER, recipe) or recipe


def _load_error(found: FoundRecipe, declaration: Path, error: BaseException) -> Diagnostic:
    """Point at the innermost line that belongs to the recipe, or at the place of a syntax error."""
    kind = type(error).__name__
    line, column, length = 1, 1, 1
    if isinstance(error, SyntaxError) and error.lineno:
        declaration = Path(error.filename or declaration)
        line, column, reason = error.lineno, error.offset or 1, error.msg
    else:
        reason = str(error)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(found.folder)]
        if frames:
            declaration, line = Path(frames[-1].filename), frames[-1].lineno or 1
    text = declaration.read_text(encoding="utf-8", errors="replace")
    source = Source(str(declaration), text)
    if column == 1:
        stripped = source.line(line).strip()
        column, length = source.line(line).find(stripped) + 1, max(1, len(stripped))
    message = f"recipe `{found.name}` cannot be read: {kind}: {shown(reason, longest=_LONGEST_REASON)}"
    return Diagnostic("P006", message, Label(source.span(line, column, length)))
