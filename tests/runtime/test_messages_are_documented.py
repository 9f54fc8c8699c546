"""Every public function that sends or receives states what it costs and in which order things happen."""

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "ttlaunch" / "runtime"
VERBS = {"send", "recv", "isend", "irecv", "wait_any"}
"""What a communicator does; its kinds are documented once, at the protocol."""


def functions():
    """`(module, class or None, function)` for each function of the folders in which messages are sent."""
    for path in sorted([*RUNTIME.glob("comm/*.py"), *RUNTIME.glob("parallel/**/*.py")]):
        module = path.relative_to(RUNTIME).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                yield module, None, node
            elif isinstance(node, ast.ClassDef):
                yield from ((module, node, method) for method in node.body if isinstance(method, ast.FunctionDef))


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
            if names & known or (holder and any(f"{module}:{holder.name}.{name}" in found for name in own))
        }
        if more <= found:
            return {place(*one[:3]): one[:3] for one in every if place(*one[:3]) in found}
        found |= more


def is_communicator(holder):
    return holder is not None and {node.name for node in holder.body if isinstance(node, ast.FunctionDef)} >= VERBS


SENDING = {at: found for at, found in sending().items() if found[2].name[0] != "_" and not is_communicator(found[1])}


@pytest.mark.parametrize(
    "at",
    [
        "comm/collectives.py:all_reduce",
        "comm/agreement.py:agree",
        "parallel/gradients/exchange.py:GradientExchange.finish",
        "parallel/servers/parameter_server.py:ParameterServer.mean_gradient",
        "parallel/staleness/local_replica.py:LocalReplica.average",
        "parallel/zero/weights.py:GatheredWeights.fetch",
    ],
)
def test_functions_that_send_are_found_however_far_the_message_is(at):
    assert at in SENDING


@pytest.mark.parametrize("at", SENDING)
def test_a_function_that_sends_or_receives_states_cost_and_order(at):
    _, holder, function = SENDING[at]
    own = ast.get_docstring(function) or ""
    either = own + ((ast.get_docstring(holder) or "") if holder else "")
    assert ["Cost:", "Order:"] == [word for word, text in (("Cost:", own), ("Order:", either)) if word in text]


@pytest.mark.parametrize("at", SENDING)
def test_a_function_that_sends_or_receives_states_what_it_raises(at):
    _, _, function = SENDING[at]
    raised = {
        node.exc.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    said = (ast.get_docstring(function) or "").partition("Raises:")[2]
    assert [name for name in sorted(raised) if name not in said] == []


def test_the_protocol_of_communicators_states_cost_and_order():
    [protocol] = [
        holder for module, holder, _ in functions() if module == "comm/protocol.py" and is_communicator(holder)
    ][:1]
    assert {"Cost:", "Order:"} <= {line.split(" ")[0] for line in ast.get_docstring(protocol).splitlines()}
