"""Recognise the kind of a single file by its content or, if that does not decide, by its name.

A hostfile has no keys and values. The other kinds are recognised by the keys at the left margin, so that a file with
mistakes, even one that is not valid YAML, is still recognised.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

from ttlaunch.diagnostics.diagnostic import Diagnostic, mistake_at
from ttlaunch.diagnostics.span import Source
from ttlaunch.diagnostics.suggest import listed, shown
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.places import DESCRIPTORS, MOCK_CLUSTERS, NamedFile

_KEY = quick_pattern(r"(?:\{\s*)?[\"']?([A-Za-z_][A-Za-z0-9_]*)[\"']?\s*:(?:\s|$)")
_TEXTPROTO = quick_pattern(r"(?:(?:mesh|graph|switch)_descriptors|top_level_instance|pinnings)\s*+:?+\s*+[{<\[]")
# The time that these take must grow with the length of a line, not with its square: anybody may have written the file.
_SLOTS = quick_pattern(r"\S++(?=\s).*?\s(?:slots|max[_-]slots)\s*+=|rank\s++[0-9]++\s*+=", re.IGNORECASE)
_HOST = quick_pattern(r"[\w.@\[\]:,-]*[\w\]](?:\s++[\w.-]++(?:\s*+=\s*+\S*+)?+)*+\Z")


class Kind(StrEnum):
    """The kinds of files."""

    HOSTS = "hosts"
    MGD = "mgd"
    BINDINGS = "bindings"
    CLUSTER = "cluster"
    TRAIN = "train"
    MAPPING = "mapping"

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
    Kind.MAPPING: "a mapping of files",
}
_KEYS = {
    Kind.MGD: quick_pattern(r"chip_?spec|boards?|mesh(es)?|(relaxed_?)?graph", re.IGNORECASE),
    Kind.BINDINGS: quick_pattern(r"rank_?bindings?|global_env|mesh_graph_desc_path|subcontext_id_to_rank_bindings"),
    Kind.CLUSTER: quick_pattern(r"user|port|identity_file|remote_folder|python|mpi_prefix|network|environment"),
    Kind.TRAIN: quick_pattern(r"\w+_config"),
    Kind.MAPPING: quick_pattern(f"{DESCRIPTORS}|{MOCK_CLUSTERS}"),
}
_NAMES = {
    Kind.HOSTS: quick_pattern(r"host|machine"),
    Kind.MGD: quick_pattern(r"mgd|mesh.?graph|\.textproto\Z"),
    Kind.BINDINGS: quick_pattern(r"bind"),
    Kind.CLUSTER: quick_pattern(r"cluster"),
    Kind.TRAIN: quick_pattern(r"train"),
    Kind.MAPPING: quick_pattern(r"mapping"),
}

_HINTS = {
    (
        Kind.BINDINGS,
        Kind.MAPPING,
    ): "a run needs bindings: write `rank_bindings:` with the ranks, beside the descriptors of their "
    "sub-contexts; `TT_METAL_MOCK_CLUSTER_DESC_PATH` of a rank goes into its `env_overrides`",
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


@dataclass(frozen=True)
class OtherKind:
    """A file whose content is that of another kind than the one that its name or its path stands for.

    Attributes:
        named: Where other files name it; None if it has a name of its own, or was typed.
    """

    source: Source
    expected: Kind
    found: Kind
    named: NamedFile | None = None


def explain_other_kinds(others: Sequence[OtherKind]) -> Iterator[Diagnostic]:
    """Report files of another kind; one diagnostic for all if each is what another one should be."""
    if len(others) > 1 and Counter(one.expected for one in others) == Counter(one.found for one in others):
        names = listed([one.source.name for one in others], last="and", quote="")
        contents = listed([f"{one.source.name} is {one.found.what}" for one in others], last="and", quote="")
        message = f"{names} are swapped: {contents}"
        place = others[0].source.start()
        hint = "exchange their names, or the paths that lead to them"
        yield mistake_at(codes.OTHER_KIND, message, place, label=f"expected {others[0].expected.what}", hint=hint)
        return
    for one in others:
        is_, expected = f"which is {one.found.what}", f"{one.expected.what} was expected"
        hint = _HINTS.get((one.expected, one.found), "")
        if one.named:
            message = f"`{one.named.key}` names `{shown(one.named.written, longest=200)}`, {is_}; {expected}"
            yield mistake_at(codes.OTHER_KIND, message, one.named.span, label=one.found.what, hint=hint)
        else:
            message = f"{one.source.name} is {one.found.what}; {expected}"
            label = f"expected {one.expected.what}"
            yield mistake_at(codes.OTHER_KIND, message, one.source.start(), label=label, hint=hint)


def kind_of_content(source: Source) -> Kind | None:
    """Return the kind to which most keys or lines of a text belong; None if that is not clear."""
    scores = _scores(source)
    best = max(scores.values(), default=0)
    likely = [kind for kind, score in scores.items() if score == best and best]
    if likely == [Kind.HOSTS]:
        lines = list(_lines(source))
        # Words without `slots=` may be names of hosts, and any other text: only a column of them is clear.
        is_column = len(lines) > 1 and all(len(line.split()) == 1 for line in lines)
        return Kind.HOSTS if is_column or any(_SLOTS.match(line) for line in lines) else None
    return likely[0] if len(likely) == 1 else None


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
    if scores[Kind.BINDINGS]:
        scores[Kind.MAPPING] = 0  # bindings may name the descriptor of each sub-context too
    hosts = sum(1 for line in lines if _SLOTS.match(line) and not _KEY.match(line))
    is_list_of_names = not keys and bool(lines) and all(_HOST.match(line) for line in lines)
    return scores | {Kind.HOSTS: hosts or int(is_list_of_names)}


def _lines(source: Source) -> Iterator[str]:
    """Yield the least indented lines of a file, stripped and without comments."""
    lines = [line.partition("#")[0].rstrip() for line in source.lines]
    lines = [line for line in lines if line.strip() and line.strip() not in {"---", "{", "}"}]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    yield from (line.strip() for line in lines if len(line) - len(line.lstrip()) == margin)
