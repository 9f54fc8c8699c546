"""Turn what a host reports about a failed sync into an error with one clause that holds the wrong value."""

from ttlaunch.diagnostics import shown
from ttlaunch.diagnostics.count import render_size
from ttlaunch.errors import HostError, SyncError, Trouble
from ttlaunch.records.host_scripts import SyncRefusal

_LONGEST = 200


def explain_refusal(host: str, refusal: SyncRefusal) -> SyncError:
    """Make the error that an `error` frame of `agent/receive.py` describes."""
    reason, path = refusal.reason, shown(refusal.path, longest=_LONGEST)
    match refusal.why:
        case "space":
            room = f"{render_size(refusal.free)} free in {path}, {render_size(refusal.needed)} needed"
            return SyncError(host, code="S009", evidence=f"the disk of {host} is too full: {room}")
        case "inodes":
            room = f"room for {refusal.free} more files in {path}, {refusal.needed} needed"
            return SyncError(host, code="S009", evidence=f"the disk of {host} is too full: {room}")
        case "full":
            return SyncError(host, code="S009", evidence=f"the disk of {host} is full: {reason} at {path}")
        case "read-only" | "denied" | "in the way":
            notes = ("`remote_folder` in cluster.yaml sets the folder for code on hosts",)
            evidence = f"{path} on {host} cannot be written: {reason}"
            return SyncError(host, code="S010", evidence=evidence, notes=notes)
        case "case" if len(refusal.names) > 1:
            first, second = (shown(name.partition("/")[2], longest=_LONGEST) for name in refusal.names[:2])
            evidence = f"{host} takes `{first}` and `{second}` for one file"
            hints = (f"rename one of them, or put `{second}` into .ttlaunchignore",)
            return SyncError(host, code="S008", evidence=evidence, hints=hints)
        case "name":
            return SyncError(host, code="S015", evidence=f"{host} cannot have a file named {path}: {reason}")
        case "damaged":
            evidence = f"{path} came to {host} with other content than was sent"
            return SyncError(host, code="S013", evidence=evidence, hints=("look for disk errors there: `dmesg`",))
        case _:
            at = f" at {path}" if path else ""
            return SyncError(host, code="S016", evidence=f"{host} could not take the code in: {reason}{at}")


def explain_loss(error: HostError) -> HostError:
    """The error for a host that had been reached and was lost, or failed, during a sync."""
    if isinstance(error, SyncError) or error.trouble is Trouble.NO_PYTHON:
        return error
    if error.trouble in {Trouble.LOST, Trouble.TIMED_OUT}:
        evidence = f"{error.host} was lost while code was copied to it: {error.evidence}"
        notes = ("the code that it had before is untouched", *error.notes)
        return SyncError(error.host, code="S011", evidence=evidence, notes=notes, hints=error.hints)
    evidence = f"{error.host} could not take the code in: {error.evidence}"
    return SyncError(error.host, code="S016", evidence=evidence, notes=error.notes, hints=error.hints)
