"""Turn pip's output after a failure into one diagnostic that names the reason."""

import re
from collections.abc import Sequence

from ttlaunch.diagnostics import Blame, Diagnostic, listed, shown
from ttlaunch.hosts.prepare.kind import Kind
from ttlaunch.hosts.prepare.requirements import Requirements

_LONGEST = 240
_MOST_LINES = 8
_UNREACHABLE = re.compile(
    r"((?:Failed to establish a new connection|Temporary failure in name resolution|Name or service not known"
    r"|Could not fetch URL|Connection refused|Network is unreachable|Read timed out|ProxyError|SSLError|timed out\b)[^\n']*)"
)
_ASKED = re.compile(r"Retrying \(.*?\) after connection broken by '(.*)': (\S+)")
_NONE_FITS = re.compile(r"No matching distribution found for (\S+(?: *[<>=!~]+ *\S+)?)")
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")
_PINNED = re.compile(r"The user requested \(constraint\) ([\w.-]+==[\w.+!-]+)")
_CAUSE = re.compile(r"The conflict is caused by:\n((?:    .*\n)+)")


def explain_no_pip() -> Diagnostic:
    """The diagnostic for an environment without pip on this machine."""
    return Diagnostic(
        "H033",
        "the packages of the ranks cannot be settled: this machine's Python has no pip",
        hints=("`python -m ensurepip`, in the environment that ttlaunch runs in",),
        blame=Blame.HOSTS,
    )


def pinned_in_conflict(output: str) -> list[str]:
    """Return the pinned versions in a conflict. pip also reports a conflict if a pinned version has no wheel."""
    return list(dict.fromkeys(_PINNED.findall(output)))


def explain_lock(output: str, kind: Kind, wanted: Requirements, *, missing: Sequence[str]) -> Diagnostic:
    """The diagnostic for a kind of host without a lock, from pip's output.

    Args:
        output: The output of pip.
        kind: The kind of the hosts.
        wanted: The requirements.
        missing: Pinned versions that have no wheel, found by asking pip for each alone.
    """
    none_fits = _NONE_FITS.search(output)
    asked = _ASKED.search(output)
    if asked or (none_fits is None and not missing and _UNREACHABLE.search(output)):
        return _explain_unreachable(output)
    if missing:
        return _explain_missing(listed(missing, last="and"), kind, wanted)
    if none_fits:
        versions = [v.strip() for v in found.group(1).split(",")] if (found := _VERSIONS.search(output)) else []
        there = [v for v in versions if v != "none"]
        notes = (f"there are wheels of {listed(there[-_MOST_LINES:], last='and')}",) if there else ()
        return _explain_missing(f"`{none_fits.group(1)}`", kind, wanted, notes=notes)
    cause = _CAUSE.search(output)
    lines = [line.strip() for line in cause.group(1).splitlines()] if cause else []
    if lines:
        asked_for = [line.removeprefix("The user requested ") for line in lines if line.startswith("The user")]
        subject = listed(asked_for[:2] or lines[:2], last="and")
        return Diagnostic(
            "H033",
            f"these cannot be had together: {shown(subject, longest=_LONGEST)}",
            notes=(*(shown(line, longest=_LONGEST) for line in lines[:_MOST_LINES]), _origin(wanted)),
            hints=("change one of them, in the constraints or in the requirements",),
            blame=Blame.HOSTS,
        )
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    lines_shown = errors or [line for line in output.splitlines() if line.strip()][-1:] or ["nothing"]
    return Diagnostic(
        "H033",
        f"the packages of the ranks cannot be settled: {shown(lines_shown[0], longest=_LONGEST)}",
        notes=(*(shown(line, longest=_LONGEST) for line in lines_shown[1:_MOST_LINES]), _origin(wanted)),
        blame=Blame.HOSTS,
    )


def _explain_missing(what: str, kind: Kind, wanted: Requirements, *, notes: tuple[str, ...] = ()) -> Diagnostic:
    return Diagnostic(
        "H032",
        f"there is no wheel of {what} for {kind}",
        notes=(*notes, _origin(wanted)),
        hints=("name a version that has one, or let pip search more places: `PIP_FIND_LINKS`, `PIP_EXTRA_INDEX_URL`",),
        blame=Blame.HOSTS,
    )


def _explain_unreachable(output: str) -> Diagnostic:
    found = _UNREACHABLE.search(output)
    reason = found.group(1).rpartition("] ")[2] if found else "no answer"
    return Diagnostic(
        "H034",
        f"this machine reaches no package index: {reason[0].lower()}{reason[1:]}",
        notes=("wheels are fetched here and carried to the hosts, which need no index",),
        hints=(
            "`pip config list` shows where pip looks; `PIP_FIND_LINKS=DIR` with `PIP_NO_INDEX=1` takes wheels of a folder",
        ),
        blame=Blame.HOSTS,
    )


def _origin(wanted: Requirements) -> str:
    return f"versions are held by {wanted.constraints_origin}"
