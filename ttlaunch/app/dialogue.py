"""The interface between a use case and its caller: warnings, questions and progress. A use case never prints by itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ttlaunch.diagnostics import Diagnostic, LaunchError, has_errors

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ttlaunch.app.outcome import Outcome
    from ttlaunch.errors import HostError
    from ttlaunch.hosts.sync.results import Progress

Answered = Callable[[str, "HostError | None"], None]
"""A function that is called with each host that has answered, and why the host cannot be used, or None."""


class Dialogue(Protocol):
    """What a use case can report to its caller, and what it can ask."""

    def warn(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Report diagnostics that do not prevent the start."""

    def recipe_code(self) -> AbstractContextManager[object]:
        """Wrap the import of a `recipe.py`, which may print."""

    def connecting(self, hosts: Sequence[str]) -> AbstractContextManager[Answered]:
        """Show that hosts are being reached; the context's value is called for each host that has answered."""

    def waiting(self, text: str) -> None:
        """Report what is waited for."""

    def reading(self, made: "Future[Any]", read: Sequence[int]) -> None:
        """Wait until `made` is done and show progress: another thread counts files and bytes in `read`."""

    def sending(self, hosts: Sequence[str]) -> "AbstractContextManager[Callable[[Progress], None] | None]":
        """Show that code is being sent; the context's value is called with each host's progress."""

    def passphrase(self, path: Path) -> str | None:
        """Ask for the passphrase of a key; None if nobody gives one."""

    def agrees(self, question: Diagnostic, *, ask: str) -> bool | None:
        """Ask whether to continue; None if nobody can be asked."""

    def gave_up(self, outcomes: "Sequence[Outcome]", diagnostics: Sequence[Diagnostic], *, status: int | None) -> None:
        """Report why a run is not restarted again; `status` is the exit status if a signal ended the restarts."""


class Unattended:
    """A dialogue without a user: questions get no answer, progress is not shown, and warnings are kept in a list."""

    def __init__(self) -> None:
        self.warnings: list[Diagnostic] = []

    def warn(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.warnings += diagnostics

    def recipe_code(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def connecting(self, hosts: Sequence[str]) -> Iterator[Answered]:  # noqa: ARG002 - nobody looks
        yield lambda _host, _error: None

    def waiting(self, text: str) -> None:
        """Do nothing: nobody looks."""

    def reading(self, made: "Future[Any]", read: Sequence[int]) -> None:  # noqa: ARG002 - nobody looks
        from concurrent.futures import wait

        wait([made])

    @contextmanager
    def sending(self, hosts: Sequence[str]) -> "Iterator[Callable[[Progress], None] | None]":  # noqa: ARG002
        yield None

    def passphrase(self, path: Path) -> str | None:  # noqa: ARG002 - nobody can be asked
        return None

    def agrees(self, question: Diagnostic, *, ask: str) -> bool | None:  # noqa: ARG002 - nobody can be asked
        return None

    def gave_up(
        self,
        outcomes: "Sequence[Outcome]",  # noqa: ARG002 - the runs' folders have them
        diagnostics: Sequence[Diagnostic],
        *,
        status: int | None,  # noqa: ARG002 - the process ends with it
    ) -> None:
        self.warnings += diagnostics


def stop_on_errors(diagnostics: Sequence[Diagnostic], dialogue: Dialogue) -> None:
    """Pass warnings to the dialogue, and stop if there is an error.

    Raises:
        LaunchError: One of the diagnostics is an error.
    """
    if has_errors(diagnostics):
        raise LaunchError(diagnostics)
    dialogue.warn(diagnostics)
