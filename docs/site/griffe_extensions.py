"""Extensions of griffe: doctests are code, not the quotations for which Markdown takes them, and `a as a` offers a name."""

import ast
import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fence doctests before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


class OfferedNames(griffe.Extension):
    """Show what a module imports as `from x import a as a`, as type checkers do."""

    def on_module_members(self, *, node: ast.AST | griffe.ObjectNode, mod: griffe.Module, **_: Any) -> None:
        """List these names as the module's own, if it has any."""
        nodes = ast.walk(node) if isinstance(node, ast.AST) else ()
        aliases = [alias for one in nodes if isinstance(one, ast.ImportFrom) for alias in one.names]
        if offered := [alias.name for alias in aliases if alias.name == alias.asname]:
            mod.exports = offered
