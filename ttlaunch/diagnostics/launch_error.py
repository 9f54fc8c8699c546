"""The exception with the diagnostics of a command or call that ttlaunch refuses or cannot carry out."""

import errno
from collections.abc import Iterable
from pathlib import Path

from ttlaunch.diagnostics.diagnostic import Blame, Diagnostic, exit_status
from ttlaunch.diagnostics.render import Format, render
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.system_reason import system_reason

_LONGEST_PATH = 300
_READ_ELSEWHERE = "name one that you may read, or ask its owner"
_WRITE_ELSEWHERE = "name a place where you may write"
_REPAIRS = {
    errno.ENOENT: {"read": "check its spelling, and the folder that it is in", "written": "make its folder first"},
    errno.ENOTDIR: dict.fromkeys(("read", "written"), "a part of this path is a file; check its spelling"),
    errno.EISDIR: dict.fromkeys(("read", "written"), "this is a folder; name a file"),
    errno.EACCES: {"read": _READ_ELSEWHERE, "written": _WRITE_ELSEWHERE},
    errno.EPERM: {"read": _READ_ELSEWHERE, "written": _WRITE_ELSEWHERE},
    errno.EROFS: dict.fromkeys(("read", "written"), _WRITE_ELSEWHERE),
    errno.ENOSPC: dict.fromkeys(("read", "written"), "make room on this disk, or name a place on another one"),
    errno.EDQUOT: dict.fromkeys(
        ("read", "written"), "your quota is used up: remove files, or name a place on another disk"
    ),
    errno.ENAMETOOLONG: dict.fromkeys(("read", "written"), "give a shorter name"),
}
"""What to do, by the reason of the system and by what was tried."""


class LaunchError(Exception):
    """Nothing was started, or nothing more will be; the diagnostics say why.

    `str(error)` is the text that the command line prints.

    Attributes:
        diagnostics: Every mistake and warning that was found, in the order in which it is shown.
        exit_status: The exit status of a command that ends with this error.
        was_shown: Whether the user has already seen the diagnostics, in a question that the user answered with no.
    """

    def __init__(
        self, diagnostics: Iterable[Diagnostic], *, status: int | None = None, was_shown: bool = False
    ) -> None:
        self.diagnostics = tuple(diagnostics)
        self.exit_status = exit_status(self.diagnostics) if status is None else status
        self.was_shown = was_shown
        super().__init__(render(self.diagnostics, form=Format.FULL))


def usage_mistake(message: str, *hints: str, code: str = "P009", notes: tuple[str, ...] = ()) -> Diagnostic:
    """Describe a mistake in what was typed or passed, or in a file or folder that it names."""
    return Diagnostic(code, message, notes=notes, hints=hints, blame=Blame.COMMAND_LINE)


def usage_error(message: str, *hints: str, code: str = "P009", notes: tuple[str, ...] = ()) -> LaunchError:
    """Return the error for one mistake in what was typed or passed."""
    return LaunchError([usage_mistake(message, *hints, code=code, notes=notes)])


def file_error(path: Path | str, error: OSError, *, verb: str = "written") -> LaunchError:
    """Return the error for a file or folder, named by the user, that cannot be written or read.

    Args:
        path: The path as the user typed it.
        error: The reason. Its own path is not shown, because it may be one that the user does not know.
        verb: The participle for what failed, such as `written` or `read`.
    """
    reason = system_reason(error)
    repair = _REPAIRS.get(error.errno or 0, {})
    hints = (repair["read" if verb == "read" else "written"],) if repair else ()
    return usage_error(f"{shown(path, longest=_LONGEST_PATH)} cannot be {verb}: {reason}", *hints, code="P032")
