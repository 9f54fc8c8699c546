"""Write `docs/reference/` from the code, so that it cannot say anything else: `python docs/generate.py [--check]`."""

import ast
import html
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import yaml
from http_api import render_http_api
from typer.cli import get_docs_for_click
from typer.main import get_command

from ttlaunch import contract
from ttlaunch.cli.console import JSON_SCHEMAS
from ttlaunch.cli.main import app
from ttlaunch.diagnostics.explain import known_codes, load_page
from ttlaunch.planning.environment import PASSED_PREFIXES
from ttlaunch.spec.located.schema import Section
from ttlaunch.spec.recipe.sections import CompressionConfig, TrainingFile
from ttlaunch.spec.topology.schema import (
    BindingsFile,
    ClusterFile,
    DescriptorMappingFile,
    MeshGraphFile,
    MockMappingFile,
    SubContextFilesFile,
)
from ttlaunch.spec.topology.variables import MANAGED

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
        "http.md": render_http_api(),
        "exit-statuses.md": _exit_statuses(),
        "python.md": _api("ttlaunch"),
        "recipes.md": _api("ttlaunch.recipe"),
        "trainers.md": _api("ttlaunch.train"),
        "promises.md": _promises(),
    }


_TRAINING_INTRO = """\
A training file is YAML with the sections below. Every key is optional, and `--set section.key=value` changes one. A recipe may add its own
sections, and rejects keys that it does not read. Only recipes whose README mentions `compression_config` have that section.
"""


class _Documented(TrainingFile):
    """What every recipe has, and what several have."""

    compression_config: CompressionConfig = CompressionConfig()


_JSON = """
# JSON

With `--format json`, a command prints one object, or one object a line (`logs`, `metrics`). Its first key, `schema`, names what the object is
and the version of that, which is raised when a key is removed or changes its meaning or type. New keys do not raise it. A command that
ends with a mistake prints `ttlaunch.diagnostics/1`. `ttlaunch schema` prints JSON Schemas, which name their own version.

{names}"""
_API_INTROS = {
    "ttlaunch": """\
# Python

What `import ttlaunch` offers. None of it prints, ends the process, or changes a signal handler, the environment or the
working folder. Calls may come from any thread and from a running event loop. Begin with
[sweep four learning rates](../tutorials/sweep-from-python.md).
""",
    "ttlaunch.recipe": """\
# What a `recipe.py` imports

Every name of `ttlaunch.recipe`. The launcher reads a `recipe.py` to check and plan a run, so it must not import torch.
Begin with [write your own recipe](../how-to/write-your-own-recipe.md).
""",
    "ttlaunch.train": """\
# What a `trainer.py` imports

Every name of `ttlaunch.train`. A name is loaded when it is first used. Begin with
[a complete trainer](../how-to/write-your-own-trainer.md).
""",
}
_BESIDE_THE_LIBRARY = [("ttlaunch.app.library", ["ClusterOptions", "StartOptions"])]


def _api(module: str) -> str:
    """Every public name of a module with its signature and docstring, read from the source: importing it may take torch.

    The site has the same from mkdocstrings; this page is for those who read the Markdown.
    """
    public = _public_names(module)
    imports = [*_imports_of(module), *(_BESIDE_THE_LIBRARY if module == "ttlaunch" else [])]
    found = [
        (name, _definition(source, name))
        for source, names in imports
        for name in names
        if name in public or source == "ttlaunch.app.library"
    ]
    parts = [_render_definition(name, node) for name, node in found if node is not None]
    return "\n".join([_API_INTROS[module], *parts])


def _public_names(module: str) -> set[str]:
    """Return the names that a module offers: those that it imports from ttlaunch, as it calls them."""
    nodes = [node for node in ast.walk(ast.parse(_source(module))) if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name for node in nodes if str(node.module).startswith("ttlaunch.") for alias in node.names
    }


def _render_definition(name: str, node: ast.ClassDef | ast.FunctionDef, *, level: str = "##") -> str:
    """A heading, the signature, the docstring; of a class also its fields and public members."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if isinstance(node, ast.FunctionDef):
        signature = "" if "property" in decorators else f"```python\n{_signature(name, node)}\n```\n\n"
        return f"{level} {name}\n\n{signature}{_doc(node)}\n"
    members = [member for member in node.body if isinstance(member, ast.FunctionDef)]
    lines = [_signature(name, member) for member in members if member.name == "__init__"]
    lines += [
        ast.unparse(field) for field in node.body if isinstance(field, ast.AnnAssign) and _is_public(field.target)
    ]
    signature = f"```python\n{chr(10).join(lines)}\n```\n\n" if lines else ""
    init = "".join(f"\n{_doc(member)}\n" for member in members if member.name == "__init__" and _doc(member))
    parts = [f"{level} {name}\n\n{signature}{_doc(node)}\n{init}"]
    parts += [
        _render_definition(f"{name}.{member.name}", member, level=level + "#")
        for member in members
        if not member.name.startswith("_")
    ]
    return "\n".join(parts)


def _is_public(target: ast.expr) -> bool:
    return not ast.unparse(target).startswith("_")


def _doc(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown: sections become headings in bold, their entries a list."""
    text = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", ast.get_docstring(node) or "", flags=re.MULTILINE)
    lines, found = text.splitlines(), []
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
    names = "".join(f"- `ttlaunch.{name}/{version}`\n" for name, version in JSON_SCHEMAS.items())
    return re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", text).rstrip() + "\n" + _JSON.format(names=names)


def _topology_files() -> str:
    bindings = _sections("`rank_bindings.yaml`", BindingsFile, "It assigns a mesh to each rank.\n")
    graph = _sections(
        "`mgd.yaml`", MeshGraphFile, "The mesh graph descriptor describes chips, boards, meshes and links.\n"
    )
    mapping = _sections("A mapping of sub-contexts", SubContextFilesFile, "It replaces `rank_bindings.yaml`.\n")
    only_checked = "`tt-run` reads it. ttlaunch checks it with `ttlaunch validate`; a run needs bindings.\n"
    descriptors = _sections("A mapping of descriptors", DescriptorMappingFile, only_checked)
    clusters = _sections("A mapping of mock clusters", MockMappingFile, only_checked)
    cluster = _sections(
        "`cluster.yaml`", ClusterFile, "Optional settings for logging into hosts and for the ranks' environment.\n"
    )
    parts = (graph, bindings, mapping, descriptors, clusters, cluster)
    return (
        "# The files of a cluster\n\n`hosts.txt` is an Open MPI hostfile: one `<host> slots=<n>` per line.\n\n"
        + "\n".join(re.sub(r"^#", "##", text, flags=re.MULTILINE) for text in parts)
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
        kind, of, items = _type_name(inner).partition(" of ")
        name = f"{kind}{_length(metadata)}{of}{items}"
        return f"{name}{' ' + ', '.join(bounds) if bounds else ''}"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _type_name(part) for part in get_args(annotation))
    if origin is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        key, value = get_args(annotation)
        return "keys and values" if value is Any else f"{{{_type_name(key)}: {_type_name(value)}}}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any"}
    return names.get(annotation, str(annotation))


def _bounds(metadata: Any) -> list[str]:
    metadata = getattr(metadata, "metadata", [metadata])
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return [f"{sign} {_number(getattr(m, name))}" for m in metadata for name, sign in signs.items() if hasattr(m, name)]


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _length(metadata: Any) -> str:
    """Return in parentheses how many items a list has, or that it is not empty; empty if any length is accepted."""
    items = [item for one in metadata for item in getattr(one, "metadata", [one])]
    least, most = (max((getattr(i, end, None) or 0 for i in items), default=0) for end in ("min_length", "max_length"))
    if least == most:
        return f" ({least} items)" if least else ""
    return " (not empty)" if (least, most) == (1, 0) else f" ({least} to {most} items)"


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _diagnostics() -> str:
    parts = ["# Diagnostics\n\nThis page has every code. `ttlaunch explain CODE` shows the same text.\n"]
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
        contract.STATUS_RANK_FAILED: "a rank failed, the result is not reliable, or a text differs from its receipt",
        contract.STATUS_USAGE: "the command line is wrong, or names a configuration, recipe, run or file that is not there",
        contract.STATUS_DESCRIPTION: "the description is wrong: topology files, training file (also what `--set` makes of it), recipe, or all together",
        contract.STATUS_HOST: "a host is not ready; nothing was started",
        contract.STATUS_SYNC: "the code could not be copied to a host; nothing was started",
        contract.STATUS_HUNG: "the run hung: it made no progress during the hang timeout",
        contract.STATUS_HOST_LOST: "a host was lost",
        contract.STATUS_NO_PROGRESS: "restarts made no progress (`--max-restarts`, or a job that is requeued)",
        contract.STATUS_TIME_LIMIT: "the time limit of a batch system was near (SIGUSR1): ranks have saved their step",
        contract.STATUS_AUDIT: "an audit found a rank that computed wrong (`--audit`)",
        contract.STATUS_INTERRUPTED: "interrupted by Ctrl-C",
        contract.STATUS_CLOSED_PIPE: "who read the output has ended, as `head` does",
        contract.STATUS_TERMINATED: "ended by SIGTERM",
    }
    rows = "".join(f"| {status} | {meaning} |\n" for status, meaning in meanings.items())
    return f"# Exit statuses\n\n| status | meaning |\n|---|---|\n{rows}\nThe status is never 0 after a signal or a failed rank, whatever status mpirun exits with.\n"


def _environment() -> str:
    prefixes = ", ".join(f"`{prefix}`" for prefix in PASSED_PREFIXES)
    managed = ", ".join(f"`{name}`" for name in sorted(MANAGED))
    return f"""# The environment of a rank

A rank gets the environment of its host and the following variables. Later entries override earlier ones.

1. Variables of the launching shell that begin with {prefixes}, except managed ones.
2. `PATH`, `HOME`, `USER`, `VIRTUAL_ENV`, `PYTHONHOME` and `PYTHONPATH` of the launching shell (`PYTHONPATH` is the
   launch folder if unset), `PYTHONUNBUFFERED=1`, `TT_RUN_ORIGINAL_CWD`, `TT_RUN_RANK`; where the cluster has a mesh
   graph also `TT_METAL_HOME`, `TT_METAL_RUNTIME_ROOT`, `TT_MESH_GRAPH_DESC_PATH`, `LD_LIBRARY_PATH`, `TT_MESH_ID`, and
   `TT_MESH_HOST_RANK` if the binding gives one.
3. `environment` of `cluster.yaml`, then `global_env` of `rank_bindings.yaml`.
4. `env_overrides` of the rank's binding.
5. `--env` on the command line.
6. `TTLAUNCH_RUN_ID`, `TTLAUNCH_RUN_DIR`, `TTLAUNCH_PLAN`, `TTLAUNCH_RANK`, `TTLAUNCH_LOCAL_RANK`,
   `TTLAUNCH_WORLD_SIZE`, `TTLAUNCH_ROLE`, `TTLAUNCH_HOST`; `TTLAUNCH_NETWORKS` where the engine named some; and `PYTHONFAULTHANDLER=1` unless it is set, so that a crash
   in compiled code shows the line of Python.

Managed variables reach a rank only through the plan, never from the launching shell: {managed}.

No value appears on a command line; the shim of each rank sets the variables before it starts the rank's program.

## Secrets

`plan.json`, `command.sh` and everything else that ttlaunch writes name a secret as `env:NAME` and never hold its value. The
value travels beside the plan, in the environment of the processes that start ranks. ttlaunch takes these for secrets:

- A value `env:NAME` in the training file or in an environment: the variable `NAME` of the launching shell.
- A variable whose name says so, such as `HF_TOKEN`, `PGPASSWORD`, `MYSQL_PWD`, `GH_PAT`, `AUTHORIZATION`, `SESSION_COOKIE` or
  `SIGNING_KEY_B64`. Names of something about a secret, such as `PASSWORD_FILE`, `TOKENIZER` or `AWS_ACCESS_KEY_ID`, are not meant.
- A value that is one, whatever its variable is called: a URL with a password, a private key, an access token of a well-known form.
- The same in the arguments of a program: `--password X`, `--password=X`, `API_KEY=X`, a URL with a password, also inside the text of
  `sh -c`. The program gets the value as it was typed. Another user of the host can see it there, in the list of processes.
  `--mpi-args` with a secret is refused (P015), because it would stand on mpirun's command line.

The secrets of `--env` are kept nowhere either; type `--env HF_TOKEN` without a value, so that the list of processes does not show it
beside `ttlaunch run`. A literal secret in a training file or in `--set` is kept as any other value; write `env:NAME` there. What ranks print is kept as
it is. `ttlaunch repro` cannot repeat a program with a secret argument (P033).
"""


_PROMISES_INTRO = """\
# Guarantees and the tests that check them

Each requirement has an id, one sentence, and the tests whose docstrings name the id. Run one with `pytest PATH::NAME`; a
path alone means the whole file. [Guarantees](../explanation/guarantees.md) explains those about failures.
"""
_REQUIREMENTS = re.compile(r"\b([A-EX])(\d{1,2})(?:(?:-| to )\1(\d{1,2}))?\b")


def _promises() -> str:
    """Every requirement id that stands in a test's docstring, with its sentence and its tests."""
    sentences = yaml.safe_load((ROOT / "docs" / "promises.yaml").read_text(encoding="utf-8"))
    tests = _tests_by_requirement()
    unequal = {key for key in sentences if len(key) > 1} ^ set(tests)
    if unequal:
        raise ValueError(f"docs/promises.yaml and the docstrings of tests differ in {', '.join(sorted(unequal))}")
    parts = [_PROMISES_INTRO]
    for key, sentence in sentences.items():
        parts.append(f"## {sentence}\n" if key not in tests else f"### {key}\n\n{sentence}\n")
        parts += [f"- `{test}`" for test in tests.get(key, ())] + [""] * (key in tests)
    return "\n".join(parts).rstrip() + "\n"


def _tests_by_requirement() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.FunctionDef):
                continue
            test = path.relative_to(ROOT).as_posix() + ("" if isinstance(node, ast.Module) else f"::{node.name}")
            for family, first, last in _REQUIREMENTS.findall(ast.get_docstring(node) or ""):
                for number in range(int(first), int(last or first) + 1):
                    tests = found.setdefault(f"{family}{number}", [])
                    if test not in tests:
                        tests.append(test)
    return found


def _imports_of(module: str) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, [alias.name for alias in node.names]


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Where a class or function is written, which may be a module that this one imports it from; None: it is a value."""
    for node in ast.parse(_source(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    source = next((source for source, names in _imports_of(module) if name in names), None)
    return None if source is None else _definition(source, name)


def _source(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def _signature(name: str, node: ast.FunctionDef) -> str:
    returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    return f"{name}({arguments}){returned}"


if __name__ == "__main__":
    sys.exit(main())
