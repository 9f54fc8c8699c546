"""Read `cluster.yaml`, the optional file that says how to reach the hosts and what they have."""

from collections.abc import Mapping
from contextlib import suppress

from ttlaunch.diagnostics.diagnostic import Diagnostic
from ttlaunch.diagnostics.span import Source
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.findings import Findings
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.located.yaml import parse_yaml
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.host_names import user_name_problem
from ttlaunch.spec.topology.model import ClusterSettings
from ttlaunch.spec.topology.schema import ClusterFile
from ttlaunch.spec.topology.variables import expand_variables

_ALIASES = {"username": "user", "login": "user", "key": "identity_file", "env": "environment", "interface": "network"}


def parse_cluster(source: Source, *, environment: Mapping[str, str]) -> tuple[ClusterSettings, list[Diagnostic]]:
    """Read the text of a cluster file; a file that has only comments changes no setting."""
    if all(not line.strip() or line.lstrip().startswith("#") for line in source.lines):
        return ClusterSettings(), []
    root, found = parse_yaml(source, codes=TOPOLOGY)
    if root is None:
        return ClusterSettings(), found
    file, mistakes = check_schema(ClusterFile, root, codes=TOPOLOGY, aliases=_ALIASES)
    findings = Findings(root, found + mistakes)
    if file is None:
        return ClusterSettings(), findings.found
    _check_values(file, findings)
    variables = expand_variables(file.environment, findings, path=("environment",), environment=environment)
    return ClusterSettings(**(file.model_dump() | {"environment": variables})), findings.found


def _check_values(file: ClusterFile, findings: Findings) -> None:
    """Check that `user` can be a login name, and that `network` is a network or an interface."""
    if file.user is not None and (problem := user_name_problem(file.user)):
        findings.add(codes.HOST_NAME, f"`{shown(file.user)}` cannot be a login name", ("user",), label=problem)
    if file.network is not None and (problem := _network_problem(file.network)):
        message, expected = (
            f"`network` is `{shown(file.network)}`: {problem}",
            "a network such as `10.0.0.0/24`, or an interface",
        )
        findings.add(codes.WRONG_VALUE, message, ("network",), label=f"expected {expected}")


def _network_problem(text: str) -> str | None:
    """Return why a value of `network` cannot be used; None for an IPv4 network or the name of an interface."""
    from ipaddress import IPv4Network, IPv6Network  # noqa: PLC0415 - hardly any cluster file names a network

    if "/" not in text:
        return None
    for kind, problem in ((IPv4Network, None), (IPv6Network, "ranks talk over IPv4, and this is an IPv6 network")):
        with suppress(ValueError):
            kind(text, strict=False)
            return problem
    return "no IPv4 network is written like this"
