"""Render the result of a sync, with a row for each host."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ttlaunch.cli.console import tabbed
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import counted, render_size
from ttlaunch.errors import HostError
from ttlaunch.hosts.sync.results import Outcome, Planned, Synced

_SHOWN_HASH = 12


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the release and each host's answer as JSON; documented in `docs/how-to/what-is-copied.md`."""
    release = outcome.release
    return {
        "tree_hash": release.tree_hash,
        "project": str(release.project),
        "files": release.files,
        "bytes": release.bytes,
        "hosts": [_host_as_json(host, answer) for host, answer in outcome.hosts.items()],
    }


def _host_as_json(host: str, answer: Synced | Planned | HostError) -> dict[str, Any]:
    if isinstance(answer, HostError):
        return {"host": host, "error": answer.evidence}
    row = {name: value for name, value in asdict(answer).items() if name != "tree_hash"}
    return {**row, "error": None}


def as_lines(outcome: Outcome) -> Iterator[str]:
    """Render a line for each host: name, bytes that were or would be sent, and folder, separated by tabs."""
    for host, answer in outcome.hosts.items():
        if isinstance(answer, Synced):
            yield tabbed((host, answer.sent_bytes, answer.release))
        elif isinstance(answer, Planned):
            yield tabbed((host, answer.bytes, answer.remote_folder))


def as_table(outcome: Outcome) -> Iterator[str]:
    """Render the release and a table of hosts."""
    release = outcome.release
    size = f"{counted(release.files, 'file')}, {render_size(release.bytes)}"
    yield f"{release.project}: {size}, tree {release.tree_hash[:_SHOWN_HASH]}"
    rows = [("host", "files", "sent", "seconds", "")]
    rows += [(host, *_cells(answer)) for host, answer in outcome.hosts.items()]
    yield from render_table(rows, right={1, 2, 3})


def _cells(answer: Synced | Planned | HostError) -> tuple[str, str, str, str]:
    if isinstance(answer, HostError):
        return "", "", "", "not synced"
    pruned = counted(len(answer.pruned), "old release")
    if isinstance(answer, Planned):
        notes = ["nothing to do" if answer.already_there else f"would be sent to {answer.remote_folder}"]
        notes += [f"{pruned} would be removed"] if answer.pruned else []
        return str(answer.files), render_size(answer.bytes), "", ", ".join(notes)
    notes = ["was there already" if answer.already_there else answer.remote_folder]
    notes += [f"{pruned} removed"] if answer.pruned else []
    return str(answer.files), render_size(answer.sent_bytes), f"{answer.seconds:.2f}", ", ".join(notes)
