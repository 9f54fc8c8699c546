"""Newer weights of a run that is being served while it trains: found as soon as their checkpoint is whole."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.diagnostics import LaunchError
from ttlaunch.running.checkpoints.complete import newest_step

if TYPE_CHECKING:
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.app.run_spec import RunSpec

_LOOK_S = 1.0
_STEP = "step-"


class NewerWeights:
    """Looks for checkpoints that a run has written after the one that is served, and can be served too.

    Attributes:
        served: The checkpoint that is served now.
    """

    def __init__(self, checkpoint: Path, spec_of: "Callable[[Path], RunSpec]") -> None:
        """Begin with a checkpoint.

        Args:
            checkpoint: The one that is served first, in the folder of its run.
            spec_of: Makes the specification of the run that serves the newest checkpoint of a run's folder.
        """
        self._folder, self._spec_of = checkpoint.parent.parent, spec_of
        number = checkpoint.name.removeprefix(_STEP)
        self._seen = int(number) if number.isdecimal() else newest_step(self._folder) or 0
        self._next: RunSpec | None = None
        self.served = checkpoint

    def following(self, outcome: "Outcome") -> "RunSpec | None":
        """Return the specification of the run that serves newer weights, once, after ranks that have ended for them."""
        if outcome.report.exit_status != contract.STATUS_DONE:
            return None
        found, self._next = self._next, None
        if found is not None:
            self.served = Path(found.resume or "")
        return found

    @contextmanager
    def watched(self, tell: Callable[[int], None]) -> Iterator[None]:
        """Call a function with the step of newer weights, once a second until they are served.

        A checkpoint that cannot be served is passed over: those who ask keep the weights that they have.
        """
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(_LOOK_S):
                if self._next is not None or self._find():
                    tell(self._seen)

        threading.Thread(target=look, daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _find(self) -> bool:
        newest = newest_step(self._folder)
        if newest is None or newest <= self._seen:
            return False
        self._seen = newest
        try:
            self._next = self._spec_of(self._folder)
        except LaunchError:
            return False
        return True
