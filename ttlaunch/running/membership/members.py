"""What the service for workers needs from the membership of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ttlaunch.records.coordinator import Heartbeat
from ttlaunch.records.ranks import AnyProgress

LONGEST_WAIT_S = 20.0
"""How long the answer to a heartbeat waits for an order at most."""
ENDED = "ended"
"""The phase of a heartbeat that says that the worker's process has ended: the last one of its incarnation."""


class Order(StrEnum):
    """What a worker is to do next."""

    GO = "go"  # go on with the step
    PREPARE = "prepare"  # the members change: say what it holds, and wait
    LEAVE = "leave"  # it is no member any more, and ends
    FENCED = "fenced"  # a newer incarnation of it has registered, so this one ends at once


@dataclass(frozen=True)
class Admitted:
    """A worker that has registered.

    Attributes:
        number: Its number for life.
        incarnation: How often a worker with this number has registered, from 1.
        rank: Its rank in the present epoch; None until an epoch with it has begun.
    """

    number: int
    incarnation: int
    rank: int | None = None


@dataclass(frozen=True)
class Orders:
    """The answer to a heartbeat.

    Attributes:
        messages: The orders for the rank, as its socket takes them.
    """

    epoch: int
    order: Order
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Worker:
    """A worker as others see it.

    Attributes:
        rank: Its rank in the present epoch; None if it is no member.
        state: One word, such as `training`.
        since: When it registered, in seconds since 1970.
        last_progress_s: How long ago its progress last changed.
        left: Why it is no longer a member; empty while it is.
    """

    number: int
    incarnation: int
    rank: int | None
    ip_address: str
    port: int | None
    state: str
    name: str = ""
    step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    since: float | None = None
    last_progress_s: float | None = None
    left: str = ""


class NotAdmittedError(Exception):
    """A worker cannot take part now, or cannot leave; the text says why, in one clause."""


class Members(Protocol):
    """The membership of a run. Every method may be called by several threads at once."""

    def register(self, number: int | None, *, address: tuple[str, int], name: str, have_step: int) -> Admitted:
        """Let a worker take part from one of the next boundaries on.

        Args:
            number: The number that it had; its earlier incarnation is fenced. None for a number that no worker has had.
            address: Where it listens for other workers.
            name: What its user calls it; may be empty.
            have_step: The last step whose state it has; 0 for none.

        Raises:
            NotAdmittedError: The membership is frozen, the run is ending, or the number is that of a rank that the run starts itself.
        """

    def leave(self, number: int) -> int:
        """Let a worker leave at the next boundary; returns the last step in which it takes part.

        Raises:
            KeyError: No worker has this number.
            NotAdmittedError: The others could not go on without it.
        """

    def heartbeat(self, number: int, beat: Heartbeat, records: Sequence[AnyProgress], *, wait_s: float) -> Orders:
        """Take what a worker reports, and return its orders, after waiting up to `wait_s` for one.

        A beat of phase `ENDED` says that its process has ended, so that nobody has to wait until its lease is over.

        Raises:
            KeyError: No worker has this number.
        """

    def ready(self) -> Sequence[Worker]:
        """Return the members of the present epoch in the order of their ranks; before the first epoch, all who have registered."""

    def workers(self) -> Sequence[Worker]:
        """Return all who have ever been members or have registered, by number."""

    def epochs(self) -> Sequence[Mapping[str, Any]]:
        """Return the journal of the membership, as it is in `members.jsonl`."""
