"""Find out whether a command line starts a Python program, and whether the program names MPI.

Ranks of Python programs get the variables that torchrun sets (`agent/torch_world.py`). The engine's own variables stay only for
programs that name MPI, in the program itself or in a module that it imports from its own folder: other libraries, such as
Lightning, would otherwise take the program for one that uses MPI.
"""

import ast
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from pathlib import Path

from ttlaunch.diagnostics import shown
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.records.regular_files import open_regular

_INTERPRETER = quick_pattern(r"python[0-9.]*t?")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_MPI = quick_pattern(rb"\b(?:mpi4py|mpi4jax|mpi4torch|petsc4py|slepc4py|horovod)\b|[\"']mpi[\"']|\blibmpi|\bMPI_Init")
_QUOTES = "\"'"
MOST_BYTES, _MOST_FILES = 4_000_000, 2_000


@dataclass(frozen=True)
class PythonProgram:
    """What is known about a Python program before it starts.

    Attributes:
        uses_mpi: Whether the program names MPI; also true if its files cannot be read here.
        script: The file that it starts with; None for `-c`, and for a module that is not in the working folder.
        interpreter: The interpreter that the command names; None if a script is started by its name.
        module: The installed module that it starts with, such as `torch.distributed.run`; empty for anything else.
        why: A clause that says where it names MPI; empty if it does not.
    """

    uses_mpi: bool
    script: Path | None = None
    interpreter: str | None = None
    module: str = ""
    why: str = field(default="", compare=False)


def look_at_python(command: Sequence[str], working_folder: Path) -> PythonProgram | None:
    """Return what is known about the Python program that a command line starts; None if it starts no Python program."""
    program, *words = command
    interpreter = None if program.endswith(".py") else program
    if _INTERPRETER.fullmatch(Path(program).name):
        while words and words[0].startswith("-") and words[0] not in {"-c", "-m"}:
            words = words[2:] if words[0] in _WITH_VALUE else words[1:]
    elif program.endswith(".py"):
        words = [program]
    else:
        return None
    if not words:
        return None
    if words[0] == "-c":
        why = _named_in(" ".join(words[1:2]).encode(errors="replace"), "the code after `-c`")
        return PythonProgram(bool(why), why=why)
    if words[0] == "-m":
        module = words[1] if len(words) > 1 else ""
        found = _module_file(working_folder, module.split("."))
        if (
            found is None
        ):  # an installed module, such as `torch.distributed.run` or `mpi4py`, whose own script may follow
            why = _named_in(module.encode(errors="replace"), "the command") or _first_mpi(words[2:], working_folder)
            return PythonProgram(bool(why), interpreter=interpreter, module=module, why=why)
        why = _where_mpi(found, working_folder)
        return PythonProgram(bool(why), found, interpreter, why=why)
    script = working_folder / words[0]
    # Python looks for modules beside the file to which a link leads.
    why = _where_mpi(script, Path(os.path.realpath(script)).parent)
    return PythonProgram(bool(why), script, interpreter, why=why)


def parse_quietly(content: bytes) -> ast.Module | None:
    """Parse a module without its warnings; None if it is too deep for the parser.

    Raises:
        SyntaxError, ValueError: It is not Python of this version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(content)
        except (RecursionError, MemoryError):
            return None


def _named_in(text: bytes, place: str) -> str:
    """Return a clause that says that a text names MPI; empty if it does not."""
    found = _MPI.search(text)
    return "" if found is None else f"{place} names {found[0].decode().strip(_QUOTES)}"


def _first_mpi(words: Sequence[str], working_folder: Path) -> str:
    scripts = [working_folder / word for word in words if word.endswith(".py")]
    return next((why for script in scripts if (why := _where_mpi(script, script.parent))), "")


def _where_mpi(program: Path, folder: Path) -> str:
    """Return a clause that says where a program, or a module that it imports from a folder, names MPI; empty if nowhere."""
    for number, (path, source) in enumerate(own_files(program, folder)):
        if source is None:
            return f"`{shown(path.name)}` cannot be read"
        if why := _named_in(source, f"`{shown(path.name)}`"):
            return why
        if number >= _MOST_FILES:
            return f"it imports more than {_MOST_FILES:,} files of its own"
    return ""


def own_files(program: Path, folder: Path) -> Iterator[tuple[Path, bytes | None]]:
    """Yield a program and the modules that it imports from a folder, each with its content; None for one that cannot be read."""
    waiting, seen = [program], {program}
    while waiting:
        path = waiting.pop()
        try:
            with open_regular(path, follow=True) as file:
                source = file.read(MOST_BYTES)
        except (OSError, ValueError):
            yield path, None
            continue
        yield path, source
        try:
            tree = parse_quietly(source)
        except (SyntaxError, ValueError):
            continue
        for found in imported_files(ast.walk(tree) if tree else (), path, folder):
            if found not in seen and len(seen) <= _MOST_FILES:
                seen.add(found)
                waiting.append(found)


def imported_files(nodes: Iterable[ast.AST], path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that statements of a module import.

    Args:
        nodes: Parts of the module; those that import nothing are passed over.
        path: The module's own file.
        folder: Where the program looks for its modules first.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            names, start = [alias.name for alias in node.names], folder
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            names = [f"{module}{alias.name}" for alias in node.names]
            start = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
        else:
            continue
        for name in names:
            parts = name.split(".")
            # Importing `a.b` also runs `a/__init__.py`; the last part of `from a import b` may be no module.
            for end in range(1, len(parts) + 1):
                found = _module_file(start, parts[:end])
                if found is not None:
                    yield found


def _module_file(folder: Path, parts: Sequence[str]) -> Path | None:
    """Return the file of a module below a folder; None if there is none."""
    base = folder.joinpath(*parts)
    candidates = (base.with_name(f"{base.name}.py"), base / "__init__.py", base / "__main__.py") if base.name else ()
    try:
        return next((path for path in candidates if path.is_file()), None)
    except (OSError, ValueError):
        return None
