"""The invariants of `docs/architecture.md` that import-linter cannot see: what each layer may touch, and its size."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.matrices import KEPT

PACKAGE = Path(__file__).parents[1] / "ttlaunch"
MODULES = sorted(PACKAGE.rglob("*.py"))
PURE = ("diagnostics", "spec", "planning")
LONGEST_MODULE = 500
LONGEST_FUNCTION = 40

# What reads the environment, the current folder, the clock or the network, as it is written in code.
IMPURE = {
    "os.environ",
    "os.getenv",
    "os.getcwd",
    "os.chdir",
    "os.system",
    "Path.cwd",
    "Path.home",
    "socket.socket",
    "time.time",
    "time.sleep",
}
SPEAKS = {"print", "exit", "quit", "input", "breakpoint"}
SPEAKS_AT = {"sys.exit", "sys.stdout.write", "sys.stderr.write", "os._exit"}


def layer(path):
    return path.relative_to(PACKAGE).parts[0]


def dotted(node):
    """`os.environ` for the node of that expression, else an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def uses(path, names):
    tree = ast.parse(path.read_text())
    return sorted({f"{found} in line {node.lineno}" for node in ast.walk(tree) if (found := dotted(node)) in names})


def name(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", [path for path in MODULES if layer(path) in PURE], ids=name)
def test_reading_and_planning_ask_the_machine_nothing(path):
    assert uses(path, IMPURE) == []


SPEAKING = {"cli", "agent", "at_start", "runtime", "torch_hooks", "__main__.py"}


SILENT = [path for path in MODULES if layer(path) not in SPEAKING and path.name != "__main__.py"]


@pytest.mark.parametrize("path", SILENT, ids=name)
def test_only_the_command_line_prints_or_exits(path):
    tree = ast.parse(path.read_text())
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    spoken = [dotted(call.func) for call in called if dotted(call.func) in SPEAKS | SPEAKS_AT]
    assert spoken == []
    # A recipe that exits is caught in the first, and the second notes that a rank does.
    assert uses(path, {"SystemExit"}) == [] or path.name in {"discovery.py", "watch.py"}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_every_module_says_what_it_is_for(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= LONGEST_MODULE


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_function_fits_on_a_screen(path):
    tree = ast.parse(path.read_text())
    long = [
        f"{node.name}: {body} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and (body := node.end_lineno - node.body[0].lineno + 1) > LONGEST_FUNCTION
        and not any("app.command" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert long == []


@pytest.mark.parametrize("path", [path for path in MODULES if layer(path) in PURE], ids=name)
def test_reading_and_planning_write_no_file(path):
    tree = ast.parse(path.read_text())
    writing = {
        "write_text",
        "write_bytes",
        "mkdir",
        "unlink",
        "rename",
        "replace_file",
        "touch",
        "symlink_to",
        "rmtree",
    }
    called = {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert called & writing == set()


CODE = re.compile(r"[CHPRST][0-9]{3}")
LOST_HOST = re.compile(r"lost_hosts|LostHost|HOST_LOST|host_lost|HostLost|lost_host\b")
DECIDES_ON_LOST_HOSTS = {  # that one is lost, what is said about it, and what follows
    "lab/chaos/verdict.py",
    "running/agents/host_link.py",
    "running/ending.py",
    "running/failures/attribution.py",
    "running/lost_hosts.py",
    "running/restarts.py",
}
KEEPS_LOST_HOSTS = {  # a constant, a member of an enumeration with its exit status, a field
    "contract.py",
    "running/conclude.py",
    "running/failures/causes.py",
    "running/report.py",
}
TAKES_LOST_HOSTS_ALONG = {  # types and texts of `running/lost_hosts.py`, and nothing else
    "running/agents/agent_controller.py",
    "running/rank_controller.py",
    "running/failures/failure.py",
    "running/readers/follow.py",
    "running/supervise.py",
}
CODES_ARE_SHOWN = ("diagnostics", "cli/explain.py")
"""What renders a diagnostic or its page may look at the code: for people that is its subject."""


def is_code(node):
    """Whether an expression is, or holds, a diagnostic's code: `"H002"`, `failure.code`, `finding["code"]`, `CODES.x`."""
    match node:
        case ast.Constant(value=str(text)):
            return CODE.fullmatch(text) is not None
        case ast.Subscript(slice=ast.Constant(value="code")):
            return True
        case ast.Attribute(value=ast.Name(id="left"), attr="code"):
            return False  # the status of a SystemExit
        case ast.Attribute(value=ast.Name(id="codes" | "CONFIGURATION" | "TOPOLOGY")) | ast.Attribute(attr="code"):
            return True
    return any(is_code(inner) for inner in ast.iter_child_nodes(node))


def decides_by_code(node):
    """Whether a node compares codes, looks something up by one, or keeps a table or set of them."""
    match node:
        case ast.Compare():
            return is_code(node)
        case ast.Subscript(slice=key):
            return is_code(key) and not isinstance(key, ast.Constant)
        case ast.Dict(keys=keys):
            # `{"code": …}` is a record that carries one.
            return any(isinstance(key, ast.Constant) and CODE.fullmatch(str(key.value)) for key in keys)
        case ast.Set(elts=parts):
            return any(is_code(part) for part in parts)
        case ast.match_case(pattern=pattern):
            return is_code(pattern)
        case ast.Match(subject=subject):
            return is_code(subject)
        case ast.Call(func=ast.Attribute(value=text, attr="startswith" | "endswith" | "removeprefix"), args=args):
            return is_code(text) or any(is_code(arg) for arg in args)
        case ast.Call(func=ast.Attribute(attr="get" | "setdefault" | "pop"), args=[key, *_]):
            return is_code(key) and not isinstance(key, ast.Constant)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            # A collection of codes has no use but to be compared with another.
            return isinstance(getattr(node, "elt", None), ast.Attribute) and node.elt.attr == "code"
    return False


@pytest.mark.parametrize("path", [path for path in MODULES if not name(path).startswith(CODES_ARE_SHOWN)], ids=name)
def test_no_branch_depends_on_the_code_of_a_diagnostic(path):
    """Codes are for people. What decides is data of the diagnostic or the failure, given where it is made."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if decides_by_code(node)]
    assert [] == [ast.unparse(node) for node in nodes]


@pytest.mark.parametrize(
    "text",
    [
        'failure.code == "R012"',
        'failure["code"] == "R008"',
        "last.code in AGAIN",
        '{"R001", "R007"}',
        '{"R020": "a hint"}',
        "HINTS[finding['code']]",
        "HINTS.get(failure.code)",
        'code.startswith("H001")',
        "diagnostic.code != CONFIGURATION.unknown_key",
        "has_errors(d for d in found if d.code == codes.SHAPES)",
        "{d.code for d in diagnostics}",
    ],
)
def test_a_decision_by_code_would_be_seen(text):
    assert any(decides_by_code(node) for node in ast.walk(ast.parse(text)))


def test_nobody_kills_by_name():
    """Escaped processes are found by the run's id in their environment, never by what they are called."""
    for path in MODULES:
        text = path.read_text()
        assert "pkill" not in text
        assert "killall" not in text


def test_no_shell_reads_what_we_put_together():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "subprocess" in dotted(node.func):
                assert not any(
                    keyword.arg == "shell" and ast.unparse(keyword.value) == "True" for keyword in node.keywords
                )


def test_every_file_is_opened_with_its_encoding():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in {"read_text", "write_text"}
            ):
                assert any(keyword.arg == "encoding" for keyword in node.keywords), f"{name(path)}:{node.lineno}"


def test_a_lost_host_takes_part_in_six_modules():
    """Whoever looks for what happens to one finds it; a module that only hands it on holds no words and no decision."""
    found = {name(path) for path in MODULES if LOST_HOST.search(path.read_text(encoding="utf-8"))}
    assert DECIDES_ON_LOST_HOSTS | KEEPS_LOST_HOSTS | TAKES_LOST_HOSTS_ALONG == found
    assert len(DECIDES_ON_LOST_HOSTS) == 6


def test_who_hands_a_lost_host_on_only_imports_it():
    for path in (PACKAGE / one for one in TAKES_LOST_HOSTS_ALONG):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if LOST_HOST.search(line)]
        assert all(line.startswith("from ttlaunch.running.lost_hosts import") for line in lines), (name(path), lines)


def test_the_map_in_the_docs_names_every_folder():
    """And each module beside them: a newcomer finds all of the package in one table."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    inner = [PACKAGE, PACKAGE / "hosts", PACKAGE / "spec", PACKAGE / "running", PACKAGE / "lab", PACKAGE / "runtime"]
    folders = [path for outer in inner for path in outer.iterdir() if (path / "__init__.py").is_file()]
    modules = [path for path in PACKAGE.glob("*.py") if not path.name.startswith("_")]
    missing = [name(path) for path in folders if f"`{name(path)}/`" not in text and f"`{path.name}`" not in text]
    assert [] == missing + [path.name for path in modules if f"`{path.name}`" not in text]


def dotted_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows():
    """Every module with those of the package that it imports, at its top, in a function or for type checkers only.

    But for `ttlaunch/__init__.py`: the library's names are the front of the house, and `ttlaunch.spec` needs none of them.
    """
    known = {dotted_name(path) for path in MODULES} - {PACKAGE.name}
    return {dotted_name(path): imported(path) & known - {dotted_name(path)} for path in MODULES}


def imported(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name(path)}:{node.lineno}: a relative import, which no contract here sees"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def circle_in(graph):
    """All who depend on themselves, directly or through others."""
    return {one for one in graph if one in reached(graph, one)}


def reached(graph, start):
    found, left = set(), [start]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def level(package, modules):
    """The arrows between what lies side by side in a package: its folders, each as one, and its modules."""
    graph = defaultdict(set)
    for module, targets in modules.items():
        inside = [
            part.removeprefix(f"{package}.").split(".")[0]
            for part in (module, *targets)
            if part.startswith(f"{package}.")
        ]
        if module.startswith(f"{package}."):
            graph[inside[0]] |= set(inside[1:]) - {inside[0]}
    return graph


def test_nothing_imports_in_a_circle_at_any_level():
    """Between modules that lie side by side, and between folders that do: each can be understood without what uses it."""
    modules = arrows()
    packages = sorted({dotted_name(path) for path in MODULES if path.name == "__init__.py"})
    circles = {package: circle_in(level(package, modules)) for package in packages}
    assert {} == {package: found for package, found in circles.items() if found}


def test_no_module_imports_itself_through_others():
    """Also not through the `__init__.py` of its own folder."""
    assert set() == circle_in(arrows())


def test_a_circle_is_found():
    assert {"a", "b"} == circle_in({"a": {"b"}, "b": {"a", "c"}, "c": set(), "d": {"a"}})
    assert {"x": {"y"}, "y": {"x"}} == level("p", {"p.x.one": {"p.y"}, "p.x.two": {"p.x.one"}, "p.y": {"p.x.two", "q"}})


def test_nobody_imports_what_stands_further_down_in_the_map():
    """The order of the table is the order of the layers, as the sentence above it says."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("## Code map") : text.index("`recipes/NAME/`")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    rooms = [one.rstrip("/").removesuffix(".py").replace("/", ".") for cell in cells for one in cell.split("`")[1::2]]
    place = {f"{PACKAGE.name}.{room}": number for number, room in enumerate(rooms)}

    def room_of(module):
        while module and module not in place:
            module = module.rpartition(".")[0]
        return module

    wrong = [
        f"{importer} -> {imported}"
        for importer, found in arrows().items()
        for imported in found
        if (one := room_of(importer)) and (other := room_of(imported)) and place[other] > place[one]
        if not other.startswith(f"{one}.")  # a package's own parts
    ]
    assert [] == wrong


def test_a_matrix_that_is_cut_names_a_test_that_is_there():
    """Its cells are compared in `tests/test_matrices.py`."""
    missing = []
    for claim in KEPT:
        name, _, test = claim.partition("::")
        path = PACKAGE.parent / "tests" / name
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if shared := re.search(r"^from tests\.([\w.]+) import \*", text, re.MULTILINE):  # tests that several files run
            text = (PACKAGE.parent / "tests" / f"{shared[1].replace('.', '/')}.py").read_text(encoding="utf-8")
        if f"\ndef {test}(" not in text:
            missing.append(claim)
    assert [] == missing


def test_only_the_console_module_of_the_command_line_writes_to_a_stream():
    """`cli/console.py` cleans what it writes; a module that writes itself could let a host steer the terminal."""
    wrong = []
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        if path.name == "console.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.search(r"(^|\.)(std(out|err)|stream|buffer)\.write|^print$|^(rich\.console\.)?Console$", called):
                wrong.append(f"{path.name}:{node.lineno}: {called}")
    assert [] == wrong
