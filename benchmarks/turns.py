"""Commands whose ranks compute in turns, so that all of them are measured on the same machine at the same time.

    command A   ▄▄▄▄    ▄▄▄▄    ▄▄▄▄
    command B       ▄▄▄▄    ▄▄▄▄    ▄▄▄▄        all ranks of a command that waits are stopped (SIGSTOP)

A shared machine is up to twice as slow for some seconds, and then fast again. What is measured one after the other differs by that much. In
turns of 0.15 s, all commands get an equal part of the slow time and of the fast.

What a rank says of its steps is on the clock on the wall, which goes on while it is stopped. `steps_in_turns` takes this time off.
"""

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

import ttlaunch
from ttlaunch.app.calibrate import copies_of, predict_time
from ttlaunch.app.predict import NotPredicted
from ttlaunch.diagnostics import LaunchError
from ttlaunch.running.metrics.telemetry import RankTelemetry
from ttlaunch.running.metrics.time_prediction import TimePrediction
from ttlaunch.running.readers.recorded import read_run

TURN_S, STEPS_IN_A_TURN = 0.15, 2.5
_LOOK_S = 0.5
_STOPS_WITHIN_S = 60.0
_WARM_UP, _ENOUGH = 4, 15
_CLOCK_S = 1e-5
_RANK = ["-m", "ttlaunch.runtime"]


@dataclass
class Command:
    """A process of which the ranks take part.

    Attributes:
        pid: The process from which the ranks descend.
        ranks: How many it starts.
        turns: When they computed: begin and end, in seconds since the epoch.
    """

    pid: int
    ranks: int
    turns: list[tuple[float, float]] = field(default_factory=list)
    _found: list[psutil.Process] = field(default_factory=list)
    _looked: float = 0.0

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that there are by now; walking the processes takes time, so not after all are known."""
        if len(self._found) < self.ranks and time.monotonic() - self._looked > _LOOK_S:
            self._found, self._looked = [*_ranks_below(self.pid)], time.monotonic()
        for rank in self._found:
            try:
                rank.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def take_turns(commands: Sequence[Command], until: Callable[[], bool], *, step_s: Callable[[], float] = float) -> None:
    """Let one command's ranks compute at a time, until it is enough; afterwards all of them go on.

    Args:
        commands: All of them.
        until: Whether it is enough.
        step_s: How long a step takes, so that a turn lasts long enough for one that no stop cuts; 0: not known.
    """
    try:
        while not until():
            for command in commands:
                for other in commands:
                    if other is not command:
                        other.signal(signal.SIGSTOP)
                command.signal(signal.SIGCONT)
                began = time.time()
                time.sleep(max(TURN_S, STEPS_IN_A_TURN * step_s()))
                command.turns.append((began, time.time()))
    finally:
        for command in commands:
            command.signal(signal.SIGCONT)


class EndlessRun:
    """A run that makes steps until it is told to end.

    Attributes:
        command: Its part in the turns.
    """

    def __init__(self, recipe: str, *, ranks: int, values: Mapping[str, Any]) -> None:
        """Start it."""
        self._before = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ttl-bench-")
        given = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        order = [
            sys.executable,
            "-m",
            "ttlaunch",
            "run",
            recipe,
            "--ranks",
            str(ranks),
            "--runs-dir",
            self._folder.name,
        ]
        options = [word for one in given for word in ("--set", one)]
        self._process = subprocess.Popen(
            [*order, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.command = Command(self._process.pid, ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._folder.cleanup()

    def end(self) -> None:
        """Interrupt it as Ctrl-C does, and wait."""
        if self._process.poll() is None:
            self.command.signal(signal.SIGCONT)
            os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(_STOPS_WITHIN_S)

    def has_ended(self) -> bool:
        """Whether it has ended by itself, which it should not."""
        return self._process.poll() is not None

    def steps_done(self) -> int:
        """How many steps the first rank has made by now."""
        files = [*Path(self._folder.name).glob("*/records/rank-0.progress.jsonl")]
        return files[0].read_bytes().count(b'"kind": "step"') if files else 0

    def step_s(self) -> float:
        """Return about how long a step takes, from the turns in which it made some; 0 before the first."""
        seconds, steps = self.seconds(), self.steps_done()
        return seconds / steps if steps else 0.0

    def seconds(self) -> float:
        """Return the time of its turns since it made its first step."""
        if not self.steps_done():
            self._before = len(self.command.turns)
        return sum(ended - began for began, ended in self.command.turns[self._before :])

    def measured(self) -> "list[TimedRank]":
        """Return what each rank that counts steps has measured; ends the run first."""
        self.end()
        folder = next(Path(self._folder.name).glob("*/plan.json")).parent
        telemetry = read_run(folder).telemetry or ()
        return [steps_in_turns(one, _ends_of(folder, one.rank), self.command.turns) for one in telemetry if one.steps]


class Calibration:
    """A calibration of a plan, made in a process of its own.

    Attributes:
        command: Its part in the turns.
    """

    def __init__(self, recipe: str, *, ranks: int, values: Mapping[str, Any], seconds: float) -> None:
        """Start it; with `seconds` for the rehearsal, in which it is stopped while others have their turns."""
        context = multiprocessing.get_context("spawn")
        self._answer, told = context.Pipe(duplex=False)
        self._process = context.Process(target=_calibrate, args=(told, recipe, ranks, dict(values), seconds))
        self._process.start()
        told.close()
        self.command = Command(self._process.pid or 0, copies_of(ranks))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.command.signal(signal.SIGCONT)
        self._process.join(_STOPS_WITHIN_S)

    def has_ended(self) -> bool:
        """Whether it is over."""
        return not self._process.is_alive() or self._answer.poll()

    def found(self) -> TimePrediction | str:
        """Return what it has found, or why nothing."""
        try:
            answer: TimePrediction | str = self._answer.recv()
        except EOFError:
            return "the process that calibrates has ended"
        return answer


def _calibrate(told: Connection, recipe: str, ranks: int, values: dict[str, Any], seconds: float) -> None:
    try:
        said = predict_time(ttlaunch.plan(recipe, ranks=ranks, set=values), anew=True, seconds=seconds)
    except LaunchError as error:
        told.send(error.diagnostics[0].message)
    else:
        told.send(said.reason if isinstance(said, NotPredicted) else said)


@dataclass(frozen=True)
class TimedRank:
    """The steps of a rank in turns.

    Attributes:
        steps: The seconds of every second step that counts, and of the others: what disturbs the machine for longer than a step meets both.
        phases: By phase, the median of its seconds in steps that no turn cuts.
    """

    rank: int
    steps: tuple[list[float], list[float]]
    phases: dict[str, float]

    @property
    def median(self) -> float:
        return statistics.median(self.steps[0] + self.steps[1])


def steps_in_turns(
    telemetry: RankTelemetry, ends: Mapping[int, float], turns: Sequence[tuple[float, float]]
) -> TimedRank:
    """Return the times of a rank's steps that nothing cuts; if there are few, also of the others, without the time in which it was stopped.

    A step that a stop cuts takes a little longer, because the rank has to fill its caches again.

    Args:
        telemetry: What the rank has measured.
        ends: When each step ended, in seconds since the epoch.
        turns: When the rank was not stopped, in order. Steps outside of them do not count.
    """
    whole, cut = _Halves(([], []), []), _Halves(([], []), [])
    for step in sorted(telemetry.steps.keys() & ends.keys())[_WARM_UP:]:
        took, end = telemetry.steps[step] / 1e6, ends[step]
        begin = end - took
        if not turns or begin < turns[0][0] or end > turns[-1][1]:
            continue
        inside = [max(0.0, min(end, ended) - max(begin, began)) for began, ended in turns]
        into = whole if max(inside) >= took - _CLOCK_S else cut
        into.seconds[len(into.steps) % 2].append(sum(inside))
        into.steps.append(step)
    phases = {
        name: statistics.median(found.get(step, 0) / 1e6 for step in whole.steps)
        for name, found in telemetry.phases.items()
        if whole.steps
    }
    first, second = whole.seconds
    if min(map(len, whole.seconds)) < _ENOUGH:
        first, second = first + cut.seconds[0], second + cut.seconds[1]
    return TimedRank(telemetry.rank, (first, second), phases)


class _Halves(NamedTuple):
    seconds: tuple[list[float], list[float]]
    steps: list[int]


def pooled(runs: Sequence[Sequence[TimedRank]]) -> list[TimedRank]:
    """Return for each rank the steps of all runs of the same plan; the time of a phase is the mean over runs.

    A process keeps the pages of memory that it got, and two runs differ by up to a tenth for that alone. Empty if a run
    has measured nothing.
    """
    found = []
    for same in zip(*runs, strict=False):
        halves = tuple([seconds for one in same for seconds in one.steps[half]] for half in (0, 1))
        phases = {
            name: statistics.fmean(one.phases[name] for one in same)
            for name in same[0].phases
            if all(name in one.phases for one in same)
        }
        found.append(TimedRank(same[0].rank, halves, phases))
    return found


def _ends_of(folder: Path, rank: int) -> dict[int, float]:
    lines = (folder / "records" / f"rank-{rank}.progress.jsonl").read_text(encoding="utf-8").splitlines()
    records: Iterable[dict[str, Any]] = map(json.loads, lines)
    return {one["step"]: one["time"] for one in records if one["kind"] == "step"}


def _ranks_below(pid: int) -> Iterator[psutil.Process]:
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in below:
        try:
            if process.cmdline()[1:3] == _RANK:
                yield process
        except psutil.Error:  # it has ended
            continue
