"""Newer weights of a run that is being served while it trains: found as soon as their checkpoint is whole."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.running.checkpoints.complete import newest_step

if TYPE_CHECKING:
    from ttlaunch.app.run_spec import RunSpec

_LOOK_S = 1.0


class NewerWeights:
    """Looks for checkpoints that a run has written after the one that is served."""

    def __init__(self, checkpoint: Path, spec_of: "Callable[[Path], RunSpec]") -> None:
        """Begin with a checkpoint.

        Args:
            checkpoint: The one that is served first, in the folder of its run.
            spec_of: Makes the specification of the run that serves another checkpoint.
        """
        self._folder, self._spec_of = checkpoint.parent.parent, spec_of
        self._served = newest_step(self._folder) or 0
        self._is_over = threading.Event()

    @property
    def found(self) -> int | None:
        """The step of the newest checkpoint, if it is newer than the one that is served."""
        newest = newest_step(self._folder)
        return newest if newest is not None and newest > self._served else None

    def next_spec(self) -> "RunSpec | None":
        """Return the specification of the run that serves the newer checkpoint, which from now on is the one served.

        Raises:
            LaunchError: It cannot be served.
        """
        if (newest := self.found) is None:
            return None
        self._served = newest
        return self._spec_of(self._folder)

    def watch(self, tell: Callable[[int], None]) -> None:
        """Call a function, in a thread, once a second while there are newer weights."""

        def look() -> None:
            while not self._is_over.wait(_LOOK_S):
                if (step := self.found) is not None:
                    tell(step)

        threading.Thread(target=look, daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._is_over.set()
