"""Try to reach a lost host again, with growing pauses, until it is back or the run ends."""

import threading
import time
from collections.abc import Callable

from ttlaunch.errors import HostError, Trouble
from ttlaunch.running.agents.host_link import HostLink

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
_CONNECT_S, _LAST_CONNECT_S = 3.0, 1.0
_STEADY_S = 60.0  # a host that is lost again sooner is tried less and less often
_FINAL = {
    Trouble.ENDED,
    Trouble.VERSION,
}  # the Slurm job has ended, or the package has been replaced: trying again is no use


class ReturningHost:
    """The attempts to start an agent again on one lost host, in a thread of their own.

    Attributes:
        over: Set when there will be no further attempt.
    """

    def __init__(
        self,
        host: str,
        start: Callable[[float], HostLink],
        note: Callable[..., None],
        *,
        pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Begin with the first attempt.

        Args:
            host: The host's name.
            start: Connects within so many seconds, and starts an agent there; raises `HostError` if that fails.
            note: Adds an event to the run's history; called with the event's name, and its values by keyword.
            pause_s: The pause after the first attempt; it doubles from one attempt to the next.
        """
        self.over = threading.Event()
        self._host, self._start, self._note = host, start, note
        self._first_pause_s = pause_s
        self._stopped = threading.Event()
        self._link: HostLink | None = None
        self._back_at: float | None = None
        threading.Thread(target=self._try_again_and_again, daemon=True).start()

    def stop(self) -> None:
        """End the attempts; in place of a pause that is interrupted, there is a last quick one."""
        self._stopped.set()

    def take(self) -> HostLink | None:
        """Return the link to the new agent, once; None before the host is back, and from then on."""
        link, self._link = self._link, None
        return link

    @property
    def next_pause_s(self) -> float:
        """Seconds between the attempts if this host is lost again now."""
        is_steady = self._back_at is None or time.monotonic() - self._back_at > _STEADY_S
        return FIRST_PAUSE_S if is_steady else min(2 * self._first_pause_s, LONGEST_PAUSE_S)

    def _try_again_and_again(self) -> None:
        began, pause_s, refused = time.monotonic(), self._first_pause_s, ""
        try:
            while True:
                is_last = self._stopped.is_set()
                try:
                    link = self._start(_LAST_CONNECT_S if is_last else _CONNECT_S)
                except HostError as error:
                    if error.evidence != refused:
                        refused = error.evidence
                        self._note("host_stays_away", host=self._host, reason=refused)
                    # An order to end during an attempt makes that one the last, one during a pause allows another.
                    if is_last or error.trouble in _FINAL or self._stopped.is_set():
                        return
                    self._stopped.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                else:
                    self._note("host_returned", host=self._host, after_s=round(time.monotonic() - began, 1))
                    self._back_at, self._link = time.monotonic(), link
                    return
        finally:
            self.over.set()
