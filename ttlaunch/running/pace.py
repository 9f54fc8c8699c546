"""How often a run is looked at: quickly while it starts, then so seldom that looking costs its ranks nothing.

A look takes about a millisecond of a processor that ranks keep busy; `benchmarks/supervision_overhead.py` measures it.
"""

import time

_QUICK_S, _USUAL_S = 0.1, 0.25
_STARTING_S = 10.0


class Pace:
    """How long to wait before the next look, from when this was made."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    @property
    def wait_s(self) -> float:
        """In seconds; what happens in the meantime is noticed that much later."""
        return _QUICK_S if time.monotonic() - self._since < _STARTING_S else _USUAL_S
