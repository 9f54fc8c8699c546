"""Read `cluster.yaml`, the optional file that says how to reach the hosts and what they have."""

from collections.abc import Mapping

from ttlaunch.diagnostics.diagnostic import Diagnostic
from ttlaunch.diagnostics.span import Source
from ttlaunch.located.codes import TOPOLOGY
from ttlaunch.located.schema import check_schema
from ttlaunch.located.yaml import parse_yaml
from ttlaunch.topology.model import ClusterSettings
from ttlaunch.topology.schema import ClusterFile
from ttlaunch.topology.variables import expand_variables

_ALIASES = {"username": "user", "login": "user", "key": "identity_file", "env": "environment", "interface": "network"}


def parse_cluster(source: Source, *, environment: Mapping[str, str]) -> tuple[ClusterSettings, list[Diagnostic]]:
    """Read the text of a cluster file. One that holds nothing but comments changes no setting."""
    if all(not line.strip() or line.lstrip().startswith("#") for line in source.lines):
        return ClusterSettings(), []
    root, found = parse_yaml(source, codes=TOPOLOGY)
    if root is None:
        return ClusterSettings(), found
    file, mistakes = check_schema(ClusterFile, root, codes=TOPOLOGY, aliases=_ALIASES)
    found += mistakes
    if file is None:
        return ClusterSettings(), found
    variables, mistakes = expand_variables(file.environment, root=root, path=("environment",), environment=environment)
    values = file.model_dump() | {"environment": variables}
    return ClusterSettings(**values), found + mistakes
