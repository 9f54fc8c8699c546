"""What a server remembers of each visitor, in memory, for a while: never more sessions than a limit, and never a list of them."""

import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

MOST_SESSIONS: Final = 64
LONGEST_IDLE_S: Final = 3600.0

Kept = TypeVar("Kept")
_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")


def draw_id() -> str:
    """Draw the id of a new session: 128 random bits, as 32 hexadecimal digits. Whoever knows it can read the session."""
    return secrets.token_hex(16)


def is_id(text: str) -> bool:
    """Whether a session may have this id; clients may choose their own, as short as they dare."""
    return _ID.fullmatch(text) is not None


class Sessions(Generic[Kept]):
    """Values by session id. The session that was used least recently gives way to a new one; idle ones end after an hour.

    Args:
        new: Makes the value of a new session.
        clock: Seconds, such as `time.monotonic`.
        most: How many sessions are kept.
    """

    def __init__(self, new: Callable[[], Kept], *, clock: Callable[[], float], most: int = MOST_SESSIONS) -> None:
        self._new = new
        self._clock = clock
        self._most = most
        self._kept: OrderedDict[str, tuple[float, Kept]] = OrderedDict()

    def __len__(self) -> int:
        self._forget_idle()
        return len(self._kept)

    def get(self, name: str) -> Kept | None:
        """The value of a session that is there, used now, else `None`."""
        self._forget_idle()
        if name not in self._kept:
            return None
        return self._use(name, self._kept[name][1])

    def open(self, name: str) -> Kept:
        """The value of a session, made if it is not there."""
        found = self.get(name)
        return self._use(name, self._new() if found is None else found)

    def end(self, name: str) -> bool:
        """Forget a session; whether it was there."""
        return self._kept.pop(name, None) is not None

    def _use(self, name: str, value: Kept) -> Kept:
        self._kept[name] = (self._clock(), value)
        self._kept.move_to_end(name)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return value

    def _forget_idle(self) -> None:
        oldest = self._clock() - LONGEST_IDLE_S
        while self._kept and next(iter(self._kept.values()))[0] < oldest:
            self._kept.popitem(last=False)
