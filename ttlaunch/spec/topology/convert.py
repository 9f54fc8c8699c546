"""Convert a mesh graph descriptor between YAML (version 1) and text format (version 2), and older YAML into the newest.

What both can say is kept; for each thing that the other version cannot say there is a note. Comments are lost.
"""

import re
from dataclasses import dataclass
from typing import Literal

from ttlaunch.diagnostics.diagnostic import Diagnostic, has_errors
from ttlaunch.diagnostics.span import Source
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.yaml import parse_yaml
from ttlaunch.spec.topology.convert_to_textproto import textproto_of
from ttlaunch.spec.topology.convert_to_yaml import yaml_of
from ttlaunch.spec.topology.load import is_textproto
from ttlaunch.spec.topology.mesh_graph import MeshGraph
from ttlaunch.spec.topology.mgd_schema import DescriptorFile
from ttlaunch.spec.topology.mgd_textproto import parse_mesh_graph_textproto
from ttlaunch.spec.topology.mgd_yaml import mesh_graph_of
from ttlaunch.spec.topology.textproto_write import write_textproto
from ttlaunch.spec.topology.upgrade import upgrade

_PORTS = re.compile(r"\[\s*[0-9]+\s*,\s*[NESWZ][0-9]+\s*\]", re.IGNORECASE)
Version = Literal["yaml", "textproto"]


@dataclass(frozen=True)
class Converted:
    """What came of it.

    Attributes:
        text: The other version; None if a diagnostic is an error.
        notes: What the other version cannot say.
    """

    text: str | None
    diagnostics: list[Diagnostic]
    notes: list[str]


def version_of(source: Source) -> Version:
    """Which version a text is, by its name or else by how it begins."""
    return "textproto" if is_textproto(source) else "yaml"


def convert(source: Source, *, to: Version) -> Converted:
    """Read a descriptor of either version and any generation, and write it as the one that is asked for."""
    graph, file, found = read_any(source)
    if graph is None or has_errors(found):
        return Converted(None, found, [])
    if to == "yaml":
        text, notes = yaml_of(graph, file)
    else:
        written, notes = (file, []) if file is not None else textproto_of(graph)
        text = write_textproto(written)
    if file is None and _PORTS.search(source.text):
        notes.append("links of ports were written as links of devices; which port of a device it is was left out")
    return Converted(text, found, notes)


def read_any(source: Source) -> tuple[MeshGraph | None, DescriptorFile | None, list[Diagnostic]]:
    """The mesh graph of a descriptor of any generation; of version 2 also the file as written."""
    if version_of(source) == "textproto":
        read, found = parse_mesh_graph_textproto(source)
        return (read.graph, read.file, found) if read else (None, None, found)
    root, found = parse_yaml(source, codes=TOPOLOGY)
    if root is None:
        return None, None, found
    root, mistakes = upgrade(root)
    found += mistakes
    if has_errors(mistakes):
        return None, None, found
    graph, mistakes = mesh_graph_of(root)
    return graph, None, found + mistakes
