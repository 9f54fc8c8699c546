"""Hosts that could not be prepared, as diagnostics: one for each kind of reason, at the lines of those hosts."""

from collections.abc import Iterable, Mapping, Sequence

from ttlaunch.diagnostics import Blame, Diagnostic, Label, listed, shown
from ttlaunch.diagnostics.count import render_size
from ttlaunch.errors import HostError
from ttlaunch.hosts.prepare.one_host import OLDEST_BASE, Base
from ttlaunch.records.host_scripts import EnvironmentAnswer
from ttlaunch.spec.topology.model import Topology

_LONGEST = 240
_MOST_PLACES = 8
_MOST_LINES = 6
_OLDEST = ".".join(map(str, OLDEST_BASE))


def explain_bases(without: Mapping[str, Base | HostError], *, topology: Topology) -> list[Diagnostic]:
    """Hosts without a Python that an environment can be built on."""
    evidence = {host: _what_was_found(base) for host, base in without.items()}
    hint = f"`apt install python3` where that is {_OLDEST} or newer; `python:` in cluster.yaml names one that lies elsewhere"
    return _explain("H030", evidence, ("has no", "have no"), f"Python {_OLDEST} or newer", topology, hints=(hint,))


def explain_failures(last: Mapping[str, EnvironmentAnswer], *, topology: Topology) -> list[Diagnostic]:
    """Hosts whose script ended otherwise than with an environment, by the last lines on its stderr."""
    groups: dict[str, dict[str, EnvironmentAnswer]] = {}
    for host, words in last.items():
        groups.setdefault(words.what or words.kind, {})[host] = words
    return [d for what, hosts in groups.items() for d in _FAILURES[what](hosts, topology)]


def explain_lost(errors: Sequence[HostError], *, topology: Topology) -> list[Diagnostic]:
    """Hosts that went away, or in whose place something else spoke, while they were prepared."""
    evidence = {error.host: error.evidence for error in errors}
    notes = tuple(dict.fromkeys(note for error in errors for note in error.notes))
    hints = tuple(dict.fromkeys(hint for error in errors for hint in error.hints))
    kept = "what they received is kept, and no environment is valid before it is whole"
    again = "`ttlaunch prepare` once more goes on from there"
    return _explain(
        "H037", evidence, ("was lost", "were lost"), "while being prepared", topology, (*notes, kept), hints or (again,)
    )


def _what_was_found(base: Base | HostError) -> str:
    if isinstance(base, HostError):
        return base.evidence
    found = [
        f"{python.path} {python.why_not}" + (f" ({python.version})" if python.version else "") for python in base.found
    ]
    return listed(found, last="and", quote="") or "no Python in PATH, /usr/bin or /usr/local/bin"


def _disk(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    def say(words: EnvironmentAnswer) -> str:
        free = f"{render_size(words.free)} are free"
        return f"{render_size(words.needed)} are needed, {free}" if words.needed else f"it became full, {free}"

    folder = topology.cluster.remote_folder
    return _explain(
        "H031",
        {host: say(words) for host, words in hosts.items()},
        ("has", "have"),
        f"too little disk space for the environment in {folder}",
        topology,
        hints=(
            f"make room there, or choose another place with `remote_folder:` in cluster.yaml instead of `{folder}`",
        ),
    )


def _inodes(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    evidence = {h: f"{w.needed} files are needed, {w.free} more can be made" for h, w in hosts.items()}
    what = f"too few inodes for the environment in {topology.cluster.remote_folder}"
    hints = ("`df -i` on it shows which disk; `remote_folder:` in cluster.yaml chooses another",)
    return _explain("H031", evidence, ("has", "have"), what, topology, hints=hints)


def _install(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    found = []
    for host, words in hosts.items():
        lines = [shown(line, longest=_LONGEST) for line in words.lines]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines[-1:] or ["it said nothing"]
        evidence = {host: errors[0].removeprefix("ERROR: ")}
        notes = tuple(f"pip there: `{line}`" for line in lines[-_MOST_LINES:] if line != errors[0])
        hints = ("without `--from-index` the wheels are carried from here",) if words.from_index else ()
        found += _explain("H035", evidence, ("could not", "could not"), "install the packages", topology, notes, hints)
    return found


def _check(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    evidence = {
        host: shown((words.problems or ("it said nothing",))[0], longest=_LONGEST) for host, words in hosts.items()
    }
    notes = [f"{host}: {shown(problem, longest=_LONGEST)}" for host, w in hosts.items() for problem in w.problems[1:]]
    notes = [*notes[:_MOST_LINES], "its `env` is what it was before"]
    return _explain("H036", evidence, ("has", "have"), "a new environment that does not work", topology, tuple(notes))


def _folder(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    return _explain(
        "H039",
        {host: shown(words.words, longest=_LONGEST) for host, words in hosts.items()},
        ("does not let us", "do not let us"),
        f"write in {topology.cluster.remote_folder}",
        topology,
        hints=("`remote_folder:` in cluster.yaml names a folder that your user may write",),
    )


def _missing(hosts: Mapping[str, EnvironmentAnswer], topology: Topology) -> list[Diagnostic]:
    return _explain(
        "H038",
        {host: shown(words.why, longest=_LONGEST) for host, words in hosts.items()},
        ("is not", "are not"),
        "prepared",
        topology,
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


def _explain(
    code: str,
    evidence: Mapping[str, str],
    verbs: tuple[str, str],
    what: str,
    topology: Topology,
    notes: Iterable[str] = (),
    hints: Iterable[str] = (),
) -> list[Diagnostic]:
    """One diagnostic for all hosts with this reason, with a label for each; none for no hosts."""
    spans = {str(host.name): host.span for host in topology.hosts}
    names = [name for name in spans if name in evidence]
    if not names:
        return []
    if len(names) == 1:
        subject = f"host `{shown(names[0])}` {verbs[0]} {what}"
    else:
        subject = f"{len(names)} of {len(spans)} hosts {verbs[1]} {what}"
    is_shared = len({evidence[name] for name in names}) == 1
    labels = [
        Label(spans[name], "" if is_shared else shown(evidence[name], longest=_LONGEST))
        for name in names[:_MOST_PLACES]
    ]
    rest = len(names) - _MOST_PLACES
    if rest > 0:
        labels[0] = Label(labels[0].span, f"{labels[0].text} (and {rest} more hosts than shown)".lstrip())
    message = shown(f"{subject}: {evidence[names[0]]}" if is_shared else subject, longest=_LONGEST)
    return [Diagnostic(code, message, labels[0], tuple(labels[1:]), tuple(notes), tuple(hints), blame=Blame.HOSTS)]
