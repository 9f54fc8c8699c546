"""Ranks that run one at a time, in threads or as scripts: when one has to wait, the next in order that can continue runs.

A script is an iterator that stops where its rank has to wait; it needs no thread, so there may be thousands. So every run is equal to the one before it, and the state in which no rank can continue is found as soon as it is reached.
"""

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import NoReturn

from ttlaunch.runtime.world import Rank

Script = Generator[None, None, None]
"""What a rank does, up to where it next has to wait."""


class WorldEndedError(BaseException):
    """Ends a rank whose world has ended because of another rank; not an `Exception`, so that no recipe handles it."""


class Turns:
    """Whose turn it is.

    Attributes:
        finished: The ranks that have ended.
        is_over: Whether all ranks are ended early.
        errors: The exception of each rank that raised one; ranks that ended because of another one are left out.
    """

    def __init__(self, ranks: Sequence[Rank], *, when_stuck: Callable[[], bool]) -> None:
        """Let the first rank begin.

        Args:
            ranks: The ranks, in order.
            when_stuck: Called when no rank can continue and some have not ended: wakes one, or returns False, which ends all.
        """
        self._ranks = sorted(ranks)
        self._when_stuck = when_stuck
        self._turns = {
            rank: _taken_lock() for rank in self._ranks
        }  # passing on a turn takes half as long as with semaphores
        self._scripts: dict[Rank, Script] = {}
        self._ready = list(self._ranks)  # those that can continue, in order
        self.finished: set[Rank] = set()
        self.is_over = False
        self.errors: dict[Rank, BaseException] = {}

    @property
    def unfinished(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank not in self.finished]

    @property
    def can_go_on(self) -> bool:
        """Whether some rank can continue when its turn comes."""
        return bool(self._ready)

    def run(self, functions: Mapping[Rank, Callable[[], None]], scripts: Mapping[Rank, Script] | None = None) -> None:
        """Run a function in a thread of its own, or a script, for every rank until all have ended; call this once.

        As soon as one rank raises an exception, or no rank can continue, all others are ended too.

        Args:
            functions: Those of ranks that have threads.
            scripts: Those of all others.

        Raises:
            ValueError: There is not exactly one function or script for each rank.
        """
        self._scripts = dict(scripts or {})
        if sorted([*functions, *self._scripts]) != self._ranks:
            raise ValueError(f"{len(functions) + len(self._scripts)} functions for {len(self._ranks)} ranks")
        lives = {rank: partial(self._run_rank, rank, function) for rank, function in sorted(functions.items())}
        threads = [threading.Thread(target=life, name=f"rank {rank}", daemon=True) for rank, life in lives.items()]
        for thread in threads:
            thread.start()
        self._pass_on(Rank(-1))
        for thread in threads:
            thread.join()

    def end(self) -> NoReturn:
        """End all ranks before they have done all of their work; the rank whose turn it is calls this."""
        self.is_over = True
        raise WorldEndedError

    def sleep(self, rank: Rank) -> None:
        """Let other ranks run until this one is woken.

        Raises:
            WorldEndedError: The world has ended meanwhile.
        """
        self._pass_on(rank)
        self._turns[rank].acquire()
        self.check()

    def wake(self, rank: Rank) -> None:
        """Let a rank that sleeps continue when its turn comes."""
        insort(self._ready, rank)

    def check(self) -> None:
        """Raise `WorldEndedError` if all ranks are to end."""
        if self.is_over:
            raise WorldEndedError

    def _run_rank(self, rank: Rank, function: Callable[[], None]) -> None:
        self._turns[rank].acquire()
        try:
            if not self.is_over:
                function()
        except WorldEndedError:
            pass
        except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt end a rank just as early
            self.errors[rank] = error
            self.is_over = True
        self.finished.add(rank)
        self._pass_on(rank)

    def _pass_on(self, rank: Rank) -> None:
        """Let the next rank in order that can continue run: its thread, or its script here and now, and then the one after it."""
        while True:
            if not self.is_over and not self._ready and len(self.finished) < len(self._ranks):
                self.is_over = not self._when_stuck()
            if self.is_over:
                self._end_scripts()
                self._ready = self.unfinished
            if not self._ready:
                return
            place = bisect_right(self._ready, rank) % len(self._ready)
            rank = self._ready.pop(place)
            if rank not in self._scripts:
                self._turns[rank].release()
                return
            self._continue(rank)

    def _continue(self, rank: Rank) -> None:
        """Run the script of a rank to where it has to wait."""
        try:
            next(self._scripts[rank])
        except (StopIteration, WorldEndedError):
            self.finished.add(rank)
        except BaseException as error:  # noqa: BLE001  as in `_run_rank`
            self.errors[rank] = error
            self.is_over = True
            self.finished.add(rank)

    def _end_scripts(self) -> None:
        for rank, script in self._scripts.items():
            if rank not in self.finished:
                script.close()
                self.finished.add(rank)


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
