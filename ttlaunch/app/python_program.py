"""Find out whether a command line starts a Python program, and whether the program names MPI.

Ranks of Python programs get the variables that torchrun sets (`agent/torch_world.py`). The engine's own variables stay only for
programs that name MPI, in the program itself or in a module that it imports from its own folder: other libraries, such as
Lightning, would otherwise take the program for one that uses MPI.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttlaunch.records.regular_files import open_regular

_INTERPRETER = re.compile(r"python[0-9.]*t?")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_MPI = re.compile(rb"\b(?:mpi4py|mpi4jax|mpi4torch|petsc4py|slepc4py|horovod)\b|[\"']mpi[\"']|\blibmpi|\bMPI_Init")
MOST_BYTES, _MOST_FILES = 4_000_000, 2_000


@dataclass(frozen=True)
class PythonProgram:
    """What is known about a Python program before it starts.

    Attributes:
        uses_mpi: Whether the program names MPI; also true if its files cannot be read here.
        script: The file that it starts with; None for `-c`, and for a module that is not in the working folder.
        interpreter: The interpreter that the command names; None if a script is started by its name.
        module: The installed module that it starts with, such as `torch.distributed.run`; empty for anything else.
    """

    uses_mpi: bool
    script: Path | None = None
    interpreter: str | None = None
    module: str = ""


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
        return PythonProgram(bool(_MPI.search(" ".join(words[1:2]).encode(errors="replace"))))
    if words[0] == "-m":
        module = words[1] if len(words) > 1 else ""
        found = _module_file(working_folder, module.split("."))
        if (
            found is None
        ):  # an installed module, such as `torch.distributed.run` or `mpi4py`, whose own script may follow
            uses_mpi = bool(_MPI.search(module.encode(errors="replace"))) or _any_uses_mpi(words[2:], working_folder)
            return PythonProgram(uses_mpi, interpreter=interpreter, module=module)
        return PythonProgram(_uses_mpi(found, working_folder), found, interpreter)
    script = working_folder / words[0]
    return PythonProgram(_uses_mpi(script, script.parent), script, interpreter)


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


def _any_uses_mpi(words: Sequence[str], working_folder: Path) -> bool:
    scripts = [working_folder / word for word in words if word.endswith(".py")]
    return any(_uses_mpi(script, script.parent) for script in scripts)


def _uses_mpi(program: Path, folder: Path) -> bool:
    """Whether a program, or a module that it imports from a folder, names MPI."""
    waiting, seen = [program], {program}
    while waiting:
        path = waiting.pop()
        try:
            with open_regular(path, follow=True) as file:
                source = file.read(MOST_BYTES)
        except (OSError, ValueError):
            return True
        if _MPI.search(source) or len(seen) > _MOST_FILES:
            return True
        for found in _imported(source, path, folder):
            if found not in seen:
                seen.add(found)
                waiting.append(found)
    return False


def _imported(source: bytes, path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that a module imports; nothing if it is not Python of this version."""
    try:
        tree = parse_quietly(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree) if tree else ():
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
