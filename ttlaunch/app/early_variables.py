"""Find variables that a script sets and that torch reads while it is imported.

A rank that is a fork of a process with torch has no use for them any more: with `--warm`, `os.environ["OMP_NUM_THREADS"] = "4"` in the
first line of a script would have no effect, and nothing would say so. Which line runs before the import is not decided here: what a
script sets anywhere counts.
"""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from ttlaunch.app.python_program import PythonProgram, parse_quietly
from ttlaunch.app.run_spec import short_name
from ttlaunch.diagnostics import shown
from ttlaunch.quick_pattern import quick_pattern

_READ_AT_IMPORT = quick_pattern(
    r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|DNNL|ONEDNN|ATEN|PYTORCH|CUDA|HIP)_\w+|TORCH(?!_NCCL_)\w+"
)
_SETTERS = {"setdefault", "update"}
_ANY = None  # a name that is known only when the script runs


def early_variable(program: PythonProgram, working_folder: Path) -> str:
    """Return a clause that says where a program sets a variable that torch reads while it is imported; empty if nowhere.

    Args:
        program: The program.
        working_folder: The folder to which the named file is relative.
    """
    for path, content in program.own_files:
        try:
            tree = parse_quietly(content) if content and b"env" in content else None
        except (SyntaxError, ValueError):
            continue
        for line, name in _variables(tree) if tree else ():
            place = f"`{shown(short_name(path, working_folder))}:{line}`"
            if name is _ANY:
                return f"{place} sets variables whose names are known only when it runs"
            if _READ_AT_IMPORT.fullmatch(name):
                return f"{place} sets {shown(name)}, which torch may read while it is imported"
    return ""


def _variables(tree: ast.Module) -> Iterator[tuple[int, str | None]]:
    """Yield the line and the name of each variable that a module sets."""
    nodes = list(ast.walk(tree))
    names = {"environ", *(alias for node in nodes for alias in _other_names(node))}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Subscript) and _ends_with(target.value, names):
                    yield node.lineno, _text(target.slice)
                elif isinstance(node, ast.AugAssign) and _ends_with(target, names):
                    yield from ((node.lineno, name) for name in _keys(node.value))
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            holder = node.func.value if isinstance(node.func, ast.Attribute) else None
            if called == "putenv" or (called in _SETTERS and holder and _ends_with(holder, names)):
                yield from ((node.lineno, one) for one in _given(node, called))


def _other_names(node: ast.AST) -> Iterator[str]:
    """Yield names that a statement gives to `os.environ`."""
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        yield from (alias.asname for alias in node.names if alias.name == "environ" and alias.asname)
    elif isinstance(node, ast.Assign) and _ends_with(node.value, {"environ"}):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _given(call: ast.Call, name: str) -> Iterator[str | None]:
    if name != "update":
        yield _text(call.args[0]) if call.args else _ANY
        return
    yield from (keyword.arg for keyword in call.keywords)
    for argument in call.args:
        yield from _keys(argument)


def _keys(node: ast.expr) -> Iterator[str | None]:
    """Yield the keys of what is put into a mapping."""
    if isinstance(node, ast.Dict):
        yield from (_text(key) if key is not None else _ANY for key in node.keys)
    else:
        yield _ANY


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else _ANY


def _ends_with(node: ast.expr, names: Collection[str]) -> bool:
    return getattr(node, "attr", None) in names or getattr(node, "id", None) in names
