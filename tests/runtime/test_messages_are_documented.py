"""Every public function that sends or receives states what it costs and in which order things happen."""

import ast
from functools import cache
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "ttlaunch" / "runtime"
VERBS = {"send", "recv", "isend", "irecv", "wait_any"}
"""What a communicator does; its kinds are documented once, at the protocol."""


@cache
def functions():
    """`(module, class or None, function)` for each function of the folders in which messages are sent."""
    return [(path.relative_to(RUNTIME).as_posix(), *found) for path in modules() for found in _functions(path)]


def modules():
    return sorted([*RUNTIME.glob("comm/*.py"), *RUNTIME.glob("parallel/**/*.py")])


def _functions(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node, method) for method in node.body if isinstance(method, ast.FunctionDef))


@cache
def borrowed():
    """By module, the names that it takes from other packages, such as `reduce` from `functools`: nothing there sends a message."""
    taken = {}
    for path in modules():
        imports = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        others = [node for node in imports if not node.level and node.module.partition(".")[0] != "ttlaunch"]
        taken[path.relative_to(RUNTIME).as_posix()] = {
            name.asname or name.name for node in others for name in node.names
        }
    return taken


def calls(function):
    """Names of the functions, and of the methods, that a function calls; `self.x()` is the method `x` of its class."""
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {func.id for func in called if isinstance(func, ast.Name)}
    methods = {func.attr for func in called if isinstance(func, ast.Attribute)}
    own = {func.attr for func in called if isinstance(func, ast.Attribute) and ast.unparse(func.value) == "self"}
    return names, methods, own


def place(module, holder, function):
    return f"{module}:{holder.name + '.' if holder else ''}{function.name}"


def sending():
    """Functions that use a verb, or call a function of these folders or a method of their own class that does."""
    every = [(*found, *calls(found[2])) for found in functions()]
    found = {place(*one[:3]) for one in every if one[4] & VERBS}
    while True:
        known = {at.rpartition(":")[2] for at in found if "." not in at.rpartition(":")[2]}
        more = {
            place(module, holder, function)
            for module, holder, function, names, _, own in every
            if (names - borrowed()[module]) & known
            or (holder and any(f"{module}:{holder.name}.{name}" in found for name in own))
        }
        if more <= found:
            return {place(*one[:3]): one[:3] for one in every if place(*one[:3]) in found}
        found |= more


def is_communicator(holder):
    return holder is not None and {node.name for node in holder.body if isinstance(node, ast.FunctionDef)} >= VERBS


@pytest.fixture(scope="module")
def documented():
    """By its place, each public function that sends or receives."""
    return {at: one for at, one in sending().items() if one[2].name[0] != "_" and not is_communicator(one[1])}


def test_functions_that_send_are_found_however_far_the_message_is(documented):
    assert documented.keys() >= {
        "comm/collectives.py:all_reduce",
        "comm/agreement.py:agree",
        "parallel/gradients/exchange.py:GradientExchange.finish",
        "parallel/servers/parameter_server.py:ParameterServer.mean_gradient",
        "parallel/staleness/local_replica.py:LocalReplica.average",
        "parallel/zero/weights.py:GatheredWeights.fetch",
    }


def test_functions_of_other_packages_send_nothing_though_one_here_has_their_name(documented):
    assert "reduce" in borrowed()["comm/flow_table.py"]
    assert "comm/collectives.py:reduce" in documented
    assert "comm/flow_table.py:FlowTable.share_rows" not in documented


def test_functions_that_send_or_receive_state_cost_and_order(documented):
    silent = []
    for at, (_, holder, function) in documented.items():
        own = ast.get_docstring(function) or ""
        either = own + ((ast.get_docstring(holder) or "") if holder else "")
        silent += [(at, word) for word, text in (("Cost:", own), ("Order:", either)) if word not in text]
    assert [] == silent


def test_functions_that_send_or_receive_state_what_they_raise(documented):
    silent = []
    for at, (_, _, function) in documented.items():
        raised = {
            node.exc.func.id
            for node in ast.walk(function)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
        }
        said = (ast.get_docstring(function) or "").partition("Raises:")[2]
        silent += [(at, error) for error in sorted(raised) if error not in said]
    assert [] == silent


def test_the_protocol_of_communicators_states_cost_and_order():
    [protocol] = [
        holder for module, holder, _ in functions() if module == "comm/protocol.py" and is_communicator(holder)
    ][:1]
    assert {"Cost:", "Order:"} <= {line.split(" ")[0] for line in ast.get_docstring(protocol).splitlines()}
