"""The tree that represents a file: values and keys that know their line and column.

`node_at` and `span_of` follow a path of keys and list indices, so that a rule which fails long after reading can still
point at the line it is about.
"""

from collections.abc import Iterable
from typing import Any

from ttlaunch.diagnostics.span import Span
from ttlaunch.quick_dataclass import dataclass

Key = str | int
"""A key as written: text, or a whole number as in `blocks_per_rank: {0: 2}`."""


@dataclass(frozen=True)
class ScalarNode:
    """A single value.

    Attributes:
        quoted: Whether the value is in quotes, as in `"2"`.
        text: The value as written, without quotes; None for a value that is in no file.
    """

    span: Span
    value: str | int | float | bool | None
    quoted: bool = False
    text: str | None = None

    @property
    def written(self) -> str:
        """Return the value as the user would write it: `true` and `3e-4`, not `True` and `0.0003`."""
        if self.text is not None:
            return self.text
        if self.value is None or isinstance(self.value, bool):
            return {None: "null", True: "true", False: "false"}[self.value]
        return str(self.value)


@dataclass(frozen=True)
class ListNode:
    """A sequence. The span marks its first line."""

    span: Span
    items: tuple["Node", ...]


@dataclass(frozen=True)
class MapNode:
    """A mapping. `keys` has the span of each key."""

    span: Span
    entries: dict[Key, "Node"]
    keys: dict[Key, Span]


Node = ScalarNode | ListNode | MapNode


def plain(node: Node) -> Any:
    """Return the values of a tree without their places."""
    match node:
        case ScalarNode():
            return node.value
        case ListNode():
            return [plain(item) for item in node.items]
        case MapNode():
            return {key: plain(value) for key, value in node.entries.items()}


def items_of(node: Node | None) -> tuple[Node, ...]:
    """Return the items of a list; none for anything else."""
    return node.items if isinstance(node, ListNode) else ()


def key_in(node: MapNode, step: Key) -> Key | None:
    """Return how the mapping spells the key `step`: a dotted path has `"0"` where the file may have the number 0."""
    if step in node.entries:
        return step
    if isinstance(step, str) and step.isascii() and step.isdigit() and int(step) in node.entries:
        return int(step)
    return None


def child(node: Node | None, step: Key) -> Node | None:
    """Return the value that `step`, a key or a list index, leads to; None if there is none."""
    if isinstance(node, MapNode):
        key = key_in(node, step)
        return None if key is None else node.entries[key]
    if isinstance(node, ListNode) and isinstance(step, int) and 0 <= step < len(node.items):
        return node.items[step]
    return None


def node_at(node: Node, path: Iterable[Key]) -> Node | None:
    """Return the node at `path` (keys and list indices), or None if the file does not go that deep."""
    found: Node | None = node
    for step in path:
        found = child(found, step)
    return found


def span_of(node: Node, path: tuple[Key, ...]) -> Span:
    """Return the place of `path`, or of its longest part that the file has; a list or group is marked at its key."""
    best: Span = node.span
    parent: Node = node
    for step in path:
        found = child(parent, step)
        if found is None:
            break
        key = key_in(parent, step) if isinstance(parent, MapNode) else None
        holds_more = isinstance(parent, MapNode) and not isinstance(found, ScalarNode)
        best = parent.keys[key] if holds_more and isinstance(parent, MapNode) and key is not None else found.span
        parent = found
    return best
