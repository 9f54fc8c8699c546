"""Environment variables in topology files: their names, and `$VAR` in their values.

`$VAR` and `${VAR}` stand for the launching machine's value. One that is not defined is an error: left as it stands it
would reach a rank as a path that begins with a dollar sign. So is `env:NAME`, which stands for a value that is not written
down, if the machine has no such variable.
"""

import re
from collections.abc import Mapping

from ttlaunch import contract
from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, Severity
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import closest, shown
from ttlaunch.spec.located.nodes import Key, MapNode, Node, node_at, span_of
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.known_variables import misspelled

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_REFERENCE = re.compile(r"\$(?:\{(?P<braced>[^{}]*)\}|(?P<plain>[A-Za-z_][A-Za-z0-9_]*))")


def expand_variables(
    written: Mapping[str, str], *, root: Node, path: tuple[Key, ...], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[Diagnostic]]:
    """Expand the values of the group of variables at `path`; an undefined `$VAR` is left as it stands, and reported."""
    found: list[Diagnostic] = []
    expanded: dict[str, str] = {}
    for name, value in written.items():
        if not _NAME.match(name):
            group = node_at(root, path)
            span = group.keys[name] if isinstance(group, MapNode) else root.span
            message = f"`{shown(name)}` cannot be the name of an environment variable"
            label = Label(span, "expected letters, digits and `_`, not beginning with a digit")
            found.append(Diagnostic(codes.VARIABLE_NAME, message, label))
            continue
        if "\0" in value:
            message = f"`{shown(name)}` holds a zero byte, which no variable can"
            found.append(Diagnostic(codes.WRONG_VALUE, message, Label(span_of(root, (*path, name)))))
            continue
        meant = misspelled(name)
        if meant:
            found.append(_unlike(name, meant, root, path))
        referred = contract.referred_variable(value)
        if referred is not None and referred not in environment:
            found.append(_undefined(name, referred, span_of(root, (*path, name)), environment, sign=contract.REFERENCE))
        used = dict.fromkeys(match["braced"] or match["plain"] or "" for match in _REFERENCE.finditer(value))
        span = span_of(root, (*path, name))
        found += [_undefined(name, variable, span, environment) for variable in used if variable not in environment]
        expanded[name] = _REFERENCE.sub(
            lambda match: environment.get(match["braced"] or match["plain"] or "", match.group()), value
        )
    return expanded, found


def _unlike(name: str, meant: str, root: Node, path: tuple[Key, ...]) -> Diagnostic:
    group = node_at(root, path)
    span = group.keys[name] if isinstance(group, MapNode) else root.span
    message = f"nothing is known to read the variable `{shown(name)}`"
    label, hints = Label(span), (f"did you mean `{meant}`?",)
    return Diagnostic(codes.KNOWN_VARIABLE, message, label, hints=hints, severity=Severity.WARNING)


def _undefined(name: str, variable: str, span: Span, environment: Mapping[str, str], *, sign: str = "$") -> Diagnostic:
    message = f"`{name}` uses `{sign}{shown(variable)}`, which is not defined on this machine"
    meant = closest(variable, environment)
    hint = (
        f"did you mean `{sign}{meant}`?"
        if meant
        else f"`export {shown(variable)}=…` before starting, or write the value"
    )
    return Diagnostic(codes.UNDEFINED_VARIABLE, message, Label(span, "not defined"), hints=(hint,))
