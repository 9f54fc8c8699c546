"""What is wrong with an order to ttlaunch, as an exception that carries the diagnostics."""

from collections.abc import Iterable

from ttlaunch.diagnostics.diagnostic import Diagnostic, exit_status
from ttlaunch.diagnostics.render import Format, render


class LaunchError(Exception):
    """Nothing was started, or nothing more will be, because of what the diagnostics say.

    `str()` of it is the text that the command line prints.

    Attributes:
        diagnostics: Every mistake and warning that was found, in the order in which it is shown.
        exit_status: Of a command that ends with it.
        was_shown: Whether whoever ordered it has seen the diagnostics already, in a question that was answered with no.
    """

    def __init__(
        self, diagnostics: Iterable[Diagnostic], *, status: int | None = None, was_shown: bool = False
    ) -> None:
        self.diagnostics = tuple(diagnostics)
        self.exit_status = exit_status(self.diagnostics) if status is None else status
        self.was_shown = was_shown
        super().__init__(render(self.diagnostics, form=Format.FULL))
