"""Describe a wrong value of a file: what the file has, and what was expected instead."""

import re
from dataclasses import dataclass, replace
from typing import Any

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.suggest import closest, listed, shown
from ttlaunch.spec.located.nodes import Key, ListNode, MapNode, Node, ScalarNode, key_in, node_at, span_of

_NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?\Z")
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "`true` or `false`",
    "bool_parsing": "`true` or `false`",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "none_required": "nothing",
    "string_too_short": "text that is not empty",
}


@dataclass(frozen=True)
class Complaint:
    """What pydantic reports about one place of a file.

    Attributes:
        kind: Pydantic's name of the mistake.
        path: Keys and indices that lead to the value.
        context: Bounds and the like, by pydantic's names.
        text: Pydantic's message.
        at_key: Whether the last key of `path` is wrong, and not its value.
        union_at: The path of the value whose type is a union, if the complaint comes from a member of the union.
        member: This member of the union.
        also: What the other members of the union would have accepted.
    """

    kind: str
    path: tuple[Key, ...]
    text: str
    context: dict[str, Any]
    at_key: bool = False
    union_at: tuple[Key, ...] | None = None
    member: str = ""
    also: tuple[str, ...] = ()

    def joined_with(self, others: list["Complaint"]) -> "Complaint":
        return replace(self, also=tuple(other.expected for other in others))

    @property
    def expected(self) -> str:
        """Return what was expected at this place."""
        own = [self._expected(), *self.also]
        return listed(dict.fromkeys(own), quote="")

    def _expected(self) -> str:
        context = self.context
        match self.kind:
            case "greater_than":
                return f"a number above {_bound(context['gt'])}"
            case "greater_than_equal":
                return f"a number of at least {_bound(context['ge'])}"
            case "less_than":
                return f"a number below {_bound(context['lt'])}"
            case "less_than_equal":
                return f"a number of at most {_bound(context['le'])}"
            case "literal_error" | "enum":
                return listed(self.choices)
            case "too_short":
                return f"at least {_items(context['min_length'])}"
            case "too_long":
                return f"at most {_items(context['max_length'])}"
            case "value_error" | "assertion_error":
                return str(context["error"])
            case kind:
                return _EXPECTED.get(kind, self.text.lower())

    @property
    def choices(self) -> list[str]:
        """Return the words that are allowed; empty if the value is not one of a few words."""
        if self.kind not in {"literal_error", "enum"}:
            return []
        words = str(self.context["expected"]).replace(" or ", ", ").split(", ")
        return [word.strip("'") for word in words]


def describe_wrong_value(complaint: Complaint, root: Node, *, code: str) -> Diagnostic:
    """Return the diagnostic for a value, or a key, that is of the wrong kind or out of bounds."""
    found, expected = node_at(root, complaint.path), complaint.expected
    name = _name(complaint.path, root)
    span = span_of(root, complaint.path)
    verb = "were" if expected.endswith(("values", "items")) else "was"
    if complaint.at_key:
        parent, key = node_at(root, complaint.path[:-1]), complaint.path[-1]
        written = key_in(parent, key) if isinstance(parent, MapNode) else None
        if isinstance(parent, MapNode) and written is not None:
            span = parent.keys[written]
        group = _name(complaint.path[:-1], root)
        message = f"key `{shown(key)}` in {group}: {expected} {verb} expected as a key"
    elif isinstance(found, ScalarNode):
        message = f"{name} {_shown_value(found)}; {expected} {verb} expected"
    else:
        message = f"{name} {_shape(found)}; {expected} {verb} expected"
    return Diagnostic(code, message, Label(span, f"expected {expected}"), hints=_hints(complaint, found))


def _name(path: tuple[Key, ...], root: Node) -> str:
    """Return what a message calls the value at `path`."""
    if not path:
        return "the file"
    key = next((str(step) for step in reversed(path) if isinstance(step, str)), "the file")
    if isinstance(path[-1], int):
        parent = node_at(root, path[:-1])
        item = f"item {path[-1] + 1}" if isinstance(parent, ListNode) else f"`{path[-1]}`"
        return f"{item} of `{shown(key)}`"
    return f"`{shown(key)}`"


def _shown_value(node: ScalarNode) -> str:
    if node.value is None:
        return "has no value"
    quote = '"' if node.quoted else "`"
    return f"is {quote}{shown(node.written)}{quote}"


def _shape(node: Node | None) -> str:
    if isinstance(node, ListNode):
        return f"is a list of {_items(len(node.items))}" if node.items else "is an empty list"
    return "is a group of keys"


def _hints(complaint: Complaint, found: Node | None) -> tuple[str, ...]:
    if isinstance(found, MapNode) and complaint.expected.startswith("text"):
        return _quoted_hints(found)
    if not isinstance(found, ScalarNode) or found.value is None or complaint.at_key:
        return ()
    meant = closest(found.written, complaint.choices)
    if meant:
        return (f"did you mean `{meant}`?",)
    if found.quoted and "number" in complaint.expected and _NUMBER.match(found.written):
        return ("remove the quotes",)
    if complaint.expected == "text" and not found.quoted:
        return (f'put it in quotes: "{shown(found.written)}"',)
    return ()


def _quoted_hints(found: MapNode) -> tuple[str, ...]:
    """Return the hint for text with a colon in it, such as `BOT:`, which YAML takes for a key."""
    if len(found.entries) != 1:
        return ()
    ((key, value),) = found.entries.items()
    if not isinstance(value, ScalarNode):
        return ()
    text = shown(f"{key}:" if value.value is None else f"{key}: {value.written}")
    source = found.span.source
    if source.name.startswith("--"):  # an option, whose shell takes away one pair of quotes
        given = source.text.partition("=")[0]
        return (f"quote it for YAML and for the shell: `{source.name} '{given}=\"{text}\"'`",)
    return (f'put it in quotes: "{text}"',)


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


def _bound(value: float) -> str:
    """Return a bound with grouped digits: 1,000,000 and not 1e+06."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
