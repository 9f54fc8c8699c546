"""What a worker of an elastic run tells the coordinator. Python 3.9 and the standard library only."""

from __future__ import annotations

from ttlaunch.records.parser import Count, Flag, Rank, Seconds, Step, Time, Word, record

MOST_JOINED = 1024
"""How many workers may ever join a run from other machines; they are numbered from the number of ranks in its plan on."""


@record
class MemberReport:
    """What a worker of an elastic run tells the coordinator; `membership/reports.py` makes its events of it.

    Attributes:
        what: `registered`, `answered`, `progressed` or `cut off`.
        follows: Whether it gets the state while the members go on; see `membership/messages.py`.
        shares: The parts of the state that it has: pairs (number of slots in all, those that it has).
        is_ready: Whether it has the mean gradient of its slots for the next step.
        counts: Numbers that grow while the worker makes progress.
        waits: Whether it waits for other workers.
        limit_s: How long what it does now may take; None for a step.
        given: How many bytes of state and of means each other worker has given it, by number.
        taken: How many whole states, and how many means, these were.
        peers: The workers that it waits for, as far as it knows.
        own_steps: How many steps only this worker's weights have, because no average was made since.
    """

    time: Time
    what: Word
    incarnation: Count
    epoch: Count = 0
    applied: Step | None = None
    held: tuple[tuple[Count, Count], ...] = ()
    validated: Step | None = None
    is_done: Flag = False
    shares: tuple[tuple[Count, tuple[Count, ...]], ...] = ()
    is_ready: Flag = False
    pace_s: Seconds | None = None
    host: Word = ""
    address: Word | None = None
    follows: Flag = False
    counts: tuple[Count, ...] = ()
    waits: Flag = False
    limit_s: Seconds | None = None
    given: tuple[tuple[Rank, Count], ...] = ()
    taken: tuple[Count, ...] = ()
    peers: tuple[Rank, ...] = ()
    own_steps: Count = 0
