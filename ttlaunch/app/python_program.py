"""Find out whether a command line starts a Python program, and whether the program names MPI.

Ranks of Python programs get the variables that torchrun sets (`agent/torch_world.py`). The engine's own variables stay only for
programs that name MPI, in the program itself or in a module that it imports from its own folder: other libraries, such as
Lightning, would otherwise take the program for one that uses MPI.
"""

import ast
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path

from ttlaunch.diagnostics import shown
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.records.regular_files import open_regular

_INTERPRETER = quick_pattern(r"python[0-9.]*t?")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_MPI = quick_pattern(rb"\b(?:mpi4py|mpi4jax|mpi4torch|petsc4py|slepc4py|horovod)\b|[\"']mpi[\"']|\blibmpi|\bMPI_Init")
_QUOTES = "\"'"
_MAIN = "__main__.py"
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
        packages: The files of the packages around a module, which run before it.
        folder: Where it looks for its modules first; None if `script` is.
    """

    uses_mpi: bool
    script: Path | None = None
    interpreter: str | None = None
    module: str = ""
    why: str = field(default="", compare=False)
    packages: tuple[Path, ...] = field(default=(), compare=False)
    folder: Path | None = field(default=None, compare=False)

    @property
    def own_files(self) -> "Iterator[tuple[Path, bytes | None]]":
        """The program and the modules that it imports from its own folder, each with its content; None for one that cannot be read."""
        if self.script is not None and self.folder is not None:
            yield from _own_files((self.script, *self.packages), self.folder)


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
        found, *packages = _module_files(working_folder, module.split("."))
        if (
            found is None
        ):  # an installed module, such as `torch.distributed.run` or `mpi4py`, whose own script may follow
            why = _named_in(module.encode(errors="replace"), "the command") or _first_mpi(words[2:], working_folder)
            return PythonProgram(bool(why), interpreter=interpreter, module=module, why=why)
        around = tuple(path for path in packages if path is not None)
        return _with_mpi(
            PythonProgram(uses_mpi=False, script=found, interpreter=interpreter, packages=around, folder=working_folder)
        )
    script = working_folder / words[0]
    if (script / _MAIN).is_file():  # a folder: Python runs what is in it, and looks for modules there
        return _with_mpi(
            PythonProgram(uses_mpi=False, script=script / _MAIN, interpreter=interpreter, folder=script.resolve())
        )
    folder = Path(os.path.realpath(script)).parent  # Python looks for modules beside the file to which a link leads
    return _with_mpi(PythonProgram(uses_mpi=False, script=script, interpreter=interpreter, folder=folder))


def _with_mpi(program: PythonProgram) -> PythonProgram:
    why = _where_mpi(program.own_files)
    return replace(program, uses_mpi=bool(why), why=why)


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
    return next((why for script in scripts if (why := _where_mpi(_own_files([script], script.parent)))), "")


def _where_mpi(files: Iterable[tuple[Path, bytes | None]]) -> str:
    """Return a clause that says which of a program's own files names MPI; empty if none does."""
    for number, (path, source) in enumerate(files):
        if source is None:
            return f"`{shown(path.name)}` cannot be read"
        if why := _named_in(source, f"`{shown(path.name)}`"):
            return why
        if number >= _MOST_FILES:
            return f"it imports more than {_MOST_FILES:,} files of its own"
    return ""


def _own_files(started: Sequence[Path], folder: Path) -> Iterator[tuple[Path, bytes | None]]:
    """Yield files that are run and the modules that they import from a folder, each with its content."""
    waiting, seen = [*reversed(started)], {*started}
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


def _module_files(folder: Path, parts: Sequence[str]) -> list[Path | None]:
    """Return the file that `-m` runs as the program, None if the folder has none, and those that run before it."""
    found = [_module_file(folder, parts[:end]) for end in range(1, len(parts) + 1)]
    main = folder.joinpath(*parts, _MAIN)
    if found[-1] is not None and found[-1].name == "__init__.py" and main.is_file():
        return [main, *found]
    return [found[-1], *found[:-1]]


def _module_file(folder: Path, parts: Sequence[str]) -> Path | None:
    """Return the file of a module below a folder; None if there is none."""
    base = folder.joinpath(*parts)
    candidates = (base.with_name(f"{base.name}.py"), base / "__init__.py", base / "__main__.py") if base.name else ()
    try:
        return next((path for path in candidates if path.is_file()), None)
    except (OSError, ValueError):
        return None
