"""The exception that carries the diagnostics of an order that ttlaunch refuses or cannot carry out."""

from collections.abc import Iterable
from pathlib import Path

from ttlaunch.diagnostics.diagnostic import Blame, Diagnostic, exit_status
from ttlaunch.diagnostics.render import Format, render
from ttlaunch.diagnostics.suggest import shown

_LONGEST_PATH = 300


class LaunchError(Exception):
    """Nothing was started, or nothing more will be; the diagnostics say why.

    `str()` of it is the text that the command line prints.

    Attributes:
        diagnostics: Every mistake and warning that was found, in the order in which it is shown.
        exit_status: The exit status of a command that ends with this error.
        was_shown: Whether the user has already seen the diagnostics, in a question that was answered with no.
    """

    def __init__(
        self, diagnostics: Iterable[Diagnostic], *, status: int | None = None, was_shown: bool = False
    ) -> None:
        self.diagnostics = tuple(diagnostics)
        self.exit_status = exit_status(self.diagnostics) if status is None else status
        self.was_shown = was_shown
        super().__init__(render(self.diagnostics, form=Format.FULL))


def usage_mistake(message: str, *hints: str, code: str = "P009", notes: tuple[str, ...] = ()) -> Diagnostic:
    """Describe a mistake in what was typed or passed, or in a place that it names."""
    return Diagnostic(code, message, notes=notes, hints=hints, blame=Blame.COMMAND_LINE)


def usage_error(message: str, *hints: str, code: str = "P009", notes: tuple[str, ...] = ()) -> LaunchError:
    """Refuse an order because of one mistake in what was typed or passed."""
    return LaunchError([usage_mistake(message, *hints, code=code, notes=notes)])


def file_error(path: Path | str, error: OSError, *, verb: str = "written") -> LaunchError:
    """Return why a file or folder that the user named cannot be written, or read.

    Args:
        path: As it was typed.
        error: Its own path may be another, of which the user knows nothing.
        verb: What was to be done with it.
    """
    reason = (error.strerror or str(error)).lower()
    return usage_error(f"{shown(path, longest=_LONGEST_PATH)} cannot be {verb}: {reason}", code="P032")
