"""Hosts that could not be prepared, as diagnostics: one for each kind of reason, at the lines of those hosts."""

from collections.abc import Iterable, Mapping, Sequence

from ttlaunch.diagnostics import Diagnostic, listed, shown
from ttlaunch.diagnostics.count import render_size
from ttlaunch.errors import HostError
from ttlaunch.hosts.doctor.grouping import of_hosts
from ttlaunch.hosts.prepare.one_host import OLDEST_BASE
from ttlaunch.records.host_scripts import EnvironmentAnswer, FoundPython
from ttlaunch.spec.topology.model import Topology

_LONGEST = 240
_MOST_LINES = 6
_OLDEST = ".".join(map(str, OLDEST_BASE))


def explain_bases(without: Mapping[str, Sequence[FoundPython] | HostError], *, topology: Topology) -> list[Diagnostic]:
    """Report hosts without a Python that an environment can be built on."""
    evidence = {host: _what_was_found(answer) for host, answer in without.items()}
    hint = f"`apt install python3` where that is {_OLDEST} or newer; `python:` in cluster.yaml names one that lies elsewhere"
    says = (f"has no Python {_OLDEST} or newer", f"have no Python {_OLDEST} or newer")
    return _explain("H030", evidence, says, topology=topology, hints=(hint,))


def explain_failures(last: Mapping[str, EnvironmentAnswer], *, topology: Topology) -> list[Diagnostic]:
    """Report hosts whose script ended without an environment, by its last frame."""
    groups: dict[str, dict[str, EnvironmentAnswer]] = {}
    for host, answer in last.items():
        groups.setdefault(answer.what or answer.kind, {})[host] = answer
    return [d for what, hosts in groups.items() for d in _FAILURES[what](hosts, topology)]


def explain_lost(errors: Sequence[HostError], *, topology: Topology) -> list[Diagnostic]:
    """Report hosts that were lost, or sent something else than an answer, while they were prepared."""
    evidence = {error.host: error.evidence for error in errors}
    notes = tuple(dict.fromkeys(note for error in errors for note in error.notes))
    hints = tuple(dict.fromkeys(hint for error in errors for hint in error.hints))
    kept = "what they received is kept, and no environment is valid before it is whole"
    again = "run `ttlaunch prepare` again; it continues from there"
    says = ("was lost while being prepared", "were lost while being prepared")
    return _explain("H037", evidence, says, topology=topology, notes=(*notes, kept), hints=hints or (again,))


def _what_was_found(answer: Sequence[FoundPython] | HostError) -> str:
    if isinstance(answer, HostError):
        return answer.evidence
    found = [
        f"{python.path} {python.why_not}" + (f" ({python.version})" if python.version else "") for python in answer
    ]
    return listed(found, last="and", quote="") or "no Python in PATH, /usr/bin or /usr/local/bin"


def _disk(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    def room(last: EnvironmentAnswer) -> str:
        free = f"{render_size(last.free)} are free"
        return f"{render_size(last.needed)} are needed, {free}" if last.needed else f"it became full, {free}"

    folder = topology.cluster.remote_folder
    return _explain(
        "H031",
        {host: room(last) for host, last in hosts.items()},
        _has(f"too little disk space for the environment in {folder}"),
        topology=topology,
        hints=(
            f"make room there, or choose another place with `remote_folder:` in cluster.yaml instead of `{folder}`",
        ),
    )


def _inodes(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    evidence = {h: f"{w.needed} files are needed, {w.free} more can be made" for h, w in hosts.items()}
    says = _has(f"too few inodes for the environment in {topology.cluster.remote_folder}")
    hints = ("`df -i` on it shows which disk; `remote_folder:` in cluster.yaml chooses another",)
    return _explain("H031", evidence, says, topology=topology, hints=hints)


def _install(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    found = []
    for host, last in hosts.items():
        lines = [shown(line, longest=_LONGEST) for line in last.lines]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:] or ["it said nothing"]
        evidence = {host: errors[0].removeprefix("ERROR: ")}
        notes = tuple(f"pip there: `{line}`" for line in lines[-_MOST_LINES:] if line != errors[0])
        hints = ("without `--from-index` the wheels are carried from here",) if last.from_index else ()
        says = ("could not install the packages", "could not install the packages")
        found += _explain("H035", evidence, says, topology=topology, notes=notes, hints=hints)
    return found


def _check(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    evidence = {
        host: shown((last.problems or ("it said nothing",))[0], longest=_LONGEST) for host, last in hosts.items()
    }
    notes = [f"{host}: {shown(problem, longest=_LONGEST)}" for host, w in hosts.items() for problem in w.problems[1:]]
    notes = [*notes[:_MOST_LINES], "its `env` is what it was before"]
    return _explain("H036", evidence, _has("a new environment that does not work"), topology=topology, notes=notes)


def _folder(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    folder = topology.cluster.remote_folder
    return _explain(
        "H039",
        {host: shown(last.words, longest=_LONGEST) for host, last in hosts.items()},
        (f"does not allow writing in {folder}", f"do not allow writing in {folder}"),
        topology=topology,
        hints=("`remote_folder:` in cluster.yaml names a folder that your user may write",),
    )


def _missing(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    return _explain(
        "H038",
        {host: shown(last.why, longest=_LONGEST) for host, last in hosts.items()},
        ("is not prepared", "are not prepared"),
        topology=topology,
        hints=("`ttlaunch prepare`, with the same options but without `--check`",),
    )


_FAILURES = {
    "disk": _disk,
    "inodes": _inodes,
    "install": _install,
    "check": _check,
    "folder": _folder,
    "missing": _missing,
}


def _has(what: str) -> tuple[str, str]:
    return f"has {what}", f"have {what}"


def _explain(
    code: str,
    evidence: Mapping[str, str],
    says: tuple[str, str],
    *,
    topology: Topology,
    notes: Iterable[str] = (),
    hints: Iterable[str] = (),
) -> list[Diagnostic]:
    """One diagnostic for all hosts with this reason, in the order of the hostfile; none for no hosts."""
    ordered = {str(host.name): evidence[host.name] for host in topology.hosts if host.name in evidence}
    return of_hosts(
        code, ordered, topology=topology, says=says, notes=tuple(notes), hints=tuple(hints), in_message=True
    )
