"""Give a tree of text format the shape of a schema: repeated fields become lists, and words such as `true` values.

Text format cannot tell a field that stands once from a list with one item, or the word `true` from a name; the
pydantic model of the file can. The result is the tree that `check_schema` reads, with the same places.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import listed, shown
from ttlaunch.spec.located.codes import FileCodes
from ttlaunch.spec.located.nodes import Key, ListNode, MapNode, Node, ScalarNode
from ttlaunch.spec.located.schema import Section
from ttlaunch.spec.topology.textproto import Field, Message

_OLD_NAMES = {"types": "dim_types"}
_WORDS = {"true": True, "True": True, "t": True, "1": True, "false": False, "False": False, "f": False, "0": False}


@dataclass(frozen=True)
class _Kind:
    """What the schema says about one field."""

    repeated: bool
    section: type[Section] | None
    words: tuple[str, ...] = ()
    is_text: bool = False
    is_flag: bool = False


def shape_message(message: Message, model: type[Section], *, codes: FileCodes) -> tuple[MapNode, list[Diagnostic]]:
    """Shape the tree by a model, and report what text format itself forbids: a field twice, a word in quotes."""
    shaper = _Shaper(codes)
    return shaper.map(message, model), shaper.found


class _Shaper:
    def __init__(self, codes: FileCodes) -> None:
        self.codes = codes
        self.found: list[Diagnostic] = []
        self.kinds: dict[type[Section], dict[str, _Kind]] = {}

    def map(self, message: Message, model: type[Section] | None) -> MapNode:
        kinds = self._kinds(model) if model else {}
        entries: dict[Key, Any] = {}
        keys: dict[Key, Span] = {}
        for field in message.fields:
            name = field.name
            if name not in kinds and _OLD_NAMES.get(name) in kinds:
                name = _OLD_NAMES[name]
            kind = kinds.get(name)
            repeated = kind.repeated if kind else field.in_list or field.value is None or name in entries
            if repeated:
                items = entries.setdefault(name, [])
                if not isinstance(items, list):
                    entries[name] = items = [items]
                keys.setdefault(name, field.span)
                if field.value is not None:
                    items.append(self.value(field, kind))
            elif name in entries and field.in_list and field.span == keys[name]:
                entries[name].append(self.value(field, kind))  # a further item of one list, where no list may stand
            elif name in entries:
                self._once(field, keys[name])
            elif field.in_list:
                entries[name], keys[name] = [] if field.value is None else [self.value(field, kind)], field.span
            else:
                entries[name], keys[name] = self.value(field, kind), field.span
        return MapNode(message.span, {name: _listed(value, keys[name]) for name, value in entries.items()}, keys)

    def value(self, field: Field, kind: _Kind | None) -> Node:
        value = field.value
        if isinstance(value, Message):
            return self.map(value, kind.section if kind else None)
        if not isinstance(value, ScalarNode):
            return ListNode(field.span, ())
        if kind is None:
            return value
        if kind.is_flag and not value.quoted:
            flag = _WORDS.get(value.written)
            return value if flag is None else ScalarNode(value.span, flag, quoted=False, text=value.text)
        if kind.is_text and not value.quoted and isinstance(value.value, str):
            message = f"`{field.name}` is `{shown(value.written)}` without quotes; text was expected"
            self._wrong(message, value, f'write "{shown(value.written)}"')
        if kind.words and value.quoted and value.value in kind.words:
            message = f'`{field.name}` is "{shown(value.written)}" in quotes; a word was expected'
            self._wrong(message, value, f"remove the quotes: {listed(kind.words)}")
        return value

    def _wrong(self, message: str, value: ScalarNode, label: str) -> None:
        self.found.append(Diagnostic(self.codes.wrong_value, message, Label(value.span, label)))

    def _once(self, field: Field, first: Span) -> None:
        message = f"field `{shown(field.name)}` is given twice"
        labels = (Label(first, "first given here"),)
        self.found.append(Diagnostic(self.codes.repeated_key, message, Label(field.span, "and again here"), labels))

    def _kinds(self, model: type[Section]) -> dict[str, _Kind]:
        if model not in self.kinds:
            self.kinds[model] = {name: _kind(field.annotation) for name, field in model.model_fields.items()}
        return self.kinds[model]


def _listed(value: Any, span: Span) -> Node:
    return ListNode(span, tuple(value)) if isinstance(value, list) else value


def _kind(annotation: Any) -> _Kind:
    parts = _parts(annotation)
    section = next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)
    words = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
    repeated = any(get_origin(part) is list for part in parts)
    return _Kind(repeated, section, words, is_text=str in parts, is_flag=bool in parts)


def _parts(annotation: Any) -> list[Any]:
    """Return the annotation and all that it is made of."""
    parts = [annotation]
    if get_origin(annotation) is not Literal:
        for argument in get_args(annotation):
            parts += _parts(argument)
    return parts
