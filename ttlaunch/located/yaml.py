"""YAML into a tree in which every key and value knows its line and column.

PyYAML's `compose` (libyaml where it is built in) gives the nodes and their marks. Plain scalars are read by the rules
of YAML 1.2, so `3e-4` is a number, and `no`, `on` and `1:30` are text. A key given twice, which YAML loaders let win
in silence, is an error here.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from ttlaunch.diagnostics import Diagnostic, Label, Source, Span, shown
from ttlaunch.located.codes import FileCodes

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+\Z|0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_SPECIAL = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "value", "merge")
}
_DEEPEST = 60
_MOST_DIGITS = 300


@dataclass(frozen=True)
class ScalarNode:
    """A single value. `quoted` tells `"2"` from `2`."""

    span: Span
    value: str | int | float | bool | None
    quoted: bool = False


@dataclass(frozen=True)
class ListNode:
    """A sequence. The span marks its first line."""

    span: Span
    items: tuple["Node", ...]


@dataclass(frozen=True)
class MapNode:
    """A mapping from text keys. `keys` has the span of each key."""

    span: Span
    entries: dict[str, "Node"]
    keys: dict[str, Span]


Node = ScalarNode | ListNode | MapNode


def parse_yaml(source: Source, *, codes: FileCodes) -> tuple[Node | None, list[Diagnostic]]:
    """Parse one document; None with a diagnostic if the text is not YAML, holds two documents, or no value at all."""
    try:
        loader = _Loader(source.text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        return None, [_syntax_error(error, source, codes)]
    except (yaml.YAMLError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else shown(error)
        return None, [Diagnostic(codes.syntax, f"{source.name} is not YAML: {reason}")]
    if root is None:
        return None, [Diagnostic(codes.empty_file, f"{source.name} holds only comments")]
    builder = _Builder(source, codes)
    return builder.build(root, depth=0), builder.diagnostics


def plain(node: Node) -> Any:
    """The values without their places."""
    match node:
        case ScalarNode():
            return node.value
        case ListNode():
            return [plain(item) for item in node.items]
        case MapNode():
            return {key: plain(value) for key, value in node.entries.items()}


def node_at(node: Node, path: Iterable[str | int]) -> Node | None:
    """The node at `path` (keys and list indices), or None if the file does not go that deep."""
    for step in path:
        if isinstance(node, MapNode) and step in node.entries:
            node = node.entries[str(step)]
        elif isinstance(node, ListNode) and isinstance(step, int) and 0 <= step < len(node.items):
            node = node.items[step]
        else:
            return None
    return node


def span_of(node: Node, path: tuple[str | int, ...]) -> Span:
    """The place of `path`, or of the deepest part of it that is in the file: a key for what it holds, else the value."""
    best: Span = node.span
    for depth in range(1, len(path) + 1):
        parent, found = node_at(node, path[: depth - 1]), node_at(node, path[:depth])
        if found is None:
            break
        best = found.span
        if depth < len(path) or isinstance(found, ScalarNode) or not isinstance(parent, MapNode):
            continue
        best = parent.keys[str(path[depth - 1])]
    return best


class _Builder:
    """Turns PyYAML's nodes into ours and collects what is wrong on the way."""

    def __init__(self, source: Source, codes: FileCodes) -> None:
        self.source = source
        self.codes = codes
        self.diagnostics: list[Diagnostic] = []
        self.aliases: dict[int, Node] = {}
        self.open: set[int] = set()

    def build(self, node: yaml.Node, *, depth: int) -> Node:
        known = self.aliases.get(id(node))
        if known is not None:
            return known
        span = self._span(node)
        if id(node) in self.open or depth > _DEEPEST:
            text = "an alias that contains itself" if id(node) in self.open else f"more than {_DEEPEST} levels deep"
            self._complain(span, text)
            return ScalarNode(span, None)
        if node.tag not in _PLAIN_TAGS:
            self._complain(span, f"a tag, `{shown(node.tag)}`", hint="write the plain value")
        self.open.add(id(node))
        built = self._build(node, span, depth)
        self.open.discard(id(node))
        self.aliases[id(node)] = built
        return built

    def _build(self, node: yaml.Node, span: Span, depth: int) -> Node:
        if isinstance(node, yaml.ScalarNode):
            quoted = node.style is not None
            return ScalarNode(span, node.value if quoted else _resolve(node.value), quoted)
        if isinstance(node, yaml.SequenceNode):
            return ListNode(span, tuple(self.build(item, depth=depth + 1) for item in node.value))
        entries: dict[str, Node] = {}
        keys: dict[str, Span] = {}
        for key_node, value_node in node.value:
            key_span = self._span(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._complain(key_span, "a key that is not a word")
                continue
            key = key_node.value
            if key in entries:
                message = f"key `{shown(key)}` is given twice"
                first = Label(keys[key], "first given here")
                self.diagnostics.append(
                    Diagnostic(self.codes.repeated_key, message, Label(key_span, "and again here"), (first,))
                )
                continue
            entries[key], keys[key] = self.build(value_node, depth=depth + 1), key_span
        return MapNode(span, entries, keys)

    def _span(self, node: yaml.Node) -> Span:
        start, end = node.start_mark, node.end_mark
        line = self.source.line(start.line + 1)
        one_line = start.line == end.line and end.column > start.column
        length = end.column - start.column if one_line else len(line.rstrip()) - start.column
        return Span(self.source, start.line + 1, start.column + 1, max(1, length))

    def _complain(self, span: Span, text: str, *, hint: str = "") -> None:
        message = f"{self.source.name} holds {text}"
        self.diagnostics.append(Diagnostic(self.codes.syntax, message, Label(span), hints=(hint,) if hint else ()))


def _resolve(text: str) -> str | int | float | bool | None:
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789" or len(text) > _MOST_DIGITS:
        return text
    if _INT.match(text):
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
    if _FLOAT.match(text):
        return float(text)
    return _SPECIAL.get(text.lower(), text)


def _syntax_error(error: yaml.MarkedYAMLError, source: Source, codes: FileCodes) -> Diagnostic:
    problem = shown(error.problem or "it does not parse").replace("'", "`")
    mark = error.problem_mark or error.context_mark
    labels: tuple[Label, ...] = ()
    if error.context and error.context_mark and mark and error.context_mark.line != mark.line:
        context = error.context_mark
        labels = (Label(Span(source, context.line + 1, context.column + 1), shown(error.context)),)
    tabs = ("indent with spaces; YAML does not allow tabs there",) if "\\t" in problem else ()
    primary = Label(Span(source, mark.line + 1, mark.column + 1), problem) if mark else None
    if primary and not source.line(primary.span.line) and primary.span.line > 1:
        last = max((n for n in range(1, primary.span.line) if source.line(n).strip()), default=1)
        primary = Label(Span(source, last, len(source.line(last).rstrip()) + 1), problem)
    return Diagnostic(codes.syntax, f"{source.name} is not YAML: {problem}", primary, labels, hints=tabs)
