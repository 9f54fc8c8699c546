"""One mistake on many hosts is one diagnostic: how many hosts, at the first one's line, with each host's own evidence."""

from collections.abc import Mapping, Sequence

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Severity, shown
from ttlaunch.spec.topology.model import Topology

_LONGEST_EVIDENCE = 200
_MOST_PLACES = 8


def of_hosts(
    code: str,
    evidence: Mapping[str, str],
    *,
    topology: Topology,
    says: tuple[str, str],
    notes: Sequence[str] = (),
    hints: Sequence[str] = (),
    severity: Severity = Severity.ERROR,
    in_message: bool = False,
) -> list[Diagnostic]:
    """Make one diagnostic for these hosts; none for no hosts.

    Args:
        code: The rule's code.
        evidence: What is wrong with each host.
        topology: Where the hosts stand in their file.
        says: How the message goes on after one host's name, and after the number of several hosts.
        notes: The diagnostic's notes.
        hints: The diagnostic's hints.
        severity: The rule's severity.
        in_message: Move evidence that is the same for all hosts from their labels into the message.
    """
    if not evidence:
        return []
    if len(evidence) == 1:
        message = f"host `{shown(next(iter(evidence)))}` {says[0]}"
    else:
        message = f"{len(evidence)} of {len(topology.hosts)} hosts {says[1]}"
    if in_message and len(set(evidence.values())) == 1:
        message = f"{message}: {shown(next(iter(evidence.values())), longest=_LONGEST_EVIDENCE)}"
        evidence = dict.fromkeys(evidence, "")
    labels, unplaced = place(evidence, topology=topology)
    return [
        Diagnostic(
            code,
            message,
            labels[0] if labels else None,
            tuple(labels[1:]),
            notes=(*unplaced, *notes),
            hints=tuple(hints),
            severity=severity,
            blame=Blame.HOSTS,
        )
    ]


def place(evidence: Mapping[str, str], *, topology: Topology) -> tuple[list[Label], list[str]]:
    """Make a label at each host's line, and notes for hosts without a line; repeated evidence is shown once."""
    spans = {str(host.name): host.span for host in topology.hosts}
    first = next(iter(evidence.values()), "")
    labels: list[Label] = []
    unplaced: list[str] = []
    for number, (host, text) in enumerate(evidence.items()):
        shown_text = "likewise" if number and text and text == first else shown(text, longest=_LONGEST_EVIDENCE)
        if host not in spans:
            unplaced.append(f"{host}: {shown_text}")
        elif len(labels) < _MOST_PLACES:
            labels.append(Label(spans[host], shown_text))
        else:
            unplaced.append(f"{host} {shown_text}" if shown_text == "likewise" else f"{host}: {shown_text}")
    return labels, unplaced
