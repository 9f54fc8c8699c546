"""Folders of a run that somebody removed while it ran: report each at once, and name it if the run fails.

A run cannot go on without its folder on a host, because neither output nor records can be kept. Without the other folders,
such as the one in shared memory, it may still complete, so their loss only counts as a cause if something fails afterwards.
"""

from collections.abc import Mapping
from pathlib import Path

from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.logs.output import View
from ttlaunch.running.runs.run_folder import RunFolder, append_event

LOOK_S = 1.0
"""How often a host, or the launcher on this machine, looks whether the folders exist."""
_SHARED_MEMORY = "the run's folder in shared memory"


@dataclass(frozen=True)
class LostFolder:
    """A folder of a run that no longer exists.

    Attributes:
        what: What the folder is for, such as "the run's folder".
        path: The path of the folder on its machine.
        time: When its loss was noticed, seconds since the epoch; it was removed at most `LOOK_S` earlier.
        ends_run: Whether the run cannot go on without it.
    """

    what: str
    path: str
    time: float
    ends_run: bool


def folders_on_host(*, run: str, scratch: str, release: str, remote: str) -> dict[str, str]:
    """Return what each folder that a run needs on a host is for, with its path; a folder comes before those inside it."""
    return {
        "ttlaunch's folder": remote,
        "the run's folder": run,
        "the synced code": release,
        _SHARED_MEMORY: scratch,
    }


def ends_run(what: str) -> bool:
    """Whether a run cannot go on without the folder that is for `what`."""
    return what in {"ttlaunch's folder", "the run's folder"}


def look_at_scratch(scratch: Path, time: float) -> LostFolder | None:
    """Return the loss of the folder in shared memory on this machine; None if the folder exists."""
    return None if scratch.exists() else LostFolder(_SHARED_MEMORY, str(scratch), time, ends_run=False)


class FolderWatch:
    """Informs the user once of each lost folder, and adds it to the run's history."""

    def __init__(self, folder: RunFolder, view: View) -> None:
        self._folder, self._view = folder, view
        self._reported: set[tuple[str, str]] = set()

    def notice(self, folders: Mapping[str, LostFolder]) -> None:
        """Report what is new; call it a few times a second with the lost folder of each host."""
        for host, lost in folders.items():
            if (host, lost.what) in self._reported:
                continue
            self._reported.add((host, lost.what))
            append_event(self._folder, "folder_lost", host=host, what=lost.what, path=lost.path)
            follows = "the run cannot go on" if lost.ends_run else "the run goes on as long as nothing needs it"
            self._view.output("stderr", clean(f"{describe_loss(host, lost)}; {follows}").encode())


def describe_loss(host: str, lost: LostFolder) -> str:
    """Describe in a clause which folder was removed; `host` is "" for this machine."""
    return f"{lost.what} {f'on {host} ' if host else ''}was removed: {lost.path}"
