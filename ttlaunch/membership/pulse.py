"""Which members have stopped making progress: from what they report, by the coordinator's clock alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

LEAST_S = 5.0
"""A member counts as hung after this many seconds without progress at the least."""
SILENT_S = 15.0
"""After so long without a report a process that may take long counts as lost: unless it is stopped, it reports twice a second all the same."""
_MEDIANS = 4.0  # and after this many times the median step
_STEPS = 64  # of which the median is taken


def limit_for(median_s: float) -> float:
    """Return after how many seconds without progress something counts as hung that usually takes `median_s`."""
    return max(LEAST_S, _MEDIANS * median_s)


@dataclass(frozen=True)
class Beat:
    """What a member last reported of itself.

    Attributes:
        counts: Whatever grows while it makes progress: steps, micro-batches, bytes.
        waits: Whether it waits for other members; then it is not the one that holds the run up.
        limit_s: How long what it does now may take, such as an import or a checkpoint; None for a step.
    """

    counts: tuple[int, ...]
    waits: bool
    limit_s: float | None = None


class Pulse:
    """Decides which members are late.

    The deadline of a member runs from its last *change*: a process whose heart beats while its step hangs is late, too. A
    member that waits for others is not, as long as it goes on reporting that it waits.
    """

    def __init__(self, *, hang_s: float | None = None) -> None:
        """Know no member; `hang_s` replaces the limit that follows from the steps."""
        self._hang_s = hang_s
        self._changed: dict[int, float] = {}
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Beat] = {}
        self._steps_s: list[float] = []

    @property
    def hang_s(self) -> float:
        """Seconds without progress after which a member in a step is late."""
        if self._hang_s is not None:
            return self._hang_s
        return limit_for(median(self._steps_s)) if self._steps_s else LEAST_S

    def note_step(self, seconds: float) -> None:
        """Take the time of a step into account."""
        self._steps_s = [*self._steps_s[1 - _STEPS :], seconds]

    def note(self, number: int, beat: Beat, now: float) -> None:
        """Take what a member reports; `now` is the time of this process's monotonic clock, in seconds."""
        if beat != self._beats.get(number):
            self._changed[number] = now
        self._heard[number], self._beats[number] = now, beat

    def forget(self, number: int) -> None:
        """Expect nothing of a member any more, which is gone."""
        for known in (self._changed, self._heard, self._beats):
            known.pop(number, None)

    def restart(self, numbers: Iterable[int], now: float) -> None:
        """Let the deadlines of these members, and of no others, begin now, as an epoch does."""
        self._changed = dict.fromkeys(numbers, now)
        self._heard = dict(self._changed)
        self._beats = {number: beat for number, beat in self._beats.items() if number in self._changed}

    def excuse(self, seconds: float, now: float) -> None:
        """Count the last so many seconds for no member: whoever watches them did not run, and maybe nothing on its machine did."""
        for times in (self._changed, self._heard):
            times.update({number: min(now, time + seconds) for number, time in times.items()})

    def late(self, now: float) -> Mapping[int, float]:
        """Return the members that hold the run up, each with the seconds since its last progress."""
        found, hang_s = {}, self.hang_s
        for number, changed in self._changed.items():
            beat = self._beats.get(number)
            limit_s = hang_s if beat is None or beat.limit_s is None else beat.limit_s
            heard = self._heard[number]
            since = heard if beat is not None and beat.waits else changed
            if now - since > limit_s:
                found[number] = now - since
            elif now - heard > max(SILENT_S, hang_s):
                found[number] = now - heard
        return found
