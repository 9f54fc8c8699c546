"""Find recipes by name (in the current folder's `recipes/` first, then built in) or by path, and load their declarations.

A recipe is a folder with `recipe.py` and `trainer.py`. It is loaded by path, as a package of its own, so that
`from .recipe import Config` works in `trainer.py` wherever the folder lies.
"""

import ast
import traceback
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Source, closest, listed, shown
from ttlaunch.spec.named_folders import FolderKind, NamedFolder, find_folder, list_folders
from ttlaunch.spec.recipe.declare import Recipe
from ttlaunch.spec.recipe.importing import import_recipe_module, without_packages_of_ranks

_DECLARATION = "recipe.py"
_TRAINER = "trainer.py"
_KIND = FolderKind(noun="recipe", code="P001", marker=_DECLARATION, hint="`ttlaunch recipes list` describes them")
_NAIVE = "naive.py"
_RECIPE = "RECIPE"
_LONGEST_REASON = 200
_PACKAGE = Path(__file__).parents[2]
_OLD_NAMES = "OLD_NAMES"
"""The table in `ttlaunch/train.py` of former names, which can still be imported."""


def list_recipes(working_folder: Path) -> list[NamedFolder]:
    """List all recipes that a name can mean, one per name: those of the current folder hide built-in ones."""
    return [replace(found, folder=found.folder.resolve()) for found in list_folders(_KIND, working_folder)]


def find_recipe(name: str, *, working_folder: Path) -> NamedFolder | Diagnostic:
    """Return the recipe that the user means by a name or a path."""
    found = find_folder(name, _KIND, working_folder=working_folder)
    if isinstance(found, Diagnostic):
        return found
    if not (found.folder / _DECLARATION).is_file():
        message = f"the folder {shown(name)} holds no `{_DECLARATION}`, so it is no recipe"
        hints = ("`ttlaunch recipes copy hierarchical_parallel` makes one to change",)
        return Diagnostic(_KIND.code, message, hints=hints, blame=Blame.COMMAND_LINE)
    return replace(found, folder=found.folder.resolve())


def load_recipe(found: NamedFolder) -> Recipe | Diagnostic:
    """Run `recipe.py` and return its `RECIPE`, or a diagnostic at the line of the mistake."""
    declaration = found.folder / _DECLARATION
    if not (found.folder / _TRAINER).is_file():
        return Diagnostic("P006", f"recipe `{found.name}` has no `{_TRAINER}`", notes=(f"looked in {found.folder}",))
    try:
        with without_packages_of_ranks():
            module = import_recipe_module(found.folder, "recipe")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's file raises is reported at its line
        return _load_error(found, declaration, error)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        place = Label(_source(declaration).start(), "no `RECIPE = Recipe(…)` in this file")
        return Diagnostic("P006", f"recipe `{found.name}` declares nothing", place)
    return check_trainer(found.name, found.folder / _TRAINER, recipe) or recipe


def load_naive(found: NamedFolder) -> Recipe | Diagnostic:
    """Return the declaration of a recipe's naive form, which `naive.py` implements."""
    recipe = load_recipe(found)
    if isinstance(recipe, Diagnostic):
        return recipe
    file = found.folder / _NAIVE
    if recipe.naive is None or not file.is_file():
        source = _source(found.folder / _DECLARATION)
        line = next((number for number, text in enumerate(source.lines, start=1) if text.startswith(_RECIPE)), 1)
        missing = f"no `{_NAIVE}` lies beside this file" if recipe.naive else "`Recipe(…)` has no `naive=Naive(…)`"
        return Diagnostic(
            "P050",
            f"`--naive` was given, but recipe `{found.name}` has no naive form",
            Label(source.span(line, 1, len(_RECIPE)), missing),
            hints=(f"leave `--naive` out, or write `{_NAIVE}` with a function for each role",),
        )
    naive = recipe.in_naive_form(recipe.naive)
    return check_trainer(found.name, file, naive) or naive


def _load_error(found: NamedFolder, declaration: Path, error: BaseException) -> Diagnostic:
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
    source = _source(declaration)
    if column == 1:
        stripped = source.line(line).strip()
        column, length = source.line(line).find(stripped) + 1, max(1, len(stripped))
    message = f"recipe `{found.name}` cannot be read: {kind}: {shown(reason, longest=_LONGEST_REASON)}"
    return Diagnostic("P006", message, Label(source.span(line, column, length)))


def _source(path: Path) -> Source:
    return Source(str(path), path.read_text(encoding="utf-8", errors="replace"))


def check_trainer(name: str, path: Path, recipe: Recipe) -> Diagnostic | None:
    """Check a recipe's `trainer.py` without running it; return its first mistake, or None."""
    try:
        source = Source(str(path), path.read_text(encoding="utf-8"))
        tree = _parsed(source.text)
    except SyntaxError as error:
        label = Label(source.span(error.lineno or 1, error.offset or 1))
        return Diagnostic("P006", f"recipe `{name}` cannot be read: SyntaxError: {shown(error.msg)}", label)
    except (OSError, ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError
        return Diagnostic("P006", f"recipe `{name}` cannot be read: {path.name}: {shown(error)}")
    names, is_open = _names(tree)
    roles = dict.fromkeys(role for layout in recipe.layouts for role in layout.roles)
    missing = [role for role in roles if role not in names]
    if not missing or is_open:
        return _missing_import(name, source, tree, folder=path.parent)
    message = f"recipe `{name}` has no function for {listed(missing, last='and')} in {path.name}"
    place = Label(source.start(), f"each role is a function: {listed(roles, last='and')}")
    near = closest(missing[0], [node.name for node in tree.body if isinstance(node, ast.FunctionDef)])
    hints = (f"is `{near}` meant to be `{missing[0]}`?",) if near else ()
    return Diagnostic("P006", message, place, hints=hints)


@lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    """Return the tree of a program, which nobody changes."""
    return ast.parse(text)


def _missing_import(name: str, source: Source, tree: ast.Module, *, folder: Path) -> Diagnostic | None:
    """Report the first name that a trainer imports from its own folder or from ttlaunch, and that is not there.

    Other packages are left out: ranks may have another Python than the launcher.
    """
    for node in _unguarded_imports(tree):
        module = "." * node.level + (node.module or "")
        base = _PACKAGE if node.level == 0 else folder
        parts = node.module.split(".")[0 if node.level else 1 :] if node.module else []
        if node.level > 1 or (node.level == 0 and not module.startswith("ttlaunch.")):
            continue
        place = base.joinpath(*parts)
        offered = _offered_by(place) if parts else ()  # `from . import x` names a file
        for alias in node.names:
            if offered is None or alias.name in offered or _is_module(place / alias.name) or alias.name == "*":
                continue
            message = f"recipe `{name}` cannot be read: there is no `{alias.name}` in `{module}`"
            near = closest(alias.name, sorted(offered))
            label = Label(source.span(alias.lineno, alias.col_offset + 1, len(alias.name)), "imported here")
            return Diagnostic("P006", message, label, hints=(f"did you mean `{near}`?",) if near else ())
    return None


@lru_cache(maxsize=32)
def _unguarded_imports(tree: ast.Module) -> tuple[ast.ImportFrom, ...]:
    """Return the `from … import` statements in their order, without those that may fail (`try`) or only help type checkers."""
    found: list[ast.ImportFrom] = []
    to_visit: list[ast.AST] = [tree]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.ImportFrom):
            found.append(node)
        elif not isinstance(node, ast.Try) and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            to_visit.extend(reversed(list(ast.iter_child_nodes(node))))
    return tuple(found)


def _offered_by(place: Path) -> Collection[str] | None:
    """Return the names that a module's file binds, and none if there is no file; None if only running it could tell."""
    file = place.with_name(f"{place.name}.py")
    file = file if file.is_file() else place / "__init__.py"
    try:
        return _bound_by(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None if place.is_dir() else ()  # a folder without `__init__.py` is a package, too
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


@lru_cache(maxsize=64)  # a comparison of all recipes plans hundreds of forms, which import the same modules
def _bound_by(text: str) -> frozenset[str] | None:
    """Return the names that a module's text binds; None if only running it could tell."""
    tree = ast.parse(text)
    names, is_open = _names(tree)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _OLD_NAMES:
            return names | set(ast.literal_eval(node.value))
    return None if is_open or "__getattr__" in names or "globals" in ast.dump(tree) else names


def _is_module(place: Path) -> bool:
    return place.with_name(f"{place.name}.py").is_file() or place.is_dir()


@lru_cache(maxsize=32)
def _names(tree: ast.Module) -> tuple[frozenset[str], bool]:
    """Return the names that the module binds at its top level, and whether an `import *` may bind others."""
    names: set[str] = set()
    is_open = False
    to_visit: list[ast.AST] = [tree]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # names bound inside are local
        to_visit.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            is_open = is_open or any(alias.name == "*" for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names), is_open
