"""Which ranks of a plan have the same code, which three of them run for all, and how a rank repeats it on a virtual clock."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ttlaunch.runtime.alike import first_classes
from ttlaunch.runtime.comm.counting import CountingCommunicator
from ttlaunch.runtime.comm.programs import Author, Compute, Note, Program, Shares, Step, Update, repeat
from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.comm.turns import Script
from ttlaunch.runtime.comm.virtual_world import VirtualWorld
from ttlaunch.runtime.hollow import Found, Hollow
from ttlaunch.runtime.telemetry.memory import TensorOwners
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.timed_steps import TimedSteps
from ttlaunch.runtime.work import spending
from ttlaunch.runtime.world import Rank

_LEAST = 4
"""The code of three ranks runs, so fewer of them gain nothing."""

Live = Callable[[Rank, Communicator, TrafficCounter], None]
"""Runs the code of a rank with a communicator and a counter."""


def ranks_of_code(roles: Sequence[str], shares: Sequence[Hashable]) -> list[tuple[Rank, ...]]:
    """Return the groups of ranks whose code is probably the same: those of one role with equal shares of the data.

    How fast they are, and what happens to them, does not matter: each repeats the code at times of its own.
    """
    return [ranks for ranks in first_classes(roles, shares) if len(ranks) >= _LEAST]


def write_program(
    ranks: Sequence[Rank],
    live: Live,
    *,
    carries: Callable[[Tensor], bool],
    flops_per_s: float,
    known: dict[Hashable, Found],
) -> Program:
    """Return the program of some ranks; their code runs while they repeat it.

    Args:
        ranks: The ranks.
        live: Runs the code of one.
        carries: Whether the values of a tensor matter.
        flops_per_s: How many floating-point operations a rank that is not slow computes in a second.
        known: What operations return.
    """

    def write(author: Author) -> None:
        spend = spending(lambda seconds: author.deeds.append(Compute(seconds)), flops_per_s=flops_per_s)
        with Hollow(known=known, spend=spend):
            live(author.rank, *_written(author, _WrittenCounter(author)))

    return Program(ranks, write, carries=carries)


def author_of(
    rank: Rank,
    live: Live,
    *,
    carries: Callable[[Tensor], bool],
    flops_per_s: float,
    known: dict[Hashable, Found],
) -> Author:
    """Return what runs the code of one rank of those that own shares of unequal size; arguments as for `write_program`."""

    def write(author: Author) -> None:
        spend = spending(
            lambda seconds: author.deeds.append(Compute(seconds)),
            flops_per_s=flops_per_s,
            update=lambda values: author.deeds.append(Update(values)),
        )
        counter = _WrittenCounter(author, has_shares=True)
        author.operation = lambda: counter.label
        with Hollow(known=known, spend=spend):
            live(author.rank, *_written(author, counter))

    return Author(rank, write, carries=carries)


def repeat_virtually(program: Program, rank: Rank, *, virtual: VirtualWorld, timed: TimedSteps) -> Script:
    """Do what a program says for a rank, at its times; yield where the rank has to wait."""

    def step(deed: Step) -> None:
        if deed.begins:
            timed.begin_step(deed.step)
        else:
            timed.end_step(deed.step)

    return repeat(program, rank, virtual, step=step, note=lambda facts: timed.traffic.note(**facts))


def _written(author: Author, counter: TrafficCounter) -> tuple[Communicator, TrafficCounter]:
    return _Uncounted(author.communicator, counter), counter


class _Uncounted(CountingCommunicator):
    """Counts nothing, which takes twice as long as to write a message down: what the ranks send is counted where they repeat it."""

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        self._communicator.send(tensor, dest=dest, tag=tag)

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        self._communicator.recv(tensor, source=source, tag=tag)

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        return self._communicator.isend(tensor, dest=dest, tag=tag)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        return self._communicator.irecv(tensor, source=source, tag=tag)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        return self._communicator.wait_any(pending, timeout_s=timeout_s)


class _WrittenCounter(TrafficCounter):
    """Writes down what is noted, so that it is known at each moment, as with code that runs."""

    def __init__(self, author: Author, *, has_shares: bool = False) -> None:
        """Begin without facts; shares are written down as numbers of all ranks, or as those of this rank."""
        super().__init__(profile=_WrittenSteps(author))
        self._author, self._writes_shares = author, has_shares

    def note_shares(self, place: int, /, **facts: Sequence[int]) -> None:
        """Write down the numbers of all ranks, or note those of this one."""
        if self._writes_shares:
            self._author.deeds.append(Shares(place, tuple((name, tuple(numbers)) for name, numbers in facts.items())))
        else:
            super().note_shares(place, **facts)

    def note(self, **facts: int) -> None:
        """Write facts down, and note them."""
        self._author.deeds.append(Note(tuple(facts.items())))
        super().note(**facts)


class _WrittenSteps:
    """Writes down when steps begin and end; stands where a rank that is profiled has its profiler."""

    is_active = False

    def __init__(self, author: Author) -> None:
        self.owners = TensorOwners()
        self._author = author

    def begin_step(self, step: int) -> None:
        self._author.deeds.append(Step(step, begins=True))

    def end_step(self, step: int) -> dict[str, int]:
        self._author.deeds.append(Step(step, begins=False))
        return {}

    def mark(self, _name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        """Leave nothing behind."""
