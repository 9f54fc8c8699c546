"""The common parts of the three notations for links: ends, rules, and how links of devices are joined.

Links are undirected. Links of devices that join the same two meshes become one link whose channels add up.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ttlaunch.diagnostics.diagnostic import Diagnostic, mistake_at
from ttlaunch.diagnostics.span import Span
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.model import Link, Mesh, MeshId, Switch


@dataclass(frozen=True)
class End:
    """One end of a link: a mesh or a switch, and the device if the descriptor names one."""

    kind: str
    number: int
    device: int | None
    span: Span

    @property
    def key(self) -> tuple[str, int, int]:
        return self.kind, self.number, -1 if self.device is None else self.device

    def __str__(self) -> str:
        name = f"{self.kind} {self.number}"
        return name if self.device is None else f"device {self.device} of {name}"


@dataclass(frozen=True)
class Edge:
    """A link as written."""

    ends: tuple[End, End]
    channels: int
    span: Span
    policy: str
    uses_z: bool = False

    @property
    def low(self) -> End:
        return min(self.ends, key=lambda end: end.key)

    @property
    def high(self) -> End:
        return max(self.ends, key=lambda end: end.key)

    @property
    def key(self) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
        """Return what identifies the link, whichever end is written first."""
        return self.low.key, self.high.key


def missing_end(kind: str, number: int, span: Span) -> Diagnostic:
    """Report a link to a mesh or switch that does not exist."""
    message = f"a link names {kind} {number}, which does not exist"
    return mistake_at(codes.LINK_TO_NOWHERE, message, span, label=f"no {kind} has id {number}")


def check_device(end: End, there: Mesh | Switch, *, letter: str = "", span: Span | None = None) -> Diagnostic | None:
    """Report a device that the mesh or switch does not have; `letter` is the letter before its number in the file."""
    count = there.device_shape[0] * there.device_shape[1]
    if end.device is None or end.device < count:
        return None
    message = f"a link names {end}, which has {count} devices"
    expected = f"expected {letter}0 to {letter}{count - 1}"
    return mistake_at(codes.DEVICE_NUMBER, message, span or end.span, label=expected)


def link_to_itself(end: End) -> Diagnostic:
    """Report a link whose other end is the same mesh or switch."""
    message = f"a link connects {end.kind} {end.number} to itself"
    return mistake_at(codes.LINK_TO_ITSELF, message, end.span, label=f"expected another {end.kind}")


def join_edges(edges: Iterable[Edge]) -> list[Link]:
    """Make one link of all edges between the same two meshes; it names devices only if all of them do."""
    joined: dict[tuple[int, int], list[Edge]] = {}
    for edge in edges:
        joined.setdefault((edge.low.number, edge.high.number), []).append(edge)
    return [_link(MeshId(low), MeshId(high), group) for (low, high), group in joined.items()]


def _link(low: MeshId, high: MeshId, edges: list[Edge]) -> Link:
    channels: dict[tuple[int, int], int] = {}
    for edge in edges:
        if edge.low.device is not None and edge.high.device is not None:
            pair = (edge.low.device, edge.high.device)
            channels[pair] = channels.get(pair, 0) + edge.channels
    has_devices = all(edge.low.device is not None and edge.high.device is not None for edge in edges)
    return Link(
        low,
        high,
        sum(edge.channels for edge in edges),
        edges[0].span,
        devices=tuple(sorted((*pair, count) for pair, count in channels.items())) if has_devices else (),
        policy=edges[0].policy,
        uses_z=any(edge.uses_z for edge in edges),
    )
