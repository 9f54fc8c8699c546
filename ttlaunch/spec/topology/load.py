"""Read the files that describe a cluster and prove that they fit together: all mistakes at once, or a `Topology`.

Environment and working folder are arguments, and nothing is started. A configuration with only a hostfile, such as
`local`, is read without PyYAML and pydantic, because their import would take longer than everything else.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.diagnostic import Blame, Diagnostic, KeyMistake, fold_repeats, has_errors
from ttlaunch.diagnostics.span import Source
from ttlaunch.diagnostics.suggest import did_you_mean
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.source import read_source
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.model import ClusterSettings, Host, Topology
from ttlaunch.spec.topology.parts import Part, add_part, join_parts
from ttlaunch.spec.topology.places import (
    BINDINGS_FILE,
    DESCRIPTOR_FILES,
    DESCRIPTORS,
    HOSTS_FILE,
    SUB_CONTEXT_FILES,
    NamedFile,
    absolute,
    display_name,
    find_file,
)
from ttlaunch.spec.topology.recognise import Kind, OtherKind, explain_other_kinds, kind_of_content

if TYPE_CHECKING:
    from ttlaunch.spec.topology.mesh_graph import MeshGraph
    from ttlaunch.spec.topology.rank_bindings import Bindings, BoundRank
    from ttlaunch.spec.topology.sub_contexts import SubContextFiles

CLUSTER_FILE = "cluster.yaml"

_TEXTPROTO = quick_pattern(
    r"^[ \t]*(?:(?:mesh|graph|switch)_descriptors|top_level_instance|pinnings)[ \t]*(?::[ \t]*)?[{<]", re.MULTILINE
)


@dataclass(frozen=True)
class Loaded:
    """The result of reading the files of a cluster.

    Attributes:
        topology: The cluster; None if and only if a diagnostic is an error.
        files: The files that were read, in order.
        descriptor_found: Where the mesh graph descriptor was found, as text; None without one.
    """

    topology: Topology | None
    diagnostics: list[Diagnostic]
    files: list[Path]
    descriptor_found: str | None = None


def load_topology(folder: Path, *, name: str, environment: Mapping[str, str], working_folder: Path) -> Loaded:
    """Read the configuration in `folder`: `hosts.txt`, and if they exist `rank_bindings.yaml` with its descriptor, and `cluster.yaml`.

    Args:
        folder: The configuration, seen from the working folder.
        name: The name of the configuration.
        environment: The values for `$VAR` in values of variables.
        working_folder: The user's current folder, absolute; messages show relative paths for files inside it.
    """
    reading = _Reading(environment, working_folder)
    full_path = absolute(folder, working_folder=working_folder)
    if not os.path.isdir(full_path):  # noqa: PTH112 - never raises, whatever the path
        problem = "is not a folder" if os.path.lexists(full_path) else "does not exist"
        message = f"{reading.name(folder)} {problem}; a configuration folder was expected"
        return Loaded(None, [Diagnostic(codes.MISSING_FILE, message)], [])
    if not os.path.lexists(full_path / HOSTS_FILE):
        reading.add([no_hosts(full_path, reading.name(full_path / HOSTS_FILE))])
    else:
        reading.read_hosts(full_path / HOSTS_FILE)
    descriptors = [file for file in DESCRIPTOR_FILES if os.path.lexists(full_path / file)]
    if os.path.lexists(full_path / BINDINGS_FILE):
        reading.read_bindings(full_path / BINDINGS_FILE)
        if any(other.expected is Kind.BINDINGS for other in reading.others):
            for file in descriptors[:1]:  # the two may have been swapped
                reading.read_descriptor(full_path / file)
    else:
        name_of_bindings = reading.name(full_path / BINDINGS_FILE)
        reading.add(no_bindings(full_path, name_of_bindings, descriptor=file) for file in descriptors[:1])
        for file in descriptors[:1]:
            reading.read_descriptor(full_path / file)
    reading.read_cluster(full_path / CLUSTER_FILE)
    return reading.finish(name, full_path)


def load_topology_files(
    hostfile: Path | None,
    rank_bindings: Path | None,
    *,
    hosts: Source | None = None,
    environment: Mapping[str, str],
    working_folder: Path,
) -> Loaded:
    """Read files that are named one by one, and the `cluster.yaml` beside the hostfile.

    Without a hostfile, `hosts` is used as its text. Without either, all ranks of the bindings run on this machine.
    """
    reading = _Reading(environment, working_folder)
    full_path = None if hostfile is None else absolute(hostfile, working_folder=working_folder)
    if full_path is not None:
        reading.read_hosts(full_path, typed=hostfile)
    if rank_bindings is not None:
        reading.read_bindings(absolute(rank_bindings, working_folder=working_folder), typed=rank_bindings)
    if full_path is None:
        rows = reading.bindings.rows if reading.bindings else []
        reading.take_hosts(hosts or Source("this machine", f"localhost slots={max(1, len(rows))}"))
        return reading.finish(rank_bindings.stem if rank_bindings else "hosts", None)
    reading.read_cluster(full_path.parent / CLUSTER_FILE)
    return reading.finish(full_path.parent.name or full_path.stem, None)


def load_bindings(source: Source, path: Path, *, environment: Mapping[str, str], working_folder: Path) -> Loaded:
    """Read bindings from a text, and the descriptor that they name; hosts are not needed."""
    reading = _Reading(environment, working_folder, texts={path: source})
    reading.read_bindings(path)
    return reading.finish(path.stem, None)


def load_mapping(source: Source, path: Path, *, working_folder: Path) -> tuple[str, list[Diagnostic]]:
    """Read a mapping of files and the descriptors that it names; return the counted parts and the diagnostics."""
    from ttlaunch.spec.topology.sub_contexts import parse_mapping  # noqa: PLC0415 - imports pydantic

    reading = _Reading({}, working_folder)
    named, found = parse_mapping(source)
    reading.add(found)
    paths = {number: reading.find(path, file) for number, file in named.items()}
    for number, file in named.items():
        place = paths[number]
        if file.key == DESCRIPTORS and place is not None:
            reading.read_descriptor(place, file)
    reading.add(explain_other_kinds(reading.others))
    noun = "mock cluster" if any(file.key != DESCRIPTORS for file in named.values()) else "descriptor"
    return counted(len(named), noun), reading.found


def is_textproto(source: Source) -> bool:
    """Return whether a descriptor is one of version 2: its name ends in `.textproto`, or its text has such a field."""
    return source.name.endswith(".textproto") or bool(_TEXTPROTO.search(source.text))


def parse_descriptor(source: Source) -> "tuple[MeshGraph | None, list[Diagnostic]]":
    """Read a mesh graph descriptor of either version."""
    if is_textproto(source):
        from ttlaunch.spec.topology.mgd_textproto import parse_mesh_graph_textproto  # noqa: PLC0415 - imports pydantic

        read, found = parse_mesh_graph_textproto(source)
        return (read.graph if read else None), found
    from ttlaunch.spec.topology.mgd_yaml import parse_mesh_graph  # noqa: PLC0415 - imports pydantic

    return parse_mesh_graph(source)


@dataclass
class _Reading:
    """The files read so far, their content, and the diagnostics about them."""

    environment: Mapping[str, str]
    working_folder: Path
    texts: Mapping[Path, Source] = field(default_factory=dict)
    found: list[Diagnostic] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    hosts_are_valid: bool = False
    bindings: "Bindings | None" = None
    graphs: dict[Path, "MeshGraph | None"] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    descriptor_found: str | None = None
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    others: list[OtherKind] = field(default_factory=list)

    def name(self, path: Path) -> str:
        return display_name(path, working_folder=self.working_folder)

    def add(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.found += diagnostics

    def read(self, path: Path, what: str, typed: Path | None = None) -> Source | None:
        if path in self.texts:
            return self.texts[path]
        blame = Blame.COMMAND_LINE if typed is not None else Blame.DESCRIPTION
        source, found = read_source(path, codes=TOPOLOGY, what=what, name=self.name(typed or path), blame=blame)
        self.found += found
        self.files += [path] if source else []
        return source

    def read_hosts(self, path: Path, typed: Path | None = None) -> None:
        source = self.read(path, "a hostfile", typed)
        if source and not self.is_other_kind(source, Kind.HOSTS):
            self.take_hosts(source)

    def take_hosts(self, source: Source) -> None:
        self.hosts, found = parse_hosts(source)
        self.hosts_are_valid = not has_errors(found)
        self.found += found

    def read_bindings(self, path: Path, typed: Path | None = None) -> None:
        source = self.read(path, "a rank bindings file", typed)
        if source is None or self.is_other_kind(source, Kind.BINDINGS):
            return
        from ttlaunch.spec.topology import sub_contexts  # noqa: PLC0415 - imports pydantic

        content = self._parse_bindings(source, path)
        if isinstance(content, sub_contexts.SubContextFiles):
            self._read_sub_contexts(path, content)
        elif content is not None:
            self.add(sub_contexts.check_rows(content))
            self.bindings = content
            self._read_descriptors(path, content)

    def _parse_bindings(self, source: Source, path: Path) -> "Bindings | SubContextFiles | None":
        from ttlaunch.spec.topology.sub_contexts import parse_any_bindings  # noqa: PLC0415 - as above

        content, found = parse_any_bindings(source, environment=self.environment)
        self.add(with_descriptor_hint(diagnostic, path.parent) for diagnostic in found)
        return content

    def _read_sub_contexts(self, path: Path, mapping: "SubContextFiles") -> None:
        from ttlaunch.spec.topology import sub_contexts  # noqa: PLC0415 - as above

        files: dict[int, Bindings] = {}
        for number, named in mapping.files.items():
            file = self.find(path, named)
            source = self.read(file, "a rank bindings file") if file else None
            is_read = source is not None and not self.is_other_kind(source, Kind.BINDINGS, named)
            content = self._parse_bindings(source, file) if source and file and is_read else None
            if isinstance(content, sub_contexts.SubContextFiles):
                self.add([sub_contexts.nested_mapping(content, named, number)])
            elif content is not None and file is not None:
                before = sum(len(earlier.rows) for earlier in files.values())
                files[number], found = sub_contexts.enter_sub_context(content, number, ranks_before=before)
                self.add(found)
                self._read_descriptors(file, files[number])
        self.bindings, found = sub_contexts.merge_bindings(files, mapping)
        self.add(found)

    def find(self, bindings: Path, named: NamedFile) -> Path | None:
        found = find_file(named, bindings=bindings, working_folder=self.working_folder)
        if isinstance(found, Diagnostic):
            # Several sub-contexts may name the same missing file.
            self.add([found] if found not in self.found else [])
            return None
        if named.key != SUB_CONTEXT_FILES:
            self.descriptor_found = self.descriptor_found or found[1]
        return found[0]

    def _read_descriptors(self, file: Path, bindings: "Bindings") -> None:
        """Sort the ranks by sub-context and descriptor, and read each descriptor once."""
        by_part: dict[tuple[int | None, str], tuple[NamedFile, list[BoundRank]]] = {}
        for row in bindings.rows:
            named = row.descriptor or bindings.descriptor
            if named is not None:
                by_part.setdefault((row.binding.subcontext_id, named.written), (named, []))[1].append(row)
        # A descriptor that no rank drives is read too, so that its mistakes are found and its meshes reported as idle.
        if bindings.descriptor and all(named != bindings.descriptor for named, _ in by_part.values()):
            if by_part:
                self.find(file, bindings.descriptor)
            else:
                by_part[None, ""] = (bindings.descriptor, [])
        for named, rows in by_part.values():
            path = self.find(file, named)
            if path is not None:
                graph = self.read_descriptor(path, named)
                add_part(self.parts, Part(replace(bindings, rows=rows), graph, path))

    def read_descriptor(self, path: Path, named: NamedFile | None = None) -> "MeshGraph | None":
        if path not in self.graphs:
            source = self.read(path, "a mesh graph descriptor")
            is_read = source is not None and not self.is_other_kind(source, Kind.MGD, named)
            self.graphs[path], found = parse_descriptor(source) if source and is_read else (None, [])
            self.found += found
        return self.graphs[path]

    def is_other_kind(self, source: Source, expected: Kind, named: NamedFile | None = None) -> bool:
        """Return whether the content of a file is clearly that of another kind; that is then the only mistake to report."""
        kind = kind_of_content(source)
        if kind is None or kind is expected:
            return False
        self.others.append(OtherKind(source, expected, kind, named))
        return True

    def read_cluster(self, path: Path) -> None:
        if not os.path.lexists(path):
            return
        source = self.read(path, "a cluster file")
        if source is None or self.is_other_kind(source, Kind.CLUSTER):
            return
        from ttlaunch.spec.topology.cluster import parse_cluster  # noqa: PLC0415 - imports pydantic

        self.cluster, found = parse_cluster(source, environment=self.environment)
        self.found += found

    def finish(self, name: str, folder: Path | None) -> Loaded:
        """Check the files against each other."""
        self.add(explain_other_kinds(self.others))
        if self.bindings is not None:
            from ttlaunch.spec.topology.checks import check_hosts, check_meshes, check_slots  # noqa: PLC0415 - as above

            # Slots of a hostfile with mistakes are not checked: these rules would report consequences of the same mistakes.
            hosts = self.hosts if self.hosts_are_valid else []
            about_slots = list(check_slots(self.bindings, hosts))
            self.add(about_slots)
            graphs = {row.binding.rank: part.graph for part in self.parts for row in part.bindings.rows if part.graph}
            placed = sum(len(part.bindings.rows) for part in self.parts)
            # "No rank drives this mesh" is true only if every rank is known together with its descriptor.
            complete = self.bindings.complete and placed == len(self.bindings.rows)
            for part in self.parts:
                bindings = replace(part.bindings, complete=complete)
                self.add(check_meshes(bindings, part.graph) if part.graph else [])
            is_valid = not has_errors(self.found) and not about_slots
            self.add(check_hosts(self.bindings, hosts, graphs, is_valid=is_valid))
        topology = None if has_errors(self.found) else self._topology(name, folder)
        return Loaded(topology, fold_repeats(self.found), self.files, self.descriptor_found)

    def _topology(self, name: str, folder: Path | None) -> Topology:
        shared = self.bindings.global_environment if self.bindings else {}
        hosts = tuple(self.hosts)
        return join_parts(self.parts, Topology(name, folder, hosts, global_environment=shared, cluster=self.cluster))


def no_hosts(folder: Path, name: str) -> Diagnostic:
    present = _names_in(folder)
    message = f"{name} does not exist; a hostfile was expected"
    hints = did_you_mean(HOSTS_FILE, present) or ("list the hosts in it, one a line: `HOST slots=1`",)
    return Diagnostic(codes.MISSING_FILE, message, hints=hints)


def no_bindings(folder: Path, name: str, *, descriptor: str) -> Diagnostic:
    present = [file for file in _names_in(folder) if file not in DESCRIPTOR_FILES]
    message = f"{name} does not exist, so {descriptor} has meshes that no rank drives"
    hints = did_you_mean(BINDINGS_FILE, present) or ("list in it which rank drives which mesh",)
    return Diagnostic(codes.MISSING_FILE, message, hints=hints)


def with_descriptor_hint(diagnostic: Diagnostic, folder: Path) -> Diagnostic:
    """Add to "`mesh_graph_desc_path` is missing" which descriptor the folder has, or that it has none."""
    if diagnostic.key_mistake is not KeyMistake.MISSING or not diagnostic.message.startswith("`mesh_graph_desc_path`"):
        return diagnostic
    beside = next((file for file in DESCRIPTOR_FILES if (folder / file).is_file()), None)
    if beside:
        return replace(diagnostic, hints=(f'write `mesh_graph_desc_path: "{beside}"`',))
    hint = 'describe the meshes in mgd.yaml, and write `mesh_graph_desc_path: "mgd.yaml"`'
    return replace(diagnostic, notes=("there is no mgd.yaml beside it",), hints=(hint,))


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except OSError:
        return []
