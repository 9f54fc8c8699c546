"""Check the script of a Python program before it starts: that it is Python, and that it leaves the launcher's work to the launcher.

Under torchrun each of these mistakes appears once for each rank, after seconds of imports.
"""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttlaunch.app.python_program import MOST_BYTES, PythonProgram, imported_files, parse_quietly
from ttlaunch.app.run_spec import short_name
from ttlaunch.diagnostics import Blame, Diagnostic, Label, Severity, Source, shown, usage_mistake
from ttlaunch.diagnostics.diagnostic import mistake_at
from ttlaunch.records.regular_files import open_regular
from ttlaunch.system_reason import system_reason

_COMPILE = "import sys; compile(sys.stdin.buffer.read(), 'script', 'exec')"
_FIND = "import importlib.util, sys; print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
_FRAMEWORKS = {"torch", "accelerate", "lightning", "pytorch_lightning", "transformers", "deepspeed"}
_PATIENCE_S = 10
NOTEBOOK = ".ipynb"
_ARCHIVE = b"PK\x03\x04"
_LONGEST = 200
_MOST_MODULES = 200
_OWN_PLACE = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
_STARTERS = {"spawn": "multiprocessing", "start_processes": "multiprocessing", "notebook_launcher": "accelerate"}
_SLURMS_PLACE = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"}
_LOCAL_RANK = {"--local_rank", "--local-rank"}


def check_python(
    program: PythonProgram, *, working_folder: Path, is_here: bool, num_ranks: int, has_own_path: bool = False
) -> list[Diagnostic]:
    """Return what is wrong with a program before it starts, and warnings about what it does itself; empty if nothing can be said.

    Args:
        program: The program; on other hosts, its interpreter may be one that this machine does not have.
        working_folder: The folder in which its ranks start.
        is_here: Whether all ranks run on this machine; a script that is missing here may be on other hosts.
        num_ranks: The number of ranks; a single one may do the launcher's work itself.
        has_own_path: Whether the ranks look for packages elsewhere than this shell, so that those cannot be checked.
    """
    script = program.script
    may_look = is_here and not has_own_path
    if program.module:
        return _check_module(program, working_folder) if may_look else []
    if script is None:
        return []
    name = short_name(script, working_folder)
    if script.suffix == NOTEBOOK:
        return [notebook_mistake(name)]
    try:
        with open_regular(script, follow=True) as file:
            content = file.read(MOST_BYTES)
    except (OSError, ValueError) as error:
        if not is_here and not script.exists():
            return []
        return [_refusal(f"the script {shown(name, longest=_LONGEST)} cannot be read: {system_reason(error)}")]
    if content.startswith(_ARCHIVE) or len(content) == MOST_BYTES:
        return []
    source = Source(name, content.decode(errors="replace").removeprefix("\ufeff"))
    try:
        tree = parse_quietly(content)
    except (SyntaxError, ValueError) as error:
        return _not_python(error, source, program=program, content=content, is_here=is_here)
    if tree is None:
        return []
    if broken := _check_own_modules(program, tree, working_folder=working_folder, is_here=is_here):
        return broken
    lacking = _check_frameworks(program, tree, source=source) if may_look else []
    return [*lacking, *(_launchers_work(tree, source) if num_ranks > 1 else ())]


def needs_torch(program: PythonProgram) -> bool:
    """Whether a script imports torch, or a framework above it, in its first lines rather than in a function."""
    try:
        with open_regular(program.script or "", follow=True) as file:
            tree = parse_quietly(file.read(MOST_BYTES))
    except (OSError, SyntaxError, ValueError):
        return False
    return tree is not None and bool(_imported_frameworks(tree))


def _imported_frameworks(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the frameworks that a script imports in any case, with the statements; empty if it may change where it looks."""
    found: dict[str, ast.stmt] = {}
    if _changes_path(tree):
        return found
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in _FRAMEWORKS:
                found.setdefault(name.partition(".")[0], node)
    return found


def _check_frameworks(program: PythonProgram, tree: ast.Module, *, source: Source) -> list[Diagnostic]:
    imported = _imported_frameworks(tree)
    missing = _lacking(program.interpreter, list(imported), program.folder or Path()) if imported else []
    return [
        mistake_at(
            "H005",
            f"ranks need {name}, not installed for {shown(program.interpreter, longest=_LONGEST)}; nothing was started",
            source.span(imported[name].lineno, imported[name].col_offset + 1, _width(imported[name], source)),
            label=f"imports {name}",
            hint=f"`{shown(program.interpreter, longest=_LONGEST)} -m pip install {name}`",
            blame=Blame.HOSTS,
        )
        for name in missing
    ]


def _check_own_modules(
    program: PythonProgram, tree: ast.Module, *, working_folder: Path, is_here: bool
) -> list[Diagnostic]:
    """Report the first module beside a script that is no Python and that it imports in any case, itself or through another one."""
    script = Path(os.path.realpath(program.script or ""))
    folder = program.folder or script.parent
    waiting, seen = [(tree, script)], {script}
    while waiting and len(seen) < _MOST_MODULES and not _changes_path(waiting[-1][0]):
        module, path = waiting.pop()
        for found in imported_files(module.body, path, folder):
            if found in seen or found.stem in sys.stdlib_module_names:  # Python may have loaded its own one already
                continue
            seen.add(found)
            try:
                with open_regular(found, follow=True) as file:
                    content = file.read(MOST_BYTES)
                parsed = parse_quietly(content)
            except OSError:
                continue
            except (SyntaxError, ValueError) as error:
                source = Source(
                    short_name(found, working_folder), content.decode(errors="replace").removeprefix("\ufeff")
                )
                if wrong := _not_python(error, source, program=program, content=content, is_here=is_here):
                    return wrong
            else:
                waiting += [(parsed, found)] if parsed else []
    return []


def _changes_path(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path" for node in ast.walk(tree))


def _check_module(program: PythonProgram, folder: Path) -> list[Diagnostic]:
    """Report a module of `-m` that neither the folder nor the interpreter has; only packages themselves are looked up."""
    top, *rest = program.module.split(".")
    is_own = (folder / top).is_dir() and bool(rest)
    if not is_own and not _lacking(program.interpreter, [top], folder):
        return []
    if is_own and not (folder / top / "__init__.py").is_file() and not _lacking(program.interpreter, [top], folder):
        return []  # a folder of the same name as an installed package
    message = f"there is no module `{shown(program.module)}` for {shown(program.interpreter, longest=_LONGEST)}"
    return [usage_mistake(message, "a module of this project is looked for in the folder where the command is typed")]


def _lacking(interpreter: str | None, names: Sequence[str], folder: Path) -> list[str]:
    """Return the packages that an interpreter does not find from a folder; empty if it cannot be asked."""
    path = shutil.which(interpreter) if interpreter else None
    if path is None:
        return []
    if path == sys.executable:  # nothing but the folder differs from this process
        near = [name for name in names if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]
        return [name for name in names if name not in near and importlib.util.find_spec(name) is None]
    try:
        answer = subprocess.run(
            [path, "-c", _FIND, *names], cwd=folder, capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [name for name in answer.stdout.split() if name in names]


def notebook_mistake(name: str) -> Diagnostic:
    """Say what to do with a notebook that was given as a script."""
    hint = f"`jupyter nbconvert --to script {shown(name)}` writes a script; a notebook itself can call `ttlaunch.run`"
    return _refusal(f"{shown(name, longest=_LONGEST)} is a notebook and no Python script", hint)


def _refusal(message: str, *hints: str) -> Diagnostic:
    return Diagnostic("P065", message, hints=hints, blame=Blame.COMMAND_LINE)


def _not_python(
    error: Exception, source: Source, *, program: PythonProgram, content: bytes, is_here: bool
) -> list[Diagnostic]:
    """Report a syntax error, unless the interpreter of the ranks, which may be a newer one, takes the script."""
    if is_here and program.interpreter is not None and _compiles(program.interpreter, content):
        return []
    line, column = getattr(error, "lineno", None) or 1, getattr(error, "offset", None) or 1
    what = getattr(error, "msg", None) or str(error)
    place = source.span(line, max(1, min(column, len(source.line(line)) or 1)))
    is_known = program.interpreter is not None and (is_here or program.interpreter == sys.executable)
    severity = Severity.ERROR if is_known else Severity.WARNING  # another host may have a newer Python
    message = f"{shown(source.name, longest=_LONGEST)} is not Python {sys.version_info[0]}.{sys.version_info[1]}"
    return [mistake_at("P065", message, place, label=what, severity=severity, blame=Blame.COMMAND_LINE)]


def _compiles(interpreter: str, content: bytes) -> bool:
    try:
        command = [interpreter, "-I", "-S", "-c", _COMPILE]
        return not subprocess.run(
            command, input=content, capture_output=True, timeout=_PATIENCE_S, check=False
        ).returncode
    except (OSError, subprocess.SubprocessError):
        return False


def _launchers_work(tree: ast.Module, source: Source) -> Iterator[Diagnostic]:
    """Yield a warning for each thing that a script does although the launcher does it, each kind once."""
    nodes = list(ast.walk(tree))
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    reads_place = not _OWN_PLACE.isdisjoint(words)
    modules = {name for node in nodes for name in _modules(node)}
    seen = set()
    for node in nodes:
        found = _fixes_meeting_place(node)
        if not reads_place:
            found = found or _starts_ranks(node, modules) or _wants_local_rank(node) or _wants_slurm(node)
        if found and found[1] not in seen:
            seen.add(found[1])
            at, what, hint = found
            place = source.span(at.lineno, at.col_offset + 1, _width(at, source))
            message = f"{shown(source.name, longest=_LONGEST)} {what}"
            yield Diagnostic("P066", message, Label(place), hints=(hint,), severity=Severity.WARNING)


def _width(node: ast.expr | ast.stmt, source: Source) -> int:
    end = node.end_col_offset if node.end_lineno == node.lineno else None
    return max(1, (end or len(source.line(node.lineno))) - node.col_offset)


def _modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    elif isinstance(node, ast.ImportFrom):
        yield from (part for part in (node.module or "").split("."))
        yield from (alias.name for alias in node.names)


def _starts_ranks(node: ast.AST, modules: set[str]) -> tuple[ast.expr, str, str] | None:
    name = _called(node)
    if not isinstance(node, ast.Call) or _STARTERS.get(name, name) not in modules or name not in _STARTERS:
        return None
    hint = "start it with `-n 1`, or have it read RANK and WORLD_SIZE and call the function once"
    return node.func, f"starts ranks itself with `{name}`, so n ranks would each start more", hint


def _wants_local_rank(node: ast.AST) -> tuple[ast.expr, str, str] | None:
    if not isinstance(node, ast.Call) or _called(node) != "add_argument":
        return None
    named = next((one for one in node.args if isinstance(one, ast.Constant) and one.value in _LOCAL_RANK), None)
    if named is None:
        return None
    hint = 'read it from the environment: `int(os.environ["LOCAL_RANK"])`'
    return named, f"reads `{named.value!s}`, which `torch.distributed.launch` passed and nobody passes now", hint


def _wants_slurm(node: ast.AST) -> tuple[ast.expr, str, str] | None:
    if not isinstance(node, ast.Constant) or node.value not in _SLURMS_PLACE:
        return None
    hint = "read RANK, LOCAL_RANK and WORLD_SIZE, which ttlaunch sets everywhere"
    return node, f"looks for its place in `{node.value}`, which only `srun` sets", hint


def _fixes_meeting_place(node: ast.AST) -> tuple[ast.expr, str, str] | None:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
        return None
    target = node.targets[0]
    if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
        return None
    name, holder = target.slice.value, target.value
    is_environment = "environ" in {getattr(holder, "attr", None), getattr(holder, "id", None)}
    if not is_environment or name not in {"MASTER_ADDR", "MASTER_PORT"}:
        return None
    hint = f'leave `{name}` to the launcher: `os.environ.setdefault("{name}", …)` keeps what it chose'
    why = "two runs on one host would meet there" if name == "MASTER_PORT" else "other hosts do not find rank 0 there"
    return node.value, f"sets `{name}` to a constant; {why}", hint


def _called(node: ast.AST) -> str:
    func = node.func if isinstance(node, ast.Call) else None
    return str(getattr(func, "attr", None) or getattr(func, "id", None) or "")
