"""Between a use case and whoever started it: what it tells, what it asks, and how far it is. It never prints itself."""

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
"""Is told of a host that has answered, and why it cannot be used."""


class Dialogue(Protocol):
    """Whoever started a use case, as the use case sees them."""

    def warn(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Take diagnostics that keep nothing from starting."""

    def recipe_code(self) -> AbstractContextManager[object]:
        """Stand around the import of a `recipe.py`, which may print."""

    def connecting(self, num_hosts: int) -> AbstractContextManager[Answered]:
        """Watch hosts being reached; what it gives is called for each host that has answered."""

    def reading(self, made: "Future[Any]", read: Sequence[int]) -> None:
        """Wait until files have been read: `read` counts files and bytes meanwhile."""

    def sending(self, hosts: Sequence[str]) -> "AbstractContextManager[Callable[[Progress], None] | None]":
        """Watch code being sent; what it gives is called with each host's progress."""

    def passphrase(self, path: Path) -> str | None:
        """Ask for the passphrase of a key; None if there is none to be had."""

    def agrees(self, question: Diagnostic, *, ask: str) -> bool | None:
        """Ask whether to go on all the same; None if nobody can be asked."""

    def gave_up(self, outcomes: "Sequence[Outcome]", diagnostics: Sequence[Diagnostic], *, status: int | None) -> None:
        """Take the reason why the last of several starts is followed by no other; `status` if a signal was the reason."""


class Unattended:
    """Nobody can be asked and nobody looks: warnings are kept for whoever wants to read them afterwards."""

    def __init__(self) -> None:
        self.warnings: list[Diagnostic] = []

    def warn(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.warnings += diagnostics

    def recipe_code(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def connecting(self, num_hosts: int) -> Iterator[Answered]:  # noqa: ARG002 - nobody looks
        yield lambda _host, _error: None

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
        outcomes: "Sequence[Outcome]",  # noqa: ARG002 - they stand in their folders
        diagnostics: Sequence[Diagnostic],
        *,
        status: int | None,  # noqa: ARG002 - the process ends with it
    ) -> None:
        self.warnings += diagnostics


def stop_on_errors(diagnostics: Sequence[Diagnostic], dialogue: Dialogue) -> None:
    """Pass warnings on.

    Raises:
        LaunchError: One of the diagnostics is an error.
    """
    if has_errors(diagnostics):
        raise LaunchError(diagnostics)
    dialogue.warn(diagnostics)
