"""Hosts that cannot be used, as diagnostics: one for each kind of reason, at the first such host's line.

A reason comes from the connection as a `HostError`, with its evidence; here it gets its code, its place in the
hostfile, and the hosts that did answer, since that tells a wrong name from a pulled cable.
"""

from collections.abc import Iterable, Mapping, Sequence

from ttlaunch.diagnostics import Blame, Diagnostic, listed, shown
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.doctor.grouping import place
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.model import Topology


@dataclass(frozen=True)
class _Reason:
    """One kind of trouble.

    Attributes:
        code: The code of its diagnostic.
        one, several: How the message goes on after one host's name, and after the number of several hosts.
        by_hand: Whether plain `ssh` would fail in the same way, so that the hint is to try it.
    """

    code: str
    one: str
    several: str
    by_hand: bool = False


_NOT_READY = _Reason("H002", "is not ready", "are not ready", by_hand=True)
_UNFINISHED = _Reason("H013", "did not answer our questions to the end", "did not answer our questions to the end")
_REASONS = {
    Trouble.UNKNOWN_NAME: _NOT_READY,
    Trouble.UNREACHABLE: _NOT_READY,
    Trouble.SILENT: _NOT_READY,
    Trouble.UNKNOWN_KEY: _Reason(
        "H009", "has a host key that is not known here", "have host keys that are not known here"
    ),
    Trouble.CHANGED_KEY: _Reason(
        "H010", "has another host key than the known one", "have other host keys than the known ones"
    ),
    Trouble.LOGIN: _Reason("H011", "refuses the login", "refuse the login", by_hand=True),
    Trouble.SETTINGS: _Reason(
        "H012", "cannot be reached with the ssh settings here", "cannot be reached with the ssh settings here"
    ),
    Trouble.STEP: _Reason("H047", "starts no step of the Slurm job", "start no steps of the Slurm job"),
    Trouble.ENDED: _Reason("H048", "belongs to a Slurm job that has ended", "belong to a Slurm job that has ended"),
    Trouble.LOST: _UNFINISHED,
    Trouble.STOPPED: _UNFINISHED,
    Trouble.TIMED_OUT: _UNFINISHED,
    Trouble.SCRIPT: _UNFINISHED,
    Trouble.DISK: _Reason("H016", "cannot hold the files of a run", "cannot hold the files of a run"),
    Trouble.VERSION: _Reason(
        "H040",
        "has an agent of another version than this launcher",
        "have agents of another version than this launcher",
    ),
    Trouble.NO_PYTHON: _Reason("H014", "has no Python that can be used", "have no Python that can be used"),
}
_BY_HAND = "try it by hand"
_MOST_HINTS = 8


def explain_troubles(
    errors: Sequence[HostError], *, topology: Topology, answered: Mapping[str, float] | None = None
) -> list[Diagnostic]:
    """One diagnostic for each kind of trouble, in the order of the hostfile.

    Args:
        errors: The errors, at most one per host.
        topology: Where the hosts stand in their file.
        answered: The seconds that each host which answered took.
    """
    order = {str(host.name): number for number, host in enumerate(topology.hosts)}
    groups: dict[_Reason, list[HostError]] = {}
    for error in sorted(errors, key=lambda error: order.get(error.host, len(order))):
        groups.setdefault(_REASONS[error.trouble], []).append(error)
    return [_explain(reason, group, topology, answered=answered or {}) for reason, group in groups.items()]


def _explain(
    reason: _Reason, errors: list[HostError], topology: Topology, *, answered: Mapping[str, float]
) -> Diagnostic:
    if len(errors) == 1:
        subject = f"host `{shown(errors[0].host)}` {reason.one}"
    else:
        subject = f"{len(errors)} of {len(topology.hosts)} hosts {reason.several}"
    evidence = {error.host: error.evidence for error in errors}
    labels, notes = place(evidence, topology=topology)
    notes += _once(note for error in errors for note in error.notes)
    if answered:
        took = max(answered.values())
        notes.append(f"{listed(answered, last='and', quote='')} answered within {max(took, 0.1):.1f} s")
    hints = _hints(errors)
    if errors[0].trouble is Trouble.DISK and not hints:
        hints = _disk_hints(errors[0].host, topology.cluster.remote_folder)
    if reason.by_hand and not hints:
        hints = [f"{_BY_HAND}: `{_by_hand(errors[0].host, topology)}`"]
    return Diagnostic(
        reason.code,
        f"{subject}; nothing was started",
        labels[0] if labels else None,
        tuple(labels[1:]),
        notes=tuple(notes),
        hints=tuple(hints),
        blame=Blame.HOSTS,
    )


def _hints(errors: Sequence[HostError]) -> list[str]:
    """The hints of the errors: each command once, and of several commands to try by hand only the first."""
    hints = _once(hint for error in errors for hint in error.hints)
    again = [hint for hint in hints if hint.startswith(_BY_HAND)]
    kept = [hint for hint in hints if hint not in again[1:]]
    more = len(kept) - _MOST_HINTS
    return kept if more <= 0 else [*kept[:_MOST_HINTS], f"and {more} more like these for the other hosts"]


def _disk_hints(host: str, remote_folder: str) -> list[str]:
    """Hints for a full disk: a run keeps files in the remote folder and in shared memory."""
    look = f"`ssh {host} df -h '{remote_folder}' /dev/shm`: is one of them full, or read-only?"
    return [look, "`remote_folder:` in cluster.yaml chooses another place"]


def _by_hand(name: str, topology: Topology) -> str:
    """The ssh command that logs in as ttlaunch did."""
    cluster = topology.cluster
    user = next((host.user for host in topology.hosts if host.name == name), None) or cluster.user
    words = ["ssh -o BatchMode=yes"]
    words += [f"-p {cluster.port}"] if cluster.port else []
    words += [f"-i {cluster.identity_file}"] if cluster.identity_file else []
    return " ".join([*words, f"{user}@{name}" if user else name, "true"])


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
