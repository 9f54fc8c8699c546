"""Check one file of a cluster without the others of its folder; only for bindings, the descriptor is read too."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.diagnostic import Diagnostic, fold_repeats, has_errors
from ttlaunch.diagnostics.span import Source
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.load import load_bindings, load_mapping, parse_descriptor
from ttlaunch.spec.topology.mesh_graph import counted_parts
from ttlaunch.spec.topology.recognise import Kind, OtherKind, explain_other_kinds, kind_of_content


@dataclass(frozen=True)
class CheckedFile:
    """The result of checking one file.

    Attributes:
        content: The counted parts of the file, such as "2 hosts, 4 slots"; empty if it has errors.
        descriptor_found: For bindings, why the descriptor was found where it is, as text.
    """

    diagnostics: list[Diagnostic]
    content: str = ""
    descriptor_found: str | None = None


def check_file(
    source: Source, kind: Kind, path: Path, *, environment: Mapping[str, str], working_folder: Path
) -> CheckedFile:
    """Check a file of any kind but a training file.

    Args:
        source: The text of the file.
        kind: The kind of the file.
        path: The absolute path of the file, from which the descriptor of bindings is looked for.
        environment: The values for `$VAR` in values of variables.
        working_folder: The user's current folder, absolute.
    """
    checked = _check(source, kind, path, environment=environment, working_folder=working_folder)
    return replace(checked, diagnostics=fold_repeats(checked.diagnostics))


def _check(
    source: Source, kind: Kind, path: Path, *, environment: Mapping[str, str], working_folder: Path
) -> CheckedFile:
    if kind is Kind.BINDINGS:
        loaded = load_bindings(source, path, environment=environment, working_folder=working_folder)
        topology = loaded.topology
        parts = [counted(len(topology.bindings), "rank") + " bound", *counted_parts(topology)] if topology else []
        return CheckedFile(loaded.diagnostics, ", ".join(parts), loaded.descriptor_found)
    content = kind_of_content(source)
    if content and content is not kind:
        return CheckedFile(list(explain_other_kinds([OtherKind(source, kind, content)])))
    if kind is Kind.MAPPING:
        text, found = load_mapping(source, path, working_folder=working_folder)
        return CheckedFile(found, "" if has_errors(found) else text)
    if kind is Kind.HOSTS:
        hosts, found = parse_hosts(source)
        text = f"{counted(len(hosts), 'host')}, {counted(sum(host.slots for host in hosts), 'slot')}"
        return CheckedFile(found, "" if has_errors(found) else text)
    if kind is Kind.MGD:
        graph, found = parse_descriptor(source)
        text = ", ".join(counted_parts(graph)) if graph else ""
        return CheckedFile(found, "" if has_errors(found) else text)
    from ttlaunch.spec.topology.cluster import parse_cluster  # noqa: PLC0415 - imports pydantic

    _, found = parse_cluster(source, environment=environment)
    return CheckedFile(found, "" if has_errors(found) else "settings that hosts are reached with")
