"""Check `trainer.py` without running it: it parses, and it has a function for every role the recipe declares.

Running it would import torch; reading it finds what would otherwise break every rank on its first line.
"""

import ast
from pathlib import Path

from ttlaunch.diagnostics import Diagnostic, Label, Source, closest, listed, shown
from ttlaunch.spec.recipe.declare import Recipe


def check_trainer(name: str, path: Path, recipe: Recipe) -> Diagnostic | None:
    """What is wrong with a recipe's `trainer.py` at first sight, or None."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Diagnostic("P006", f"recipe `{name}` cannot be read: {path.name}: {shown(error)}")
    source = Source(str(path), text)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        label = Label(source.span(error.lineno or 1, error.offset or 1))
        return Diagnostic("P006", f"recipe `{name}` cannot be read: SyntaxError: {shown(error.msg)}", label)
    except (ValueError, RecursionError) as error:
        return Diagnostic("P006", f"recipe `{name}` cannot be read: {path.name}: {shown(error)}")
    names, is_open = _names(tree)
    roles = dict.fromkeys(role for layout in recipe.layouts for role in layout.roles)
    missing = [role for role in roles if role not in names]
    if not missing or is_open:
        return None
    message = f"recipe `{name}` has no function for {listed(missing, last='and')} in {path.name}"
    place = Label(source.start(), f"each role is a function: {listed(roles, last='and')}")
    near = closest(missing[0], names)
    hints = (f"is `{near}` meant to be `{missing[0]}`?",) if near else ()
    return Diagnostic("P006", message, place, hints=hints)


def _names(tree: ast.Module) -> tuple[set[str], bool]:
    """The names that the module binds at its top level, in any branch; and whether a `import *` may bind others."""
    names: set[str] = set()
    is_open = False
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
            is_open = is_open or any(alias.name == "*" for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names, is_open
