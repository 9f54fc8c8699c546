"""Text to values that know where they stand, for every file a user writes: topology, cluster and training files.

`read_source` turns bytes into a `Source`, `parse_yaml` a YAML text into a tree of nodes with a span each, and
`check_schema` that tree into a pydantic model or into one diagnostic per mistake. None of them raises for what a user
wrote; all return what they found together with the diagnostics.
"""

from ttlaunch.located.codes import CONFIGURATION, TOPOLOGY, FileCodes
from ttlaunch.located.schema import Section, check_schema
from ttlaunch.located.source import read_source, source_from_bytes
from ttlaunch.located.yaml import ListNode, MapNode, Node, ScalarNode, node_at, parse_yaml, plain, span_of

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
