"""Check the names of environment variables in topology files and `--env`, and expand `$VAR` in the values of files.

`$VAR` and `${VAR}` stand for the launching machine's value, and `$$` for a dollar sign. An undefined variable is an error, because a rank would
otherwise get a path that begins with a dollar sign. `env:NAME` stands for a secret value, which is not written anywhere; it
is an error too if the machine has no such variable.
"""

from collections.abc import Iterable, Mapping

from ttlaunch import contract
from ttlaunch.diagnostics.diagnostic import Diagnostic, Severity
from ttlaunch.diagnostics.launch_error import usage_mistake
from ttlaunch.diagnostics.suggest import closest, shown
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.spec.located.findings import Findings
from ttlaunch.spec.located.nodes import Key, MapNode, node_at
from ttlaunch.spec.topology import codes

_NAME = quick_pattern(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_REFERENCE = quick_pattern(r"\$(?:(?P<dollar>\$)|\{(?P<braced>[^{}]*)\}|(?P<plain>[A-Za-z_][A-Za-z0-9_]*))")
MANAGED = frozenset(
    {
        "TT_MESH_ID",
        "TT_MESH_HOST_RANK",
        "TT_MESH_GRAPH_DESC_PATH",
        "TT_RUN_ORIGINAL_CWD",
        "TT_RUN_RANK",
        "TT_RUN_SUBCONTEXT_ID",
        "TT_RUN_SUBCONTEXT_SIZES",
        "TT_METAL_MOCK_CLUSTER_DESC_PATH",
        "TT_METAL_FACTORY_SYSTEM_DESCRIPTOR_PATH",
        "TT_METAL_CLUSTER_ID",
        "TT_VISIBLE_DEVICES",
    }
)
"""Variables that only the plan may set; ranks do not get the values of the launching shell."""
KNOWN_VARIABLES = MANAGED | {
    "ARCH_NAME",
    "LD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "TT_METAL_CACHE",
    "TT_METAL_HOME",
    "TT_METAL_RUNTIME_ROOT",
    "VIRTUAL_ENV",
    "WH_ARCH_YAML",
}
"""Variables that the vendor's runtime and Python read; a name that is nearly one of these is probably misspelled."""


def expand_variables(
    written: Mapping[str, str], findings: Findings, *, path: tuple[Key, ...], environment: Mapping[str, str]
) -> dict[str, str]:
    """Expand the values of the group of variables at `path`; an undefined `$VAR` is reported and not expanded."""
    expanded: dict[str, str] = {}
    group = node_at(findings.root, path)
    for name, value in written.items():
        name_span = group.keys[name] if isinstance(group, MapNode) else findings.root.span
        span = findings.span((*path, name))
        if not _NAME.match(name):
            message = f"`{shown(name)}` cannot be the name of an environment variable"
            label = "expected letters, digits and `_`, not beginning with a digit"
            findings.add(codes.VARIABLE_NAME, message, name_span, label=label)
            continue
        if "\0" in value:
            message = f"`{shown(name)}` holds a zero byte, which no variable can"
            findings.add(codes.WRONG_VALUE, message, span)
            continue
        meant = misspelled(name)
        if meant:
            message, hint = f"nothing is known to read the variable `{shown(name)}`", f"did you mean `{meant}`?"
            findings.add(codes.KNOWN_VARIABLE, message, name_span, hint=hint, severity=Severity.WARNING)
        referred = contract.referred_variable(value)
        references = [(contract.REFERENCE, referred)] if referred is not None else []
        matches = [match for match in _REFERENCE.finditer(value) if not match["dollar"]]
        used = dict.fromkeys(match["braced"] or match["plain"] or "" for match in matches)
        for sign, variable in [*references, *(("$", variable) for variable in used)]:
            if variable not in environment:
                message = f"`{name}` uses `{sign}{shown(variable)}`, which is not defined on this machine"
                known = closest(variable, environment)
                export = f"`export {shown(variable)}=…` before starting, or write the value"
                export += "; `$$` stands for a dollar sign" if sign == "$" else ""
                hint = f"did you mean `{sign}{known}`?" if known else export
                findings.add(codes.UNDEFINED_VARIABLE, message, span, label="not defined", hint=hint)
        expanded[name] = _REFERENCE.sub(
            lambda match: match["dollar"] or environment.get(match["braced"] or match["plain"] or "", match.group()),
            value,
        )
    return expanded


def given_variables(texts: Iterable[str], *, environment: Mapping[str, str]) -> tuple[dict[str, str], list[Diagnostic]]:
    """Read the variables of `--env`; a value is taken as it stands, and no message shows one.

    Args:
        texts: `NAME=VALUE` each, or `NAME` for the launching machine's value; later ones take precedence.
        environment: The variables of the launching machine.
    """
    given: dict[str, str] = {}
    found: list[Diagnostic] = []
    for text in texts:
        name, equals, value = text.partition("=")
        referred = contract.referred_variable(value) if equals else name
        if not _NAME.match(name):
            message = f"`--env {shown(name) or '=…'}` does not name an environment variable"
            hint = "`--env NAME=VALUE`; a name has letters, digits and `_`, and does not begin with a digit"
            found.append(usage_mistake(message, hint, code=codes.VARIABLE_NAME))
        elif name.startswith(contract.PREFIX):
            message = f"`--env {shown(name)}` has no effect: ttlaunch itself sets the variables `{contract.PREFIX}…`"
            found.append(usage_mistake(message, "choose another name"))
        elif referred is not None and referred not in environment:
            hint = f"`export {referred}=…`" + ("" if equals else f", or `--env {name}=VALUE`")
            message = f"`--env {name}` takes the value of `{referred}`, which is not defined in this shell"
            found.append(usage_mistake(message, hint, code=codes.UNDEFINED_VARIABLE))
        else:
            given[name] = value if equals else environment[name]
            meant = misspelled(name)
            if meant:
                message = f"nothing is known to read the variable `{shown(name)}`"
                hints = (f"did you mean `{meant}`?",)
                found.append(Diagnostic(codes.KNOWN_VARIABLE, message, hints=hints, severity=Severity.WARNING))
    return given, found


def variables_named(texts: Iterable[str]) -> list[str]:
    """Return the names of the variables that `--env` sets, each once."""
    return list(dict.fromkeys(text.partition("=")[0] for text in texts))


def misspelled(name: str) -> str | None:
    """Return the known variable from which a name differs by one changed, missing, added or swapped letter."""
    if name in KNOWN_VARIABLES:
        return None
    return next((known for known in sorted(KNOWN_VARIABLES) if _one_slip(name.upper(), known)), None)


def _one_slip(name: str, known: str) -> bool:
    start = next(
        (index for index, (a, b) in enumerate(zip(name, known, strict=False)) if a != b), min(len(name), len(known))
    )
    a, b = name[start:], known[start:]
    return a[1:] == b[1:] or a == b[1:] or a[1:] == b or (a[:2] == b[:2][::-1] and a[2:] == b[2:])
