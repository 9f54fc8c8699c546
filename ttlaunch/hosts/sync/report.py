"""Diagnostics about a sync: too much to send unasked, and hosts that could not take the code in."""

import os
from collections.abc import Iterator, Sequence

from ttlaunch.diagnostics import Blame, Diagnostic, Severity, listed
from ttlaunch.diagnostics.count import counted, render_size
from ttlaunch.errors import SyncError
from ttlaunch.hosts.sync.read_files import name_of
from ttlaunch.hosts.sync.results import Outcome, Planned, Synced

LARGEST_UNASKED_BYTES = 1024**3
"""More than this, to all hosts together, is sent only after a confirmation."""


def check_size(outcome: Outcome, *, allowed: int = LARGEST_UNASKED_BYTES) -> Diagnostic | None:
    """A diagnostic if, by a dry run, more would be sent than is sent without asking."""
    plans = [plan for plan in outcome.hosts.values() if isinstance(plan, Planned)]
    total = sum(plan.bytes for plan in plans)
    if total <= allowed:
        return None
    largest = max(outcome.release.manifest.entries, key=lambda entry: entry.size)
    several = counted(sum(plan.bytes > 0 for plan in plans), "host")
    message = f"{render_size(total)} would be sent to {several}, more than {render_size(allowed)}"
    notes = (f"the largest file is {name_of(largest.path.partition(b'/')[2])}: {render_size(largest.size)}",)
    hints = ("`--yes` sends it; a .ttlaunchignore file leaves files out",)
    return Diagnostic("S006", message, notes=notes, hints=hints, blame=Blame.CODE_SYNC)


def check_synced(outcome: Outcome) -> list[Diagnostic]:
    """Describe the hosts that could not store the code, and give warnings about those that could.

    The caller explains the hosts that could not be reached at all, each a `HostError` that is not a `SyncError`.
    """
    found = list(outcome.problems)
    if outcome.changed:
        names = listed(outcome.changed, last="and")
        message = f"files changed while they were copied, so hosts were given what they held afterwards: {names}"
        found.append(Diagnostic("S018", message, severity=Severity.WARNING, blame=Blame.CODE_SYNC))
    for host, answer in outcome.hosts.items():
        if isinstance(answer, SyncError):
            found.append(
                Diagnostic(answer.code, answer.evidence, notes=answer.notes, hints=answer.hints, blame=Blame.CODE_SYNC)
            )
        elif isinstance(answer, Synced | Planned):
            found += _warnings(host, answer.differing_data, answer.repaired)
    return found


def _warnings(host: str, differing: Sequence[str], repaired: Sequence[str]) -> Iterator[Diagnostic]:
    for path in differing:
        message = f"{host} has another text at {path} than the launching machine; the launching machine's is used"
        yield Diagnostic("S012", message, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
    if repaired:
        names = [name_of(os.fsencode(path)) for path in repaired]
        message = f"code on {host} had been changed there and was put right: {listed(names, last='and')}"
        yield Diagnostic("S014", message, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
