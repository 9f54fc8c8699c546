"""Recognise the kind of a single file by its content or, if that does not decide, by its name.

A hostfile has no keys and values. The other kinds are recognised by the keys at the left margin, so that a file with
mistakes, even one that is not valid YAML, is still recognised.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ttlaunch.diagnostics.span import Source

_KEY = re.compile(r"(?:\{\s*)?[\"']?([A-Za-z_][A-Za-z0-9_]*)[\"']?\s*:(?:\s|$)")
_TEXTPROTO = re.compile(r"(?:(?:mesh|graph|switch)_descriptors|top_level_instance|pinnings)\s*:?\s*[{<\[]")
_SLOTS = re.compile(r"\S+\s+(?:.*\s)?(?:slots|max[_-]slots)\s*=|rank\s+[0-9]+\s*=", re.IGNORECASE)
_HOST = re.compile(r"[\w.@\[\]:,-]*[\w\]](?:\s+[\w.-]+(?:\s*=\s*\S*)?)*\Z")


class Kind(StrEnum):
    """The kinds of files."""

    HOSTS = "hosts"
    MGD = "mgd"
    BINDINGS = "bindings"
    CLUSTER = "cluster"
    TRAIN = "train"

    @property
    def what(self) -> str:
        """Return what messages call such a file, with an article."""
        return _WHAT[self]


_WHAT = {
    Kind.HOSTS: "a hostfile",
    Kind.MGD: "a mesh graph descriptor",
    Kind.BINDINGS: "a rank bindings file",
    Kind.CLUSTER: "a cluster file",
    Kind.TRAIN: "a training file",
}
_KEYS = {
    Kind.MGD: re.compile(r"chip_?spec|boards?|mesh(es)?|(relaxed_?)?graph", re.IGNORECASE),
    Kind.BINDINGS: re.compile(r"rank_?bindings?|global_env|mesh_graph_desc_path|subcontext_id_to_\w+"),
    Kind.CLUSTER: re.compile(r"user|port|identity_file|remote_folder|python|mpi_prefix|network|environment"),
    Kind.TRAIN: re.compile(r"\w+_config"),
}
_NAMES = {
    Kind.HOSTS: re.compile(r"host|machine"),
    Kind.MGD: re.compile(r"mgd|mesh.?graph|\.textproto\Z"),
    Kind.BINDINGS: re.compile(r"bind"),
    Kind.CLUSTER: re.compile(r"cluster"),
    Kind.TRAIN: re.compile(r"train"),
}


@dataclass(frozen=True)
class Recognised:
    """The kind of a file.

    Attributes:
        kind: The most likely kind; None if neither the text nor the name shows it.
        others: Further kinds that are possible.
    """

    kind: Kind | None
    others: tuple[Kind, ...] = ()


def recognise(source: Source) -> Recognised:
    """Return the kind to which most keys or lines of a text belong; if several kinds are equally likely, the name decides."""
    scores = _scores(source)
    best = max(scores.values(), default=0)
    likely = [kind for kind in Kind if scores.get(kind) == best and best]
    name = source.name.rpartition("/")[2].lower()
    named = [kind for kind in Kind if _NAMES[kind].search(name)]
    if not likely:
        return Recognised(named[0] if named else None, tuple(named[1:]))
    kind = next((kind for kind in named if kind in likely), likely[0])
    return Recognised(kind, tuple(other for other in likely if other != kind))


def _scores(source: Source) -> dict[Kind, int]:
    """Count the keys, or for a hostfile the lines, that fit each kind."""
    lines = list(_lines(source))
    if any(_TEXTPROTO.match(line) for line in lines):
        return {Kind.MGD: 1}
    keys = [match[1] for line in lines if (match := _KEY.match(line))]
    scores = {kind: sum(1 for key in keys if pattern.fullmatch(key)) for kind, pattern in _KEYS.items()}
    hosts = sum(1 for line in lines if _SLOTS.match(line) and not _KEY.match(line))
    is_list_of_names = not keys and bool(lines) and all(_HOST.match(line) for line in lines)
    return scores | {Kind.HOSTS: hosts or int(is_list_of_names)}


def _lines(source: Source) -> Iterator[str]:
    """Yield the least indented lines of a file, stripped and without comments."""
    lines = [line.partition("#")[0].rstrip() for line in source.lines]
    lines = [line for line in lines if line.strip() and line.strip() not in {"---", "{", "}"}]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    yield from (line.strip() for line in lines if len(line) - len(line.lstrip()) == margin)
