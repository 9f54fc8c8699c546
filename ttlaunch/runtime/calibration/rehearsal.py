"""Rehearse the steps of a plan: all of its ranks run in turns in this process, with values, and each has a clock of its own.

Only one rank runs at a time, so the processor time between two messages is what the rank itself has computed, whatever the other
ranks do. A rank's clock advances by that time; messages and waits take what the `VirtualClock` makes of the measured link. So a step
takes on these clocks what it would take if every rank had a core.

On one machine no network carries messages: who receives one copies it, and cannot compute meanwhile. So the clock of the receiver is charged
for each byte, once it waits for the message, and both ends for half of the latency each, as both have called the transport.

Ranks that run at the same time have slow moments of their own, and at each message the one waits for the other. Here they run within milliseconds
after one another, and are slow together. So each rank but the first is charged with what the same piece of a step took it some time ago (`_Echo`).

Processor time is charged and not elapsed time: it is the same while other programs have the core. Elapsed time is kept beside it and
says how busy the machine was.
"""

import os
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ttlaunch.runtime.calibration.concurrency import Concurrency
from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.comm.virtual_clock import Link, Spent, VirtualClock
from ttlaunch.runtime.comm.virtual_world import VirtualCommunicator, VirtualOutcome, VirtualWorld
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.early_stop import make_early_stop
from ttlaunch.runtime.entry import read_checked_corpus, read_config
from ttlaunch.runtime.telemetry.memory import TensorOwners
from ttlaunch.runtime.telemetry.records import ProgressWriter
from ttlaunch.runtime.telemetry.traffic_counter import FORWARD, TrafficCounter
from ttlaunch.runtime.world import Rank, World
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.recipe.sections import ConfigFile

_FEWEST_STEPS = 4
_PATIENCE = 2.0
"""How many times as long as it was given the rehearsal takes at most, if too few steps are done by then."""
_MOST_STEPS = 2000
_DECIDES = 0.2
"""After which part of the time the copies decide how many of them go on."""
_ECHO_S, _ECHOES = 0.3, 10
"""How much longer ago than those of the rank before are the times with which a rank is charged, and after how many ranks they begin anew:
nothing is older than the rehearsal."""
_COLD_S = 1e-4
"""A rank that has computed for so long since its last message has something else in its caches."""
_AT_ONCE = Link(0.0, 1e12)
"""What messages cost on the virtual clock, where both ends are charged for them."""


@dataclass(frozen=True)
class MessageCosts:
    """What a message costs the cores of its two ranks.

    Attributes:
        first_s: One that follows computing, of which each rank has half.
        again_s: One that follows another one, as when a tensor goes to several ranks.
        bytes_per_s: What its receiver copies in a second.
    """

    first_s: float
    again_s: float
    bytes_per_s: float


def rehearse(
    world: World,
    costs: MessageCosts,
    *,
    seconds: float,
    folder: Path,
    copy: int = 0,
    copies: int = 1,
    longest_s: float | None = None,
) -> dict[str, Any]:
    """Run every role with values until the time is over, and return what each step of each rank has taken; or raise what a role raises.

    Args:
        world: The plan.
        costs: What messages between two ranks of this machine cost.
        seconds: The time for steps and what comes before the first one.
        folder: Where the ranks write their records.
        copy: Which copy of the ranks this is, of as many as rehearse at the same time.
        copies: How many those are; if fewer ranks of the plan compute at a time, the last ones end early.
        longest_s: After how many seconds it ends even with too few steps; None: after twice `seconds`.

    Returns:
        The fields of a `RehearsalEnd`, without its link.
    """
    cfg, corpus, trainer = _read(world)
    torch.set_num_threads(cfg.device_config.threads_per_rank)
    clock = VirtualClock(ranks := tuple(map(Rank, range(world.size))))
    virtual = VirtualWorld(world.roles, clock, _AT_ONCE)
    timing = _timing(cfg, seconds, longest_s := longest_s or _PATIENCE * seconds, end=virtual.end)
    watched = Concurrency(clock, ranks, copy, copies, decides_at=timing.deadline - (1 - _DECIDES) * seconds)
    (records := folder / f"copy-{os.getpid()}").mkdir()
    timed = {rank: _TimedRank(rank, clock, timing=timing, concurrency=watched, costs=costs) for rank in ranks}

    def live(rank: Rank) -> None:
        (one := timed[rank]).resume()
        ctx = RankContext(
            world=world,
            rank=rank,
            communicator=_TimedCommunicator(virtual.communicator(rank), one),
            records=ProgressWriter(records, rank),
            device=torch.device("cpu"),
            corpus=corpus,
            early_stop=make_early_stop(cfg, world.start),
            traffic=one.traffic,
        )
        getattr(trainer, world.roles[rank])(cfg, ctx)

    outcome = virtual.run({rank: partial(live, rank) for rank in timed})
    findings = [] if watched.is_spare else _findings(outcome, timed, longest_s=longest_s)
    return {"ranks": _ranks(outcome, world, timed), "findings": findings, "is_spare": watched.is_spare}


def _read(world: World) -> tuple[ConfigFile, Any, ModuleType]:
    """Return the configuration of a plan, its data, and the module with its roles."""
    recipe = import_recipe_module(world.recipe_folder, "recipe").RECIPE
    trainer = import_recipe_module(world.recipe_folder, world.trainer)
    return read_config(recipe, world.config), read_checked_corpus(recipe, world), trainer


@dataclass(frozen=True)
class _Timing:
    """How ranks are timed.

    Attributes:
        now: The clock that charges: processor time, but elapsed time if a rank computes with several threads.
        deadline: When the rehearsal ends if it has enough steps.
        last: When it ends in any case.
        end: Ends it.
    """

    now: Callable[[], float]
    deadline: float
    last: float
    end: Callable[[], Any]


def _timing(cfg: ConfigFile, seconds: float, longest_s: float, *, end: Callable[[], Any]) -> _Timing:
    now = time.thread_time if cfg.device_config.threads_per_rank == 1 else time.perf_counter
    began = time.monotonic()
    return _Timing(now, deadline=began + seconds, last=began + longest_s, end=end)


def _ranks(outcome: VirtualOutcome, world: World, timed: "Mapping[Rank, _TimedRank]") -> list[dict[str, Any]]:
    """Return what each rank has taken, or raise what one has raised."""
    for error in outcome.errors.values():
        raise error
    return [{"role": world.roles[rank], "steps": one.settled_steps()} for rank, one in sorted(timed.items())]


def _findings(outcome: VirtualOutcome, timed: "Mapping[Rank, _TimedRank]", *, longest_s: float) -> list[str]:
    """Return why the steps cannot be used; none if they can."""
    found = [finding.message for finding in outcome.findings]
    if not found and not any(one.settled_steps() for one in timed.values()):
        found = [f"no rank has done {_FEWEST_STEPS} steps within {longest_s:.0f} s"]
    return found


class _TimedRank:
    """Times what one rank computes; stands where a rank that is profiled has its profiler."""

    is_active = False

    def __init__(
        self, rank: Rank, clock: VirtualClock, *, timing: _Timing, concurrency: Concurrency, costs: MessageCosts
    ) -> None:
        self._costs, self._concurrency = costs, concurrency
        self._computed_s = 0.0  # since the last message
        self._waits_since_s = 0.0
        self.owners = TensorOwners()
        self.traffic = _TimedTraffic(self)
        self._rank, self._clock, self._timing = rank, clock, timing
        self._since = self._elapsed_since = self._phase_since_s = 0.0
        self._before, self._step_began = Spent(), 0.0
        self._phases: dict[str, float] = defaultdict(float)
        self._elapsed_s, self._passes = 0.0, 0
        self._steps: list[dict[str, Any]] = []
        self._begun: list[float] = []
        self._echo = _Echo(_ago_s(rank))

    def settle(self) -> None:
        """Charge the rank for what it has computed since it was last charged."""
        now, elapsed = self._timing.now(), time.perf_counter()
        self._computed_s += now - self._since
        self._clock.compute(self._rank, self._echo.instead_of(now - self._since))
        self._elapsed_s += elapsed - self._elapsed_since
        self._since, self._elapsed_since = now, elapsed

    def resume(self) -> None:
        """Charge from now on: what came before was another rank's work, or the world's."""
        self._since, self._elapsed_since = self._timing.now(), time.perf_counter()

    def has_sent(self) -> None:
        """Charge the rank for a message that it has begun to send."""
        self._clock.carry(self._rank, self._cost_s() / 2)

    def begin_wait(self) -> None:
        """Charge the rank for what it has computed; it now waits for a message."""
        self.settle()
        self._waits_since_s = self._clock.now_s(self._rank)

    def has_received(self, tensor: Tensor) -> None:
        """Charge the rank for a message that it has received; while it waited, it has looked for it again and again."""
        if self._clock.now_s(self._rank) - self._waits_since_s >= _COLD_S:
            self._computed_s = 0.0
        self._clock.carry(self._rank, self._cost_s() / 2 + tensor.nbytes / self._costs.bytes_per_s)

    def _cost_s(self) -> float:
        """Return what a message costs at both ends, if it is at the other one as it is here."""
        is_cold, self._computed_s = self._computed_s >= _COLD_S, 0.0
        return self._costs.first_s if is_cold else self._costs.again_s

    def enter(self, phase: str) -> None:
        """Leave the present phase, whose time is what the clock shows more than at its beginning, waits included."""
        self.settle()
        now_s = self._clock.now_s(self._rank)
        self._phases[self.traffic.phase] += now_s - self._phase_since_s
        self._phase_since_s = now_s
        if phase == FORWARD:
            self._passes += 1
            if time.monotonic() > self._timing.last:
                self._timing.end()

    def begin_step(self, _step: int) -> None:
        self.settle()
        self._echo.begin_step()
        self._before = self._clock.spent(self._rank)
        self._step_began = time.monotonic()
        self._phases.clear()
        self._phase_since_s = self._clock.now_s(self._rank)
        self._elapsed_s, self._passes = 0.0, 0

    def end_step(self, _step: int) -> Mapping[str, int]:
        self.settle()
        spent = self._clock.spent(self._rank).since(self._before)
        self._begun.append(self._step_began)
        self._concurrency.note(self._rank)
        self._steps.append(
            {
                "all_s": spent.all_s,
                "exposed_s": spent.exposed_s,
                "waiting_s": spent.waiting_s,
                "phases": dict(self._phases),
                "elapsed_s": self._elapsed_s,
                "passes": self._passes,
            }
        )
        is_enough = len(self._steps) >= _FEWEST_STEPS
        if (
            self._concurrency.is_spare
            or (is_enough and time.monotonic() > self._timing.deadline)
            or len(self._steps) >= _MOST_STEPS
        ):
            self._timing.end()
        return {}

    def mark(self, _name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        """Leave nothing behind."""

    def settled_steps(self) -> list[dict[str, Any]]:
        """Return the steps without the first quarter, in which memory is allocated and sizes are tried; none if there are too few.

        Nor do those count beside which copies computed that have ended since.
        """
        steps = self._steps
        first = max(1, len(steps) // 4, bisect_left(self._begun, self._concurrency.counts_from))
        return steps[first:] if len(steps) >= _FEWEST_STEPS - 1 else []


def _ago_s(rank: Rank) -> float:
    """Return how long ago the times are with which a rank is charged."""
    return _ECHO_S * (rank % _ECHOES)


class _Echo:
    """What the pieces of a rank's steps took some time ago."""

    def __init__(self, ago_s: float) -> None:
        """Remember them, and return those of `ago_s` seconds ago; 0: those of now."""
        self._ago_s = ago_s
        self._steps: deque[tuple[float, list[float]]] = deque()
        self._now: list[float] = []
        self._past: list[float] = []

    def begin_step(self) -> None:
        """The pieces of another step follow."""
        now = time.monotonic()
        self._now = []
        self._steps.append((now, self._now))
        while len(self._steps) > 1 and self._steps[1][0] <= now - self._ago_s:
            self._steps.popleft()
        began, self._past = self._steps[0]
        if began > now - self._ago_s:
            self._past = []

    def instead_of(self, took: float) -> float:
        """Return what this piece took then; `took` if that is not known."""
        place = len(self._now)
        self._now.append(took)
        return self._past[place] if place < len(self._past) else took


class _TimedTraffic(TrafficCounter):
    """Charges a rank at every change of its phase, so that each phase has its own time."""

    def __init__(self, timed: _TimedRank) -> None:
        self._timed: _TimedRank | None = None
        super().__init__(profile=timed)
        self._timed = timed

    def enter(self, phase: str, *, micro_batch: int | None = None) -> None:
        if self._timed is not None:
            self._timed.enter(phase)
        super().enter(phase, micro_batch=micro_batch)


class _TimedPending:
    """A transfer under way whose wait charges the rank, first for what it has computed and then for what it has received."""

    def __init__(self, pending: Pending, timed: _TimedRank, *, received: Tensor | None = None) -> None:
        self.pending = pending
        self._timed = timed
        self._received = received

    def wait(self) -> None:
        self._timed.begin_wait()
        self.pending.wait()
        received, self._received = self._received, None
        if received is not None:
            self._timed.has_received(received)
        self._timed.resume()

    def test(self) -> bool:
        return self.pending.test()


class _TimedCommunicator:
    """Charges a rank for what it has computed whenever it sends, receives or waits, and for the messages themselves."""

    def __init__(self, communicator: VirtualCommunicator, timed: _TimedRank) -> None:
        self.rank = communicator.rank
        self._communicator = communicator
        self._timed = timed

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        self._timed.settle()
        self._communicator.send(tensor, dest=dest, tag=tag)
        self._timed.has_sent()
        self._timed.resume()

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        self._timed.begin_wait()
        self._communicator.recv(tensor, source=source, tag=tag)
        self._timed.has_received(tensor)
        self._timed.resume()

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        self._timed.settle()
        pending = self._communicator.isend(tensor, dest=dest, tag=tag)
        self._timed.has_sent()
        self._timed.resume()
        return _TimedPending(pending, self._timed)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        self._timed.settle()
        pending = self._communicator.irecv(tensor, source=source, tag=tag)
        self._timed.resume()
        return _TimedPending(pending, self._timed, received=tensor)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        self._timed.settle()
        plain = [one.pending if isinstance(one, _TimedPending) else one for one in pending]
        found = self._communicator.wait_any(plain, timeout_s=timeout_s)
        self._timed.resume()
        return found
