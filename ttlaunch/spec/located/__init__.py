"""Text to values that know where they stand, for every file a user writes: topology, cluster and training files.

`read_source` turns bytes into a `Source`, `parse_yaml` a YAML text into a tree of nodes with a span each, and
`check_schema` that tree into a pydantic model or into one diagnostic per mistake. None of them raises for what a user
wrote; all return what they found together with the diagnostics.

Names are imported on first use: reading a hostfile needs neither PyYAML nor pydantic, and they cost 0.2 s.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttlaunch.spec.located.codes import CONFIGURATION, TOPOLOGY, FileCodes
    from ttlaunch.spec.located.nodes import ListNode, MapNode, Node, ScalarNode, node_at, plain, span_of
    from ttlaunch.spec.located.schema import Section, check_schema
    from ttlaunch.spec.located.source import read_source, source_from_bytes
    from ttlaunch.spec.located.yaml import parse_yaml

__all__ = [
    "CONFIGURATION",
    "TOPOLOGY",
    "FileCodes",
    "ListNode",
    "MapNode",
    "Node",
    "ScalarNode",
    "Section",
    "check_schema",
    "node_at",
    "parse_yaml",
    "plain",
    "read_source",
    "source_from_bytes",
    "span_of",
]

_HOMES = {
    "codes": ("CONFIGURATION", "TOPOLOGY", "FileCodes"),
    "nodes": ("ListNode", "MapNode", "Node", "ScalarNode", "node_at", "plain", "span_of"),
    "schema": ("Section", "check_schema"),
    "source": ("read_source", "source_from_bytes"),
    "yaml": ("parse_yaml",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"ttlaunch.spec.located.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
