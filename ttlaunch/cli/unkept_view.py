"""What of the ranks' output is in no file, because a host could not write it, as a diagnostic at the run's end."""

from collections.abc import Mapping, Sequence
from typing import Any

from ttlaunch.diagnostics import Diagnostic, Severity, shown
from ttlaunch.diagnostics.count import counted

_MOST = 5


def unkept_diagnostics(ranks: Sequence[Mapping[str, Any]]) -> list[Diagnostic]:
    """A warning that says how much is missing of whose output; empty if nothing is.

    Args:
        ranks: As in `report.json`.
    """
    parts = [
        (rank, f"{counted(length, 'byte')} of rank {rank['rank']}'s {stream}")
        for rank in ranks
        for stream, length in _lengths(rank.get("unkept_output")).items()
    ]
    if not parts:
        return []
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    notes = [f"{text} on {rank['host']}: {_reason(rank)}" for rank, text in parts[:_MOST]]
    notes += [f"and {len(parts) - _MOST} more; `report.json` has all"] if len(parts) > _MOST else []
    hint = "make room there; `remote_folder:` in cluster.yaml and `--runs-dir` choose another place"
    message = f"{parts[0][1]} could not be kept{more}"
    return [Diagnostic("R056", message, notes=tuple(notes), hints=(hint,), severity=Severity.WARNING)]


def _lengths(unkept: Any) -> dict[str, int]:
    found = unkept if isinstance(unkept, dict) else {}
    return {str(stream): length for stream, length in found.items() if isinstance(length, int)}


def _reason(rank: Mapping[str, Any]) -> str:
    return shown(rank.get("unkept_reason") or "unknown").lower()
