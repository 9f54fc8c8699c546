"""How often a supervisor and a view poll a run."""

import time

_FIRST_S, _QUICK_S, _USUAL_S = 0.02, 0.1, 0.25
_STARTING_S = 10.0


class Pace:
    """How often to poll a run: more often while it starts than later, when its ranks need the processors.

    A line of a rank passes two polls before it is shown, that of the supervisor and that of the view. So they begin with short waits, and
    each is at most a fifth of the time since the start. A poll takes about a millisecond of a processor (`benchmarks/supervision_overhead.py`).
    """

    def __init__(self) -> None:
        self._since = time.monotonic()

    @property
    def wait_s(self) -> float:
        """Seconds until the next poll."""
        age_s = time.monotonic() - self._since
        return max(_FIRST_S, min(_QUICK_S, age_s / 5)) if age_s < _STARTING_S else _USUAL_S
