"""Read YAML into a tree in which every key and value knows its line and column.

PyYAML's events (from libyaml where it is built in) become nodes in one pass. Plain scalars are read by the rules
of YAML 1.2, so `3e-4` is a number, and `no`, `on` and `1:30` are text. What other loaders
accept and users rarely mean is an error here: a key given twice, a merge key, a tag, aliases that stand for millions of
values.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import yaml

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import FileCodes
from ttlaunch.spec.located.nodes import Key, ListNode, MapNode, Node, ScalarNode, node_at, plain, span_of
from ttlaunch.spec.located.yaml_errors import explain_syntax_error

__all__ = ["ListNode", "MapNode", "Node", "ScalarNode", "node_at", "parse_yaml", "plain", "span_of"]

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+\Z|0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_ODD_LINE_END = re.compile("[\r\x85\u2028\u2029]")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_SPECIAL = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
# The stubs give an event the marks of two parsers, which have no common type.
_Event = Any
_TAG_PREFIX = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "value", "merge")
_PLAIN_TAGS = {_TAG_PREFIX + kind for kind in _KINDS}
_DEEPEST = 60
_MOST_VALUES = 500_000
_MOST_DIGITS = 300


def parse_yaml(source: Source, *, codes: FileCodes) -> tuple[Node | None, list[Diagnostic]]:
    """Parse one document.

    Returns:
        The tree, or None if the text is not YAML, uses something that is refused here, or holds no value; and the
        diagnostics. There can be a tree and errors: if a key is given twice, the tree has the first value.
    """
    strange = _UNPRINTABLE.search(source.text)
    if strange:
        line = source.text.count("\n", 0, strange.start()) + 1
        span = source.span(line, strange.start() - source.text.rfind("\n", 0, strange.start()))
        message = f"{source.name} is not YAML: it holds the control character {shown(strange.group())}"
        return None, [Diagnostic(codes.syntax, message, Label(span, "remove it"))]
    builder = _Builder(source, codes)
    try:
        root = builder.build()
    except _TooLargeError as error:
        return None, [Diagnostic(codes.syntax, f"{source.name} {error}", Label(error.span))]
    except yaml.MarkedYAMLError as error:
        return None, [explain_syntax_error(error, source, codes)]
    except yaml.YAMLError as error:
        return None, [Diagnostic(codes.syntax, f"{source.name} is not YAML: {shown(error)}")]
    if root is None:
        return None, [Diagnostic(codes.empty_file, f"{source.name} holds nothing but comments")]
    return (None if builder.refused else root), builder.diagnostics


class _TooLargeError(Exception):
    def __init__(self, text: str, span: Span) -> None:
        super().__init__(text)
        self.span = span


class _Open:
    """A list or a group of keys that is not closed yet; `values` and `levels` include those that its aliases stand for."""

    __slots__ = ("entries", "event", "is_map", "items", "key", "key_span", "keys", "levels", "values", "wants_key")

    def __init__(self, event: _Event, *, is_map: bool) -> None:
        self.event = event
        self.is_map = self.wants_key = is_map
        self.items: list[Node] = []
        self.entries: dict[Key, Node] = {}
        self.keys: dict[Key, Span] = {}
        self.key: Key | None = None
        self.key_span: Span | None = None
        self.values, self.levels = 1, 1


class _Builder:
    """Turns the parser's events into a tree, and collects the mistakes."""

    def __init__(self, source: Source, codes: FileCodes) -> None:
        self.source = source
        self.codes = codes
        self.diagnostics: list[Diagnostic] = []
        self.refused = False
        self.root: Node | None = None
        self.written = 0
        self.stack: list[_Open] = []
        self.anchors: dict[str, tuple[Any, tuple[Node, int, int] | None]] = {}
        self.endless: set[str] = set()
        self.line_starts: list[int] | None = None
        if _ODD_LINE_END.search(source.text):
            self.line_starts = [0, *accumulate(len(line) + 1 for line in source.lines)]

    def build(self) -> Node | None:
        """Build the one document of the text; None if there is none."""
        handlers: dict[type, Callable[[_Event], None]] = {
            yaml.ScalarEvent: self.scalar,
            yaml.MappingStartEvent: self.open_map,
            yaml.SequenceStartEvent: self.open_list,
            yaml.MappingEndEvent: self.close,
            yaml.SequenceEndEvent: self.close,
            yaml.AliasEvent: self.alias,
            yaml.DocumentStartEvent: self.document,
        }
        for event in yaml.parse(self.source.text, Loader=_Loader):
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)
        return self.root

    def document(self, event: _Event) -> None:
        if self.root is not None:
            raise yaml.composer.ComposerError(None, None, "but found another document", event.start_mark)

    def scalar(self, event: _Event) -> None:
        text, quoted = event.value, bool(event.style)  # a plain scalar's style is "" in libyaml, None in the other
        span = self._span(event.start_mark, event.end_mark)
        if event.tag is not None:
            self._check_tag(event.tag, span)
        value = text if quoted else _resolve(text)
        # A key needs no node of its own, only its place.
        if self.stack and self.stack[-1].wants_key and event.anchor is None:
            self._key(value, text, span, quoted=quoted)
            return
        node = ScalarNode(span, value, quoted, text)
        if event.anchor is not None:
            self._anchor(event)
            self.anchors[event.anchor] = (event.start_mark, (node, 1, 1))
        self._place((node, 1, 1), span)

    def open_map(self, event: _Event) -> None:
        self._open(event, is_map=True)

    def open_list(self, event: _Event) -> None:
        self._open(event, is_map=False)

    def _open(self, event: _Event, *, is_map: bool) -> None:
        if len(self.stack) >= _DEEPEST:
            raise _TooLargeError(
                f"is nested more than {_DEEPEST} levels deep", self._span(event.start_mark, event.start_mark)
            )
        if event.anchor is not None:
            self._anchor(event)
        self.stack.append(_Open(event, is_map=is_map))

    def close(self, end: _Event) -> None:
        done = self.stack.pop()
        event = done.event
        span = self._span(event.start_mark, end.end_mark, of_group=True)
        if event.tag is not None:
            self._check_tag(event.tag, span)
        node: Node = MapNode(span, done.entries, done.keys) if done.is_map else ListNode(span, tuple(done.items))
        if done.levels > _DEEPEST + 1 and not self.refused:
            self._refuse(span, f"unfolds into more than {_DEEPEST} levels", hint="write the values without aliases")
        if event.anchor in self.endless:
            self._refuse(span, "holds an alias that contains itself")
        if event.anchor is not None:
            self.anchors[event.anchor] = (event.start_mark, (node, done.values, done.levels))
        self._place((node, done.values, done.levels), span)

    def alias(self, event: _Event) -> None:
        known = self.anchors.get(event.anchor)
        if known is None:
            raise yaml.composer.ComposerError(None, None, "found undefined alias", event.start_mark)
        if known[1] is None:
            # The value is still open, so it contains itself. Its end reports that, with the place of the whole value.
            self.endless.add(event.anchor)
            span = self._span(event.start_mark, event.end_mark)
            self._place((ScalarNode(span, None), 1, 1), span)
        else:
            self._place(known[1], self._span(event.start_mark, event.end_mark))

    def _anchor(self, event: _Event) -> None:
        """Note an anchor whose value is not complete yet."""
        if event.anchor in self.anchors:
            first = self.anchors[event.anchor][0]
            context, problem = "found duplicate anchor; first occurrence", "second occurrence"
            raise yaml.composer.ComposerError(context, first, problem, event.start_mark)
        self.anchors[event.anchor] = (event.start_mark, None)

    def _place(self, complete: tuple[Node, int, int], span: Span) -> None:
        """Put a complete value, with its number of values and levels, where it belongs."""
        node, values, levels = complete
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if parent.wants_key:
            if isinstance(node, ScalarNode):
                self._key(node.value, str(node.text or ""), span, quoted=node.quoted)
            else:
                self._refuse(span, "holds a key that is a list or a group of keys", hint="a key is a word or a number")
                parent.key, parent.wants_key = None, False
            return
        parent.values += values
        self.written += 1
        if max(parent.values, self.written) > _MOST_VALUES:  # at once: the rest of the file would only take memory
            raise _TooLargeError(f"holds more than {_MOST_VALUES} values, counting each use of an alias", span)
        if levels >= parent.levels:
            parent.levels = levels + 1
        if not parent.is_map:
            parent.items.append(node)
            return
        parent.wants_key = True
        if parent.key is not None and parent.key_span is not None:
            parent.entries[parent.key] = node
            parent.keys[parent.key] = parent.key_span

    def _key(self, value: Key | float | None, text: str, span: Span, *, quoted: bool) -> None:
        """Take the next key of the innermost group, or complain and drop its value."""
        parent = self.stack[-1]
        parent.wants_key, parent.key = False, None
        if text == "<<" and not quoted:
            self._refuse(span, "holds a merge key `<<`", hint="write the merged keys out")
            return
        key = value if type(value) is int and not quoted else text
        if key in parent.keys:
            message = f"key `{shown(key)}` is given twice"
            first = Label(parent.keys[key], "first given here")
            label = Label(span, "and again here")
            self.diagnostics.append(Diagnostic(self.codes.repeated_key, message, label, (first,)))
            return
        parent.key, parent.key_span = key, span

    def _span(self, start: Any, end: Any, *, of_group: bool = False) -> Span:
        """Make a span from two marks, by their offsets where YAML sees more line ends than editors do."""
        if self.line_starts is None:
            number, column = start.line + 1, start.column + 1
            if end.line == start.line and not of_group:
                return Span(self.source, number, column, max(1, end.column - start.column))
        else:
            number = bisect_right(self.line_starts, start.index)
            column = start.index - self.line_starts[number - 1] + 1
        rest = len(self.source.line(number).rstrip()) - column + 1
        return Span(self.source, number, column, max(1, min(end.index - start.index, rest)))

    def _check_tag(self, tag: str, span: Span) -> None:
        if tag != "!" and tag not in _PLAIN_TAGS:
            written = tag.replace(_TAG_PREFIX, "!!")
            hint = "write the plain value, without a tag"
            self._refuse(span, f"holds a value with the tag `{shown(written)}`", hint=hint)

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
