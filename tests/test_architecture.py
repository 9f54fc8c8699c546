"""The invariants of `docs/architecture.md` that import-linter cannot see: what each layer may touch, and its size."""

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class Module:
    """A module of the package, parsed once for all rules that look at it."""

    path: Path

    @property
    def name(self):
        return name(self.path)

    @property
    def layer(self):
        return self.path.relative_to(PACKAGE).parts[0]

    @cached_property
    def text(self):
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self):
        return ast.parse(self.text)

    @cached_property
    def nodes(self):
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self):
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def methods(self):
        """The calls of an attribute of something."""
        return [call for call in self.calls if isinstance(call.func, ast.Attribute)]

    @cached_property
    def dotted(self):
        """All `a.b.c` in it, each with its line."""
        named = [node for node in self.nodes if isinstance(node, (ast.Attribute, ast.Name))]
        return [(found, node.lineno) for node in named if (found := dotted(node))]

    def uses(self, names):
        return sorted({f"{found} in line {line}" for found, line in self.dotted if found in names})


RULES = {}
"""By name, what each rule finds wrong with a module: a list, empty where all is well."""


def rule(finds):
    RULES[finds.__name__] = finds
    return finds


@pytest.fixture(scope="module")
def read():
    """Return the modules that break each rule, and how, and what each module imports; all modules are read once for all tests."""
    broken, arrows = {one: {} for one in RULES}, {}
    for path in MODULES:
        module = Module(path)
        arrows[dotted_name(path)] = imported(module)
        for one, finds in RULES.items():
            if found := finds(module):
                broken[one][module.name] = found
    # But for `ttlaunch/__init__.py`: the library's names are the front of the house, and `ttlaunch.spec` needs none of them.
    known = set(arrows) - {PACKAGE.name}
    return broken, {module: found & known - {module} for module, found in arrows.items()}


@pytest.fixture
def broken(read):
    """`broken["a rule"]`: how each module breaks it that does."""
    return read[0]


@pytest.fixture
def arrows(read):
    """Every module with those of the package that it imports, at its top, in a function or for type checkers only."""
    return read[1]


def dotted(node):
    """`os.environ` for the node of that expression, else an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def name(path):
    return str(path.relative_to(PACKAGE))


@rule
def asks_the_machine(module):
    return module.layer in PURE and module.uses(IMPURE)


def test_reading_and_planning_ask_the_machine_nothing(broken):
    assert {} == broken["asks_the_machine"]


SPEAKING = {"cli", "agent", "at_start", "runtime", "torch_hooks", "__main__.py"}
ENDS_WHAT_EXITS = {"discovery.py", "watch.py"}
"""A recipe that exits is caught in the first, and the second notes that a rank does."""


@rule
def prints_or_exits(module):
    if module.layer in SPEAKING or module.path.name == "__main__.py":
        return []
    spoken = [found for call in module.calls if (found := dotted(call.func)) in SPEAKS | SPEAKS_AT]
    return spoken + ([] if module.path.name in ENDS_WHAT_EXITS else module.uses({"SystemExit"}))


def test_only_the_command_line_prints_or_exits(broken):
    assert {} == broken["prints_or_exits"]


@rule
def has_no_docstring_or_is_long(module):
    lines = len(module.text.splitlines())
    return ["no docstring"] * (not ast.get_docstring(module.tree)) + [f"{lines} lines"] * (lines > LONGEST_MODULE)


def test_every_module_says_what_it_is_for(broken):
    assert {} == broken["has_no_docstring_or_is_long"]


@rule
def has_a_long_function(module):
    return [
        f"{node.name}: {body} lines"
        for node in module.nodes
        if isinstance(node, ast.FunctionDef)
        and (body := node.end_lineno - node.body[0].lineno + 1) > LONGEST_FUNCTION
        and not any("app.command" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def test_a_function_fits_on_a_screen(broken):
    assert {} == broken["has_a_long_function"]


WRITING = {"write_text", "write_bytes", "mkdir", "unlink", "rename", "replace_file", "touch", "symlink_to", "rmtree"}


@rule
def writes_a_file(module):
    return module.layer in PURE and sorted({call.func.attr for call in module.methods} & WRITING)


def test_reading_and_planning_write_no_file(broken):
    assert {} == broken["writes_a_file"]


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
    "lab/virtual_elastic_faults.py",
    "lab/virtual_faults.py",
    "lab/virtual_members.py",
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


@rule
def decides_by_a_code(module):
    nodes = [] if module.name.startswith(CODES_ARE_SHOWN) else module.nodes
    return [ast.unparse(node) for node in nodes if decides_by_code(node)]


def test_no_branch_depends_on_the_code_of_a_diagnostic(broken):
    """Codes are for people. What decides is data of the diagnostic or the failure, given where it is made."""
    assert {} == broken["decides_by_a_code"]


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


@rule
def kills_by_name(module):
    return [word for word in ("pkill", "killall") if word in module.text]


def test_nobody_kills_by_name(broken):
    """Escaped processes are found by the run's id in their environment, never by what they are called."""
    assert {} == broken["kills_by_name"]


@rule
def has_a_shell_read_it(module):
    return [
        ast.unparse(call)
        for call in module.calls
        if "subprocess" in dotted(call.func)
        and any(keyword.arg == "shell" and ast.unparse(keyword.value) == "True" for keyword in call.keywords)
    ]


def test_no_shell_reads_what_we_put_together(broken):
    assert {} == broken["has_a_shell_read_it"]


@rule
def opens_without_an_encoding(module):
    return [
        f"line {call.lineno}"
        for call in module.methods
        if call.func.attr in {"read_text", "write_text"} and all(keyword.arg != "encoding" for keyword in call.keywords)
    ]


def test_every_file_is_opened_with_its_encoding(broken):
    assert {} == broken["opens_without_an_encoding"]


@rule
def names_a_lost_host(module):
    return LOST_HOST.findall(module.text)


def test_a_lost_host_takes_part_in_six_modules(broken):
    """Whoever looks for what happens to one finds it; a module that only hands it on holds no words and no decision."""
    assert DECIDES_ON_LOST_HOSTS | KEEPS_LOST_HOSTS | TAKES_LOST_HOSTS_ALONG == set(broken["names_a_lost_host"])
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


def imported(module):
    found = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module.name}:{node.lineno}: a relative import, which no contract here sees"
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


def test_nothing_imports_in_a_circle_at_any_level(arrows):
    """Between modules that lie side by side, and between folders that do: each can be understood without what uses it."""
    packages = sorted({dotted_name(path) for path in MODULES if path.name == "__init__.py"})
    circles = {package: circle_in(level(package, arrows)) for package in packages}
    assert {} == {package: found for package, found in circles.items() if found}


def test_no_module_imports_itself_through_others(arrows):
    """Also not through the `__init__.py` of its own folder."""
    assert set() == circle_in(arrows)


def test_a_circle_is_found():
    assert {"a", "b"} == circle_in({"a": {"b"}, "b": {"a", "c"}, "c": set(), "d": {"a"}})
    assert {"x": {"y"}, "y": {"x"}} == level("p", {"p.x.one": {"p.y"}, "p.x.two": {"p.x.one"}, "p.y": {"p.x.two", "q"}})


def test_nobody_imports_what_stands_further_down_in_the_map(arrows):
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
        for importer, found in arrows.items()
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


@rule
def writes_to_a_stream(module):
    if module.layer != "cli" or module.path.name == "console.py":
        return []
    called = [(call.lineno, ast.unparse(call.func)) for call in module.calls]
    return [f"line {line}: {function}" for line, function in called if WRITES_TO_A_STREAM.search(function)]


WRITES_TO_A_STREAM = re.compile(r"(^|\.)(std(out|err)|stream|buffer)\.write|^print$|^(rich\.console\.)?Console$")


def test_only_the_console_module_of_the_command_line_writes_to_a_stream(broken):
    """`cli/console.py` cleans what it writes; a module that writes itself could let a host steer the terminal."""
    assert {} == broken["writes_to_a_stream"]


@rule
def words_the_reason_of_the_system(module):
    return module.layer not in {"agent", "system_reason.py"} and ".strerror or" in module.text


def test_the_reason_of_the_system_is_worded_in_one_place(broken):
    """By `system_reason`; a script that is sent to a host alone has words of its own."""
    assert {} == broken["words_the_reason_of_the_system"]


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        ("asks_the_machine", "planning/one.py", "here = os.getcwd()"),
        ("prints_or_exits", "planning/one.py", "print(1)"),
        ("prints_or_exits", "planning/one.py", "raise SystemExit"),
        ("has_no_docstring_or_is_long", "one.py", "pass"),
        ("has_no_docstring_or_is_long", "one.py", '"Long."' + "\n" * LONGEST_MODULE + "pass"),
        ("has_a_long_function", "one.py", "def one():" + "\n    pass" * (LONGEST_FUNCTION + 1)),
        ("writes_a_file", "spec/one.py", "path.mkdir()"),
        ("decides_by_a_code", "one.py", "failure.code == 'R012'"),
        ("kills_by_name", "one.py", "command = 'pkill python'"),
        ("has_a_shell_read_it", "one.py", "subprocess.run('ls', shell=True)"),
        ("opens_without_an_encoding", "one.py", "path.read_text()"),
        ("writes_to_a_stream", "cli/one.py", "sys.stdout.write('')"),
        ("words_the_reason_of_the_system", "cli/one.py", "error.strerror or error"),
    ],
)
def test_what_breaks_a_rule_is_seen(rule, path, text):
    module = Module(PACKAGE / path)
    module.__dict__["text"] = text
    assert RULES[rule](module)
