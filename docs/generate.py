"""Write `docs/reference/` from the code, so that it cannot say anything else: `python docs/generate.py [--check]`."""

import ast
import html
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

import ttlaunch
from ttlaunch import contract
from ttlaunch.app.library import ClusterOptions, StartOptions
from ttlaunch.cli.main import app
from ttlaunch.diagnostics.explain import known_codes, load_page
from ttlaunch.planning.environment import MANAGED, PASSED_PREFIXES
from ttlaunch.spec.located.schema import Section
from ttlaunch.spec.recipe.sections import CompressionConfig, TrainingFile
from ttlaunch.spec.topology.schema import BindingsFile, ClusterFile, MeshGraphFile, SubContextFilesFile

ROOT = Path(__file__).parents[1]
REFERENCE = Path(__file__).parent / "reference"
_GENERATED = "<!-- Written by docs/generate.py; change the code instead. -->\n\n"
_FAMILIES = {
    "T": "Topology files",
    "C": "Training configuration",
    "P": "Planning",
    "H": "Hosts",
    "S": "Code sync",
    "R": "Running ranks",
}


def main() -> int:
    """Write the pages, or with `--check` say which ones are out of date."""
    pages = {name: _GENERATED + text for name, text in render_pages().items()}
    stale = [name for name, text in pages.items() if not _is_current(REFERENCE / name, text)]
    if "--check" in sys.argv[1:]:
        sys.stderr.write("".join(f"docs/reference/{name} is out of date; run docs/generate.py\n" for name in stale))
        return 1 if stale else 0
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages.items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    return 0


def render_pages() -> dict[str, str]:
    """File name to text."""
    return {
        "cli.md": _cli(),
        "configuration.md": _sections("The training file", _Documented, _TRAINING_INTRO),
        "topology-files.md": _topology_files(),
        "diagnostics.md": _diagnostics(),
        "environment.md": _environment(),
        "exit-statuses.md": _exit_statuses(),
        "python.md": _python(),
        "trainers.md": _trainers(),
    }


_TRAINING_INTRO = """\
A training file is YAML with the sections below; every key may be left out. `--set section.key=value` changes one.
A recipe may add sections of its own and refuses keys that it does not read. `compression_config` is a section of the
recipes whose README tells of it.
"""


_TRAINERS_INTRO = """\
# What a trainer imports

Every name of `ttlaunch.train`, with what it takes and what it is for; the module that has the rest of its documentation stands
above it. A name is loaded when it is first used.
"""


class _Documented(TrainingFile):
    """What every recipe has, and what several have."""

    compression_config: CompressionConfig = CompressionConfig()


_PYTHON_INTRO = """\
# Python

What `import ttlaunch` offers. Nothing of it prints, ends the process, changes a signal handler, the environment or the
working folder; calls may come from any thread and from a running event loop. Begin with
[sweep four learning rates](../tutorials/sweep-from-python.md).
"""


def _python() -> str:
    """Every public name of the package with its signature, its docstring and those of its public members."""
    parts = [_PYTHON_INTRO]
    public = {name: getattr(ttlaunch, name) for name in ttlaunch.__all__}
    parts += [_callable(f"ttlaunch.{name}", value) for name, value in public.items() if inspect.isfunction(value)]
    parts += [f"## {options.__name__}\n\n{_doc(options)}\n" for options in (ClusterOptions, StartOptions)]
    for name, value in public.items():
        if inspect.isclass(value):
            parts.append(f"## ttlaunch.{name}\n\n{_doc(value)}\n")
            parts += [
                _member(name, member, found) for member, found in vars(value).items() if not member.startswith("_")
            ]
    return "\n".join(part for part in parts if part)


def _member(owner: str, name: str, value: Any) -> str:
    """A method or property with its docstring; nothing for a plain attribute, which the class describes."""
    if isinstance(value, property):
        return f"### {owner}.{name}\n\n{_doc(value)}\n"
    if isinstance(value, classmethod) or not inspect.isfunction(value):
        return ""
    return _callable(f"{owner}.{name}", value, level="###")


def _callable(name: str, function: Any, *, level: str = "##") -> str:
    signature = re.sub(r"\*<class '([\w.]+)'>", r"Unpack[\1]", str(inspect.signature(function)))
    signature = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", signature).replace(": 'Target", ": Target").replace("'", "")
    return f"{level} {name}\n\n```python\n{name}{signature}\n```\n\n{_doc(function)}\n"


def _doc(value: Any) -> str:
    """A docstring as Markdown: sections become headings in bold, their entries a list."""
    lines, found = (inspect.getdoc(value) or "").splitlines(), []
    in_section = False
    for line in lines:
        if line in {"Args:", "Attributes:", "Raises:", "Returns:"}:
            in_section = True
            found += [f"**{line.removesuffix(':')}**", ""]
        elif in_section and line.startswith("    ") and not line.startswith("     "):
            head, colon, rest = line.strip().partition(": ")
            found.append(f"- `{head}`: {rest}" if colon else f"- {head}")
        elif in_section and line.startswith("     "):
            found.append(f"  {line.strip()}")
        else:
            in_section = in_section and not line
            found.append(line)
    return "\n".join(found)


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def _cli() -> str:
    command = get_command(app)
    context = typer.Context(command, info_name="ttlaunch")
    text = html.unescape(get_docs_for_click(obj=command, ctx=context, name="ttlaunch"))
    return re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", text).rstrip() + "\n"


def _topology_files() -> str:
    bindings = _sections("`rank_bindings.yaml`", BindingsFile, "Which rank drives which mesh.\n")
    graph = _sections("`mgd.yaml`", MeshGraphFile, "The mesh graph descriptor: chips, boards, meshes and links.\n")
    mapping = _sections("A mapping of sub-contexts", SubContextFilesFile, "In place of `rank_bindings.yaml`.\n")
    cluster = _sections("`cluster.yaml`", ClusterFile, "Optional: how hosts are reached and what they have.\n")
    return (
        "# The files of a cluster\n\n`hosts.txt` is an Open MPI hostfile: `<host> slots=<n>`, one a line.\n\n"
        + "\n".join(re.sub(r"^#", "##", text, flags=re.MULTILINE) for text in (graph, bindings, mapping, cluster))
    )


def _sections(title: str, model: type[Section], intro: str) -> str:
    parts = [f"# {title}\n\n{intro}"]
    parts += [f"## {name or 'Top level'}\n\n{_table(section)}" for name, section in _walk(model, "")]
    return "\n".join(parts)


def _walk(model: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    if any(_section_in(field.annotation) is None for field in model.model_fields.values()):
        yield prefix, model
    for name, field in model.model_fields.items():
        section = _section_in(field.annotation)
        if section is not None:
            yield from _walk(section, f"{prefix}.{field.alias or name}".lstrip("."))


def _table(model: type[Section]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if _section_in(field.annotation) is not None and field.description is None:
            continue
        default = "required" if field.is_required() else f"`{json.dumps(_plain(field.default))}`"
        kind = _type_name(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)
        rows.append(f"| `{field.alias or name}` | {kind} | {default} | {field.description or ''} |")
    return "\n".join(rows) + "\n"


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Section) else value


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        bounds = [b for item in metadata for b in _bounds(item)]
        return f"{_type_name(inner)}{' ' + ', '.join(bounds) if bounds else ''}"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _type_name(part) for part in get_args(annotation))
    if origin is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        return "keys and values"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any"}
    return names.get(annotation, str(annotation))


def _bounds(metadata: Any) -> list[str]:
    metadata = getattr(metadata, "metadata", [metadata])
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return [f"{sign} {getattr(m, name):g}" for m in metadata for name, sign in signs.items() if hasattr(m, name)]


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _diagnostics() -> str:
    parts = ["# Diagnostics\n\nEvery code with its page; `ttlaunch explain CODE` shows the same.\n"]
    family = ""
    for code in known_codes():
        if code[0] != family:
            family = code[0]
            parts.append(f"# {_FAMILIES[family]}\n")
        page = load_page(code)
        if page is not None:
            parts.append(re.sub(r"^(#+) ", r"\1# ", _outside_fences(page.text), flags=re.MULTILINE).rstrip() + "\n")
    return "\n".join(parts).replace("\0", "#")


def _outside_fences(text: str) -> str:
    """Protect `#` at the start of lines inside fenced blocks from being taken for headings."""
    lines, inside = [], False
    for line in text.split("\n"):
        inside ^= line.startswith("```")
        lines.append("\0" + line[1:] if inside and line.startswith("#") else line)
    return "\n".join(lines)


def _exit_statuses() -> str:
    meanings = {
        contract.STATUS_DONE: "done",
        contract.STATUS_RANK_FAILED: "a rank failed, or the result cannot be trusted",
        contract.STATUS_USAGE: "the command line is wrong",
        contract.STATUS_DESCRIPTION: "the description is wrong: topology files, training file, recipe, or all together",
        contract.STATUS_HOST: "a host is not ready; nothing was started",
        contract.STATUS_SYNC: "the code could not be copied to a host; nothing was started",
        contract.STATUS_HUNG: "the run hung: nothing moved for the hang timeout",
        contract.STATUS_HOST_LOST: "a host was lost",
        contract.STATUS_NO_PROGRESS: "restarts made no progress (`--max-restarts`)",
        contract.STATUS_INTERRUPTED: "interrupted by Ctrl-C",
        contract.STATUS_TERMINATED: "ended by SIGTERM",
    }
    rows = "".join(f"| {status} | {meaning} |\n" for status, meaning in meanings.items())
    return f"# Exit statuses\n\n| status | meaning |\n|---|---|\n{rows}\nNever 0 after a signal or a failed rank, whatever mpirun says.\n"


def _environment() -> str:
    prefixes = ", ".join(f"`{prefix}`" for prefix in PASSED_PREFIXES)
    managed = ", ".join(f"`{name}`" for name in sorted(MANAGED))
    return f"""# The environment of a rank

A rank sees the environment of its host, with the following on top; later wins.

1. Variables of the launching shell that begin with {prefixes}, except managed ones.
2. `PATH`, `HOME`, `USER`, `VIRTUAL_ENV`, `PYTHONHOME` and `PYTHONPATH` of the launching shell (`PYTHONPATH` is the
   launch folder if unset), `PYTHONUNBUFFERED=1`, `TT_RUN_ORIGINAL_CWD`, `TT_RUN_RANK`; where the cluster has a mesh
   graph also `TT_METAL_HOME`, `TT_METAL_RUNTIME_ROOT`, `TT_MESH_GRAPH_DESC_PATH`, `LD_LIBRARY_PATH`, `TT_MESH_ID`, and
   `TT_MESH_HOST_RANK` if the binding gives one.
3. `environment` of `cluster.yaml`, then `global_env` of `rank_bindings.yaml`.
4. `env_overrides` of the rank's binding.
5. `TTLAUNCH_RUN_ID`, `TTLAUNCH_RUN_DIR`, `TTLAUNCH_PLAN`, `TTLAUNCH_RANK`, `TTLAUNCH_LOCAL_RANK`,
   `TTLAUNCH_WORLD_SIZE`, `TTLAUNCH_ROLE`, `TTLAUNCH_HOST`; `TTLAUNCH_NETWORKS` where the engine named some; and `PYTHONFAULTHANDLER=1` unless it is set, so that a crash
   in compiled code tells the line that led to it.

Managed names reach a rank only through the plan; a value left over in a shell never does: {managed}.

No value stands on a command line; the shim of each rank sets them before the rank's program starts.
"""


def _trainers() -> str:
    """The public names by module, read from the source: importing them would take torch."""
    lines = [_TRAINERS_INTRO]
    for module, names in _imports_of("ttlaunch.train"):
        if module.startswith("ttlaunch.runtime."):
            lines += [f"\n## `{module}`\n", *(f"- {_signature(_definition(module, name))}" for name in names)]
    return "\n".join(lines) + "\n"


def _imports_of(module: str) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, [alias.name for alias in node.names]


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Where a class or function is written, which may be a module that this one imports it from."""
    for node in ast.parse(_source(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    return _definition(next(source for source, names in _imports_of(module) if name in names), name)


def _source(module: str) -> str:
    return (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")


def _signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Name, arguments, and the first line of the docstring."""
    arguments = ""
    if isinstance(node, ast.FunctionDef):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        arguments = f"({ast.unparse(node.args)}){returned}"
    said = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    return f"`{node.name}{arguments}`: {said}"


if __name__ == "__main__":
    sys.exit(main())
