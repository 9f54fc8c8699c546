"""Progress of `ttlaunch prepare`: a bar for each host on a terminal, plain lines everywhere else."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ttlaunch.cli.console import can_redraw, keeping_whole, print_lines, rich_console
from ttlaunch.diagnostics import render_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_EVERY_S = 10.0


class View(Protocol):
    """Shows what happens on this machine and on the hosts; several threads may call it."""

    def here(self, words: str) -> None:
        """Report what this machine is doing."""

    def phase(self, host: str, words: str) -> None:
        """Report that a host has begun a phase."""

    def moved(self, host: str, *, done: int, total: int) -> None:
        """Report a host's progress within its phase."""


@contextmanager
def make_view(hosts: Sequence[str], *, quiet: bool) -> Iterator[View]:
    """Return bars if stderr is a terminal, else a view that prints lines; `quiet` shows nothing (for JSON)."""
    if quiet:
        yield QuietView()
    elif can_redraw(sys.stderr):
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[words]}", markup=False),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
        )
        bars = Progress(*columns, console=rich_console(sys.stderr), transient=True, refresh_per_second=4)
        with keeping_whole(sys.stderr), bars as progress:
            yield BarView(progress, hosts)
    else:
        yield PlainView()


class QuietView:
    """Shows nothing."""

    def here(self, words: str) -> None:
        """Drop it."""

    def phase(self, host: str, words: str) -> None:
        """Drop it."""

    def moved(self, host: str, *, done: int, total: int) -> None:
        """Drop it."""


class BarView:
    """Draws a bar for each host, and prints messages about this machine above the bars."""

    def __init__(self, progress: "Progress", hosts: Sequence[str]) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {
            host: progress.add_task(host, total=1, words="connected", amount="") for host in hosts
        }
        self._words: dict[str, str] = {}

    def here(self, words: str) -> None:
        self._progress.console.print(words)

    def phase(self, host: str, words: str) -> None:
        if self._words.get(host) != words:
            self._words[host] = words
            completed = 1 if words == "ready" else 0
            self._progress.update(self._tasks[host], total=1, completed=completed, words=words, amount="")

    def moved(self, host: str, *, done: int, total: int) -> None:
        amount = f"{render_size(done)} of {render_size(total)}"
        self._progress.update(self._tasks[host], completed=done, total=total, amount=amount)


class PlainView:
    """Prints a line when a host begins a phase, and another every ten seconds while the phase lasts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: dict[str, str] = {}
        self._said: dict[str, float] = {}

    def here(self, words: str) -> None:
        with self._lock:
            self._write(words)

    def phase(self, host: str, words: str) -> None:
        with self._lock:
            if self._words.get(host) != words:
                self._words[host] = words
                self._said[host] = time.monotonic()
                self._write(f"{host}: {words}")

    def moved(self, host: str, *, done: int, total: int) -> None:
        with self._lock:
            if time.monotonic() - self._said.get(host, 0.0) > _LINE_EVERY_S:
                self._said[host] = time.monotonic()
                self._write(f"{host}: {self._words.get(host, '')} {render_size(done)} of {render_size(total)}")

    def _write(self, line: str) -> None:
        print_lines([line], to=sys.stderr)
