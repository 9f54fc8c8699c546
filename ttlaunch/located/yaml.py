"""YAML into a tree in which every key and value knows its line and column.

PyYAML's `compose` (libyaml where it is built in) gives the nodes and their marks. Plain scalars are read by the rules
of YAML 1.2, so `3e-4` is a number, and `no`, `on` and `1:30` are text. What loaders let pass and users do not mean is
an error here: a key given twice, a merge key, a tag, aliases that unfold into millions of values.
"""

import math
import re
from bisect import bisect_right
from itertools import accumulate

import yaml

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.located.codes import FileCodes
from ttlaunch.located.nodes import Key, ListNode, MapNode, Node, ScalarNode, node_at, plain, span_of
from ttlaunch.located.yaml_errors import explain_syntax_error

__all__ = ["ListNode", "MapNode", "Node", "ScalarNode", "node_at", "parse_yaml", "plain", "span_of"]

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+\Z|0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_SPECIAL = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_TAG_PREFIX = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "value", "merge")
_PLAIN_TAGS = {_TAG_PREFIX + kind for kind in _KINDS}
_DEEPEST = 60
_MOST_VALUES = 1_000_000
_MOST_DIGITS = 300


def parse_yaml(source: Source, *, codes: FileCodes) -> tuple[Node | None, list[Diagnostic]]:
    """Parse one document.

    Returns:
        The tree, or None if the text is not YAML as we read it or holds no value; and the diagnostics. A tree can come
        with errors: of a key given twice, the first counts.
    """
    strange = _UNPRINTABLE.search(source.text)
    if strange:
        line = source.text.count("\n", 0, strange.start()) + 1
        span = source.span(line, strange.start() - source.text.rfind("\n", 0, strange.start()))
        message = f"{source.name} is not YAML: it holds the control character {shown(strange.group())}"
        return None, [Diagnostic(codes.syntax, message, Label(span, "remove it"))]
    try:
        too_deep = _first_too_deep(source)
        if too_deep:
            message = f"{source.name} is nested more than {_DEEPEST} levels deep"
            return None, [Diagnostic(codes.syntax, message, Label(too_deep))]
        root = _compose(source)
    except yaml.MarkedYAMLError as error:
        return None, [explain_syntax_error(error, source, codes)]
    except yaml.YAMLError as error:
        return None, [Diagnostic(codes.syntax, f"{source.name} is not YAML: {shown(error)}")]
    if root is None:
        return None, [Diagnostic(codes.empty_file, f"{source.name} holds nothing but comments")]
    builder = _Builder(source, codes)
    built = builder.build(root)
    return (None if builder.refused else built), builder.diagnostics


def _first_too_deep(source: Source) -> Span | None:
    """Where nesting goes too deep. Composing such a text overflows the C stack, so it must be found before."""
    depth = 0
    for event in yaml.parse(source.text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                return source.span(event.start_mark.line + 1, event.start_mark.column + 1)  # type: ignore[union-attr] # the stubs allow None; a parsed event has a mark
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return None


def _compose(source: Source) -> yaml.Node | None:
    loader = _Loader(source.text)
    try:
        root: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return root


class _Builder:
    """Turns PyYAML's nodes into ours and collects what is wrong on the way."""

    def __init__(self, source: Source, codes: FileCodes) -> None:
        self.source = source
        self.codes = codes
        self.diagnostics: list[Diagnostic] = []
        self.refused = False
        self.built: dict[int, Node] = {}
        self.extent: dict[int, tuple[int, int]] = {}  # values and levels, aliases unfolded
        self.open: set[int] = set()
        self.line_starts = [0, *accumulate(len(line) + 1 for line in source.lines)]

    def build(self, node: yaml.Node) -> Node:
        known = self.built.get(id(node))
        if known is not None:
            return known
        span = self._span(node)
        if id(node) in self.open:
            self._refuse(span, "holds an alias that contains itself")
            return ScalarNode(span, None)
        if node.tag not in _PLAIN_TAGS:
            tag = str(node.tag).replace(_TAG_PREFIX, "!!")
            self._refuse(
                span, f"holds a value with the tag `{shown(tag)}`", hint="write the plain value, without a tag"
            )
        self.open.add(id(node))
        built = self._build(node, span)
        self.open.discard(id(node))
        self._measure(node, span)
        self.built[id(node)] = built
        return built

    def _measure(self, node: yaml.Node, span: Span) -> None:
        """Refuse aliases that unfold into too much: a few lines of them can stand for billions of values."""
        inside: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else list(node.value)
        if isinstance(node, yaml.MappingNode):
            inside = [value for _, value in node.value]
        extents = [self.extent.get(id(value), (1, 1)) for value in inside]
        values, levels = 1 + sum(n for n, _ in extents), 1 + max((depth for _, depth in extents), default=0)
        if (values > _MOST_VALUES or levels > _DEEPEST + 1) and not self.refused:
            much = f"{_MOST_VALUES} values" if values > _MOST_VALUES else f"{_DEEPEST} levels"
            self._refuse(span, f"unfolds into more than {much}", hint="write the values without aliases")
        self.extent[id(node)] = (values, levels)

    def _build(self, node: yaml.Node, span: Span) -> Node:
        if isinstance(node, yaml.ScalarNode):
            quoted = bool(node.style)  # libyaml says "" for plain, the other parser None
            return ScalarNode(span, node.value if quoted else _resolve(node.value), quoted, node.value)
        if isinstance(node, yaml.SequenceNode):
            return ListNode(span, tuple(self.build(item) for item in node.value))
        entries: dict[Key, Node] = {}
        keys: dict[Key, Span] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, keys)
            if key is not None:
                entries[key], keys[key] = self.build(value_node), self._span(key_node)
        return MapNode(span, entries, keys)

    def _key(self, node: yaml.Node, taken: dict[Key, Span]) -> Key | None:
        """The key that `node` is, or None after a complaint."""
        span = self._span(node)
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(span, "holds a key that is a list or a group of keys", hint="a key is a word or a number")
            return None
        if node.value == "<<" and not node.style:
            self._refuse(span, "holds a merge key `<<`", hint="write the merged keys out")
            return None
        number = _resolve(node.value) if not node.style else None
        key = number if isinstance(number, int) and not isinstance(number, bool) else str(node.value)
        if key in taken:
            message = f"key `{shown(key)}` is given twice"
            first = Label(taken[key], "first given here")
            self.diagnostics.append(
                Diagnostic(self.codes.repeated_key, message, Label(span, "and again here"), (first,))
            )
            return None
        return key

    def _span(self, node: yaml.Node) -> Span:
        """From the offsets into the text: YAML counts more characters as line ends than editors do."""
        start, end = node.start_mark.index, node.end_mark.index
        number = bisect_right(self.line_starts, start)
        column = start - self.line_starts[number - 1] + 1
        rest = len(self.source.line(number).rstrip()) - column + 1
        return Span(self.source, number, column, max(1, min(end - start, rest)))

    def _refuse(self, span: Span, text: str, *, hint: str = "") -> None:
        self.refused = True
        message = f"{self.source.name} {text}"
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
