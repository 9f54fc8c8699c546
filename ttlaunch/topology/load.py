"""Read the files that describe a cluster and prove that they fit together: all mistakes at once, or a `Topology`.

Pure: environment and working folder are handed in, nothing is started. A configuration that is nothing but a hostfile,
such as `local`, is read without PyYAML and pydantic, whose import would take longer than everything else.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, has_errors
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import did_you_mean, listed, shown
from ttlaunch.located.codes import TOPOLOGY
from ttlaunch.located.source import read_source
from ttlaunch.topology import codes
from ttlaunch.topology.hosts import parse_hosts
from ttlaunch.topology.model import ClusterSettings, Host, Topology
from ttlaunch.topology.places import absolute, descriptor_places, display_name

if TYPE_CHECKING:
    from ttlaunch.topology.mesh_graph import MeshGraph
    from ttlaunch.topology.rank_bindings import Bindings

HOSTS_FILE = "hosts.txt"
BINDINGS_FILE = "rank_bindings.yaml"
CLUSTER_FILE = "cluster.yaml"
DESCRIPTOR_FILES = ("mgd.yaml", "mgd.textproto")

_LONGEST_PATH = 200
_TEXTPROTO = re.compile(
    r"^[ \t]*(?:(?:mesh|graph|switch)_descriptors|top_level_instance|pinnings)[ \t]*(?::[ \t]*)?[{<]", re.MULTILINE
)


@dataclass(frozen=True)
class Loaded:
    """What the files of a cluster say.

    Attributes:
        topology: None if and only if a diagnostic is an error.
        files: Those that were read, in order.
        descriptor_found: Where the mesh graph descriptor was found, in words; None without one.
    """

    topology: Topology | None
    diagnostics: list[Diagnostic]
    files: list[Path]
    descriptor_found: str | None = None


def load_topology(folder: Path, *, name: str, environment: Mapping[str, str], working_folder: Path) -> Loaded:
    """Read the configuration in `folder`: `hosts.txt`, and if there `rank_bindings.yaml` with its descriptor, `cluster.yaml`.

    Args:
        folder: The configuration, seen from the working folder.
        name: What to call it.
        environment: What `$VAR` stands for in the values of variables.
        working_folder: The user's current folder, absolute; files inside it are called by their relative paths.
    """
    reading = _Reading(environment, working_folder)
    whole = absolute(folder, working_folder=working_folder)
    if not os.path.isdir(whole):  # noqa: PTH112 - never raises, whatever the path
        problem = "is not a folder" if os.path.lexists(whole) else "does not exist"
        message = f"{reading.name(folder)} {problem}; a configuration folder was expected"
        return Loaded(None, [Diagnostic(codes.MISSING_FILE, message)], [])
    if not os.path.lexists(whole / HOSTS_FILE):
        reading.add([_no_hosts(reading, whole)])
    else:
        reading.read_hosts(whole / HOSTS_FILE)
    if os.path.lexists(whole / BINDINGS_FILE):
        reading.read_bindings(whole / BINDINGS_FILE)
    else:
        descriptors = [file for file in DESCRIPTOR_FILES if os.path.lexists(whole / file)]
        reading.add(_no_bindings(reading, whole, file) for file in descriptors[:1])
        for file in descriptors[:1]:
            reading.read_descriptor(whole / file)
    reading.read_cluster(whole / CLUSTER_FILE)
    return reading.finish(name, whole)


def load_topology_files(
    hostfile: Path | None,
    rank_bindings: Path | None,
    *,
    hosts: Source | None = None,
    environment: Mapping[str, str],
    working_folder: Path,
) -> Loaded:
    """The same for files named one by one. A `cluster.yaml` beside the hostfile counts: it says how to reach its hosts.

    Without a hostfile `hosts` is the text of one. Without either, all ranks of the bindings run on this machine.
    """
    reading = _Reading(environment, working_folder)
    whole = None if hostfile is None else absolute(hostfile, working_folder=working_folder)
    if whole is not None:
        reading.read_hosts(whole, typed=hostfile)
    if rank_bindings is not None:
        reading.read_bindings(absolute(rank_bindings, working_folder=working_folder), typed=rank_bindings)
    if whole is None:
        rows = reading.bindings.rows if reading.bindings else []
        reading.take_hosts(hosts or Source("this machine", f"localhost slots={max(1, len(rows))}"))
        return reading.finish(rank_bindings.stem if rank_bindings else "hosts", None)
    reading.read_cluster(whole.parent / CLUSTER_FILE)
    return reading.finish(whole.parent.name or whole.stem, None)


def load_bindings(source: Source, path: Path, *, environment: Mapping[str, str], working_folder: Path) -> Loaded:
    """The same for bindings alone, whose text is at hand, with the descriptor that they name; hosts are not asked for."""
    reading = _Reading(environment, working_folder, texts={path: source})
    reading.read_bindings(path)
    return reading.finish(path.stem, None)


def is_textproto(source: Source) -> bool:
    """Whether a descriptor is one of version 2: by its name, or by how one begins."""
    return source.name.endswith(".textproto") or bool(_TEXTPROTO.search(source.text))


@dataclass
class _Reading:
    """The files read so far and what was found in them."""

    environment: Mapping[str, str]
    working_folder: Path
    texts: Mapping[Path, Source] = field(default_factory=dict)
    found: list[Diagnostic] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    hosts_are_sound: bool = False
    bindings: "Bindings | None" = None
    graph: "MeshGraph | None" = None
    descriptor: Path | None = None
    descriptor_found: str | None = None
    cluster: ClusterSettings = field(default_factory=ClusterSettings)

    def name(self, path: Path) -> str:
        return display_name(path, working_folder=self.working_folder)

    def add(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.found += diagnostics

    def read(self, path: Path, what: str, typed: Path | None = None) -> Source | None:
        if path in self.texts:
            return self.texts[path]
        source, found = read_source(path, codes=TOPOLOGY, what=what, name=self.name(typed or path))
        self.found += found
        self.files += [path] if source else []
        return source

    def read_hosts(self, path: Path, typed: Path | None = None) -> None:
        source = self.read(path, "a hostfile", typed)
        if source:
            self.take_hosts(source)

    def take_hosts(self, source: Source) -> None:
        self.hosts, found = parse_hosts(source)
        self.hosts_are_sound = not has_errors(found)
        self.found += found

    def read_bindings(self, path: Path, typed: Path | None = None) -> None:
        source = self.read(path, "a rank bindings file", typed)
        if source is None:
            return
        from ttlaunch.topology.rank_bindings import parse_bindings  # noqa: PLC0415 - imports pydantic

        self.bindings, found = parse_bindings(source, environment=self.environment)
        self.found += [_with_descriptor_hint(diagnostic, path.parent) for diagnostic in found]
        if self.bindings is not None and self.bindings.descriptor is not None:
            written, span = self.bindings.descriptor
            self._find_descriptor(path, written, span)

    def _find_descriptor(self, bindings: Path, written: str, span: Span) -> None:
        places = descriptor_places(bindings, working_folder=self.working_folder)
        if Path(written).is_absolute():
            places = places[:1]
        for place in places:
            path = absolute(Path(written), working_folder=place.folder)
            if os.path.isfile(path):  # noqa: PTH113 - never raises, whatever the path
                self.descriptor = path
                self.descriptor_found = "an absolute path" if Path(written).is_absolute() else place.why
                self.read_descriptor(path)
                return
        self.found.append(
            self._no_descriptor(bindings, written, span, [self._folder_name(place.folder) for place in places])
        )

    def _folder_name(self, folder: Path) -> str:
        return "the current folder" if folder == self.working_folder else self.name(folder)

    def _no_descriptor(self, bindings: Path, written: str, span: Span, looked: list[str]) -> Diagnostic:
        message = f"`mesh_graph_desc_path` names `{shown(written, longest=_LONGEST_PATH)}`, which does not exist"
        absolute_path = Path(written).is_absolute()
        notes = () if absolute_path else (f"looked in {listed(looked, last='and', quote='')}",)
        beside = [file for file in (Path(written).name, *DESCRIPTOR_FILES) if os.path.isfile(bindings.parent / file)]  # noqa: PTH113 - as above
        hints = tuple(f"did you mean `{file}`, which lies beside {bindings.name}?" for file in beside[:1])
        return Diagnostic(codes.MISSING_FILE, message, Label(span, "no such file"), notes=notes, hints=hints)

    def read_descriptor(self, path: Path) -> None:
        source = self.read(path, "a mesh graph descriptor")
        if source is None:
            return
        if is_textproto(source):
            from ttlaunch.topology.mgd_textproto import parse_mesh_graph_textproto  # noqa: PLC0415 - imports pydantic

            read, found = parse_mesh_graph_textproto(source)
            self.graph = read.graph if read else None
            self.found += found
            return
        from ttlaunch.topology.mgd_yaml import parse_mesh_graph  # noqa: PLC0415 - imports pydantic

        self.graph, found = parse_mesh_graph(source)
        self.found += found

    def read_cluster(self, path: Path) -> None:
        if not os.path.lexists(path):
            return
        source = self.read(path, "a cluster file")
        if source is None:
            return
        from ttlaunch.topology.cluster import parse_cluster  # noqa: PLC0415 - imports pydantic

        self.cluster, found = parse_cluster(source, environment=self.environment)
        self.found += found

    def finish(self, name: str, folder: Path | None) -> Loaded:
        """Check the files against each other."""
        if self.bindings is not None:
            from ttlaunch.topology.checks import check_devices, check_meshes, check_slots  # noqa: PLC0415 - as above

            hosts = self.hosts if self.hosts_are_sound else []
            self.add(check_slots(self.bindings, hosts))
            self.add(check_meshes(self.bindings, self.graph) if self.graph else [])
            self.add(check_devices(self.bindings, hosts, self.graph))
        topology = None if has_errors(self.found) else self._topology(name, folder)
        return Loaded(topology, self.found, self.files, self.descriptor_found)

    def _topology(self, name: str, folder: Path | None) -> Topology:
        rows = self.bindings.rows if self.bindings else []
        graph = self.graph
        return Topology(
            name,
            folder,
            tuple(self.hosts),
            arch=graph.arch if graph else None,
            meshes=tuple(graph.meshes) if graph else (),
            links=tuple(graph.links) if graph else (),
            switches=tuple(graph.switches) if graph else (),
            switch_links=tuple(graph.switch_links) if graph else (),
            bindings=tuple(sorted((row.binding for row in rows), key=lambda binding: binding.rank)),
            global_environment=self.bindings.global_environment if self.bindings else {},
            mesh_graph_path=self.descriptor,
            cluster=self.cluster,
        )


def _no_hosts(reading: _Reading, folder: Path) -> Diagnostic:
    present = _names_in(folder)
    message = f"{reading.name(folder / HOSTS_FILE)} does not exist; a hostfile was expected"
    hints = did_you_mean(HOSTS_FILE, present) or ("list the hosts in it, one a line: `HOST slots=1`",)
    return Diagnostic(codes.MISSING_FILE, message, hints=hints)


def _no_bindings(reading: _Reading, folder: Path, descriptor: str) -> Diagnostic:
    present = [file for file in _names_in(folder) if file not in DESCRIPTOR_FILES]
    message = f"{reading.name(folder / BINDINGS_FILE)} does not exist, so {descriptor} has meshes that no rank drives"
    hints = did_you_mean(BINDINGS_FILE, present) or ("say in it which rank drives which mesh",)
    return Diagnostic(codes.MISSING_FILE, message, hints=hints)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except OSError:
        return []


def _with_descriptor_hint(diagnostic: Diagnostic, folder: Path) -> Diagnostic:
    """To "`mesh_graph_desc_path` is missing" add which file is there, or is missing too."""
    if diagnostic.code != codes.MISSING_KEY or not diagnostic.message.startswith("`mesh_graph_desc_path`"):
        return diagnostic
    beside = next((file for file in DESCRIPTOR_FILES if (folder / file).is_file()), None)
    if beside:
        return replace(diagnostic, hints=(f'write `mesh_graph_desc_path: "{beside}"`',))
    hint = 'describe the meshes in mgd.yaml, and write `mesh_graph_desc_path: "mgd.yaml"`'
    return replace(diagnostic, notes=("there is no mgd.yaml beside it",), hints=(hint,))
