"""The messages of ranks on a virtual clock: those that belong together, their two ends, and who waits for them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ttlaunch.runtime.comm.findings import Place, Side, unfinished_side
from ttlaunch.runtime.comm.protocol import described
from ttlaunch.runtime.world import Rank


class Form(NamedTuple):
    """What a tensor needs to be received: its type and shape, and the bytes that follow from them."""

    dtype: torch.dtype
    shape: torch.Size
    size: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(tensor.dtype, tensor.shape, tensor.nbytes)


class BatchKey(NamedTuple):
    """The classes of ranks that send and receive, the tag, and whether these are the sends."""

    source: int
    dest: int
    tag: int
    is_send: bool


@dataclass(eq=False, slots=True)
class Batch:
    """Messages that a representative began to send to, or receive from, ranks of one class at one time.

    Attributes:
        posted_s: When they began.
        rank, peer, roles, place: The first of them, for what is told to the user.
        peers: The ranks at the other end.
        sent, tensors: Copies of what is sent, and the tensors themselves, where values matter.
        values: What has been received by a rank that keeps nothing but this, if values matter.
        wait: Who waits for them, or has waited last.
        has_begun: Whether both ends have, so that no more can be entered.
        error: The text of the error that the receiver raises.
    """

    key: BatchKey
    form: Form
    posted_s: float
    rank: Rank
    peer: Rank
    roles: tuple[str, str]
    place: Place
    peers: set[Rank] = field(default_factory=set)
    sent: list[Tensor] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    values: Tensor | None = None
    wait: "Wait | None" = None
    has_begun: bool = False
    is_done: bool = False
    error: str | None = None

    def takes(self, form: Form, peer: Rank, now_s: float) -> bool:
        """Whether another message belongs to these."""
        is_open = not self.has_begun and self.posted_s == now_s and peer not in self.peers
        return is_open and self.form == form

    @property
    def side(self) -> Side:
        what = described(torch.empty(self.form.shape, dtype=self.form.dtype, device="meta"))
        mine, theirs = self.roles
        return Side(self.rank, mine, self.key.is_send, self.peer, theirs, self.key.tag, what, self.place)


class Waits(Protocol):
    """What lets time pass."""

    def wait(self, transfer: "VirtualTransfer") -> None:
        """Let time pass until a transfer is done."""

    def look(self, transfer: "VirtualTransfer") -> None:
        """Let happen what has happened by the time of a transfer's rank."""


@dataclass(eq=False, slots=True)
class VirtualTransfer:
    """One end of a message, as `isend` and `irecv` return it."""

    world: Waits
    rank: Rank
    batch: Batch

    def wait(self) -> None:
        self.world.wait(self)

    def test(self) -> bool:
        self.world.look(self)
        return self.batch.is_done


@dataclass(eq=False, slots=True)
class Wait:
    """What a rank waits for: any of some transfers."""

    transfers: Sequence[VirtualTransfer]
    rank: Rank
    is_over: bool = False
    ended_s: float = 0.0

    def side(self, finished: Collection[Rank]) -> Side:
        """Return the transfer to report if the wait never ends: one whose peer has not ended, if possible."""
        return unfinished_side([transfer.batch.side for transfer in self.transfers], finished)
