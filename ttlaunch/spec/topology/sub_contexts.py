"""Read the bindings of sub-contexts: groups of ranks in one run, each with its own meshes.

Either the rows of one file name their sub-context, or a mapping names a bindings file for each sub-context. In the second
case, the ranks of a file are numbered after those of the files before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.diagnostic import Diagnostic, mistake_at
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.no_cycles import collection_paused
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.findings import first_gap
from ttlaunch.spec.located.nodes import MapNode, Node, node_at
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.located.yaml import parse_yaml
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.model import Rank
from ttlaunch.spec.topology.places import DESCRIPTORS, MOCK_CLUSTERS, SUB_CONTEXT_FILES, NamedFile
from ttlaunch.spec.topology.rank_bindings import Bindings, BoundRank, named_files, parse_bindings
from ttlaunch.spec.topology.schema import DescriptorMappingFile, MockMappingFile, SubContextFilesFile


@dataclass(frozen=True)
class SubContextFiles:
    """The bindings files that a mapping names, by sub-context.

    Attributes:
        files: The file of each sub-context.
        span: The place of the key that has the mapping.
    """

    files: Mapping[int, NamedFile]
    span: Span


@collection_paused()
def parse_any_bindings(
    source: Source, *, environment: Mapping[str, str]
) -> tuple[Bindings | SubContextFiles | None, list[Diagnostic]]:
    """Read the text of a bindings file or of a mapping; parts that cannot be read are left out."""
    root, found = parse_yaml(source, codes=TOPOLOGY)
    if root is None:
        return None, found
    if isinstance(root, MapNode) and SUB_CONTEXT_FILES in root.keys:
        # A mapping has this one key, so a hint that another key was meant to be it would be wrong.
        found += [replace(mistake, hints=()) for mistake in check_schema(SubContextFilesFile, root, codes=TOPOLOGY)[1]]
        found += _check_numbers(root, SUB_CONTEXT_FILES)
        return SubContextFiles(named_files(root, SUB_CONTEXT_FILES), root.keys[SUB_CONTEXT_FILES]), found
    bindings, mistakes = parse_bindings(root, environment=environment)
    return bindings, [*found, *mistakes, *_check_numbers(root, DESCRIPTORS)]


def parse_mapping(source: Source) -> tuple[dict[int, NamedFile], list[Diagnostic]]:
    """Read the text of a mapping that names descriptors of sub-contexts, or mock clusters of ranks; return the named files."""
    root, found = parse_yaml(source, codes=TOPOLOGY)
    if not isinstance(root, MapNode):
        return {}, found
    if MOCK_CLUSTERS in root.keys:
        return named_files(root, MOCK_CLUSTERS), found + check_schema(MockMappingFile, root, codes=TOPOLOGY)[1]
    found += check_schema(DescriptorMappingFile, root, codes=TOPOLOGY)[1]
    return named_files(root, DESCRIPTORS), [*found, *_check_numbers(root, DESCRIPTORS)]


def check_rows(bindings: Bindings) -> Iterator[Diagnostic]:
    """Check that the rows of a file belong to sub-contexts numbered from 0, or that no row belongs to one."""
    first: dict[int, BoundRank] = {}
    for row in bindings.rows:
        if row.binding.subcontext_id is not None:
            first.setdefault(row.binding.subcontext_id, row)
    for row in bindings.rows:
        if row.binding.subcontext_id is None and (first or row.size):
            yield _no_sub_context(row, next(iter(first.values()), None))
            return
    if not bindings.complete:
        return
    gap = first_gap(first)
    if gap:
        missing, above = gap
        message = f"sub-contexts have a gap: there is a sub-context {above} but no sub-context {missing}"
        yield mistake_at(codes.SUB_CONTEXT_IDS, message, first[above].subcontext_span, label=f"expected {missing}")
        return
    yield from _check_descriptors(bindings, first)
    yield from check_sizes(bindings.rows)


def check_sizes(rows: Sequence[BoundRank]) -> Iterator[Diagnostic]:
    """Check that each sub-context has as many ranks as its `subcontext_size`; report the first row that differs."""
    ranks: dict[int | None, list[BoundRank]] = {}
    for row in rows:
        ranks.setdefault(row.binding.subcontext_id, []).append(row)
    for number, members in ranks.items():
        wrong = next((row.size for row in members if row.size and row.size[0] != len(members)), None)
        if wrong and number is not None:
            belong = f"{counted(len(members), 'rank')} belong{'s' if len(members) == 1 else ''} to it"
            message = f"`subcontext_size` of sub-context {number} is {wrong[0]}, but {belong}"
            yield mistake_at(codes.SUB_CONTEXT_SIZE, message, wrong[1], label=f"expected {len(members)}")


def enter_sub_context(bindings: Bindings, number: int, *, ranks_before: int) -> tuple[Bindings, list[Diagnostic]]:
    """Return the bindings of a file that a mapping names, as ranks of the whole run."""
    found: list[Diagnostic] = []
    rows = []
    for row in bindings.rows:
        binding, own = row.binding, row.binding.subcontext_id
        if own is not None and own != number:
            message = f"rank {binding.rank} in the file of sub-context {number} belongs to sub-context {own}"
            expected = f"expected {number}, or nothing"
            found.append(mistake_at(codes.OTHER_SUB_CONTEXT, message, row.subcontext_span, label=expected))
        # Each file counts its ranks from 0; in the run they follow those of the files before it.
        binding = replace(binding, rank=Rank(binding.rank + ranks_before), subcontext_id=number)
        rows.append(replace(row, binding=binding))
    return replace(bindings, rows=rows), found


def nested_mapping(inner: SubContextFiles, named: NamedFile, number: int) -> Diagnostic:
    """Report that the file of a sub-context is itself a mapping."""
    message = f"the file of sub-context {number} is itself a mapping of sub-contexts"
    label, other = "expected `rank_bindings`", (named.span, f"named here for sub-context {number}")
    hint = "name its files in the outer mapping"
    return mistake_at(codes.OTHER_SUB_CONTEXT, message, inner.span, label=label, other=other, hint=hint)


def merge_bindings(files: Mapping[int, Bindings], mapping: SubContextFiles) -> tuple[Bindings, list[Diagnostic]]:
    """Join the ranks of all files, and the variables that any file sets for every rank."""
    found: list[Diagnostic] = []
    values: dict[str, str] = {}
    spans: dict[str, tuple[int, Span]] = {}
    for number, file in files.items():
        for name, value in file.global_environment.items():
            span = file.variable_spans[name]
            first, first_span = spans.setdefault(name, (number, span))
            if values.setdefault(name, value) != value:
                message = f"sub-contexts {first} and {number} set `{shown(name)}` of every rank to different values"
                label, other = f"sub-context {number}", (first_span, f"sub-context {first}")
                hint = "set it in `env_overrides` of the ranks that differ"
                found.append(
                    mistake_at(codes.SUB_CONTEXT_VARIABLES, message, span, label=label, other=other, hint=hint)
                )
    rows = [row for file in files.values() for row in file.rows]
    found += check_sizes(rows)
    complete = bool(files) and len(files) == len(mapping.files) and all(file.complete for file in files.values())
    return Bindings(rows, complete, mapping.span, None, global_environment=values), found


def _check_numbers(root: Node, key: str) -> Iterator[Diagnostic]:
    """Check that the keys under `key` are 0, 1, … in order."""
    group = node_at(root, (key,))
    keys = group.keys if isinstance(group, MapNode) else {}
    if not all(isinstance(number, int) and number >= 0 for number in keys):
        return
    for expected, (number, span) in enumerate(keys.items()):
        if number != expected:
            message = f"sub-context {number} stands where sub-context {expected} was expected"
            hint = "sub-contexts count from 0, in order"
            yield mistake_at(codes.SUB_CONTEXT_IDS, message, span, label=f"expected {expected}", hint=hint)
            return


def _no_sub_context(row: BoundRank, other: BoundRank | None) -> Diagnostic:
    rank, second = row.binding.rank, None
    message = f"rank {rank} has a `subcontext_size` but no `subcontext_id`"
    if other is not None:
        message = f"rank {rank} belongs to no sub-context, but rank {other.binding.rank} does"
        second = (other.subcontext_span, f"sub-context {other.binding.subcontext_id}")
    label = "has no `subcontext_id`"
    return mistake_at(codes.NO_SUB_CONTEXT, message, row.subcontext_span, label=label, other=second)


def _check_descriptors(bindings: Bindings, first: Mapping[int, BoundRank]) -> Iterator[Diagnostic]:
    for number, named in bindings.descriptors.items():
        if number not in first:
            message = f"sub-context {number} has a descriptor but no rank"
            yield mistake_at(codes.SUB_CONTEXT_IDS, message, named.span, label="drives nothing")
    for number, row in first.items() if bindings.descriptors and bindings.descriptor is None else ():
        if row.descriptor is None:
            message = f"sub-context {number} has no descriptor"
            label = f"not in `{next(iter(bindings.descriptors.values())).key}`"
            yield mistake_at(codes.SUB_CONTEXT_IDS, message, row.subcontext_span, label=label)
