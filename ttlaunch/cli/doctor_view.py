"""Show the hosts that `ttlaunch doctor` checks: a live table on a terminal, and a line for each host otherwise."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ttlaunch.app.examine import Examination
from ttlaunch.cli.console import can_redraw, keeping_whole, rich_console
from ttlaunch.diagnostics import counted
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.hosts.doctor.facts import HostFacts
from ttlaunch.hosts.doctor.network import NetworkChoice
from ttlaunch.hosts.doctor.pairs import Pair

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_GIBIBYTE = 1024**3
_GIGABIT = 1e9
_USUAL = {"devices": {"", "none"}, "clock": {"", "same"}}
"""Columns that are left out of the table while all their cells have one of these texts."""

_STYLES = {"ready": "green", "warning": "yellow", "not ready": "bold red"}


class View:
    """Draws a live table of the hosts if stdout is a terminal, else nothing."""

    def __init__(self, live: "Live | None" = None) -> None:
        self._live = live

    def draw(self, known: Examination) -> None:
        if self._live is not None:
            self._live.update(_table(known), refresh=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop drawing while the user types a passphrase."""
        if self._live is not None:
            self._live.stop()
        try:
            yield
        finally:
            if self._live is not None:
                self._live.start()


@contextmanager
def make_view(*, quiet: bool) -> Iterator[View]:
    """Return a view that draws a table if stdout is a terminal; with `quiet`, it draws nothing."""
    if quiet or not can_redraw(sys.stdout):
        yield View()
        return
    from rich.live import Live

    with keeping_whole(sys.stdout), Live(console=rich_console(sys.stdout), refresh_per_second=8) as live:
        yield View(live)


def _headings(known: Examination) -> tuple[str, ...]:
    engine = known.engine.title
    return ("host", "state", "Python", "torch", engine, "CPU", "devices", "memory", "disk", "clock", "network")


def cells(host: str, known: Examination) -> tuple[str, ...]:
    """Return the cells of a host's row, one for each column."""
    state = known.states.get(host, "")
    facts = known.facts.get(host)
    if facts is None:
        return (host, state, *[""] * (len(_headings(known)) - 2))
    version = known.engine.version_in(facts.mpi.says) if facts.mpi else None
    clock = facts.clock.surely_off_s
    return (
        host,
        state,
        ".".join(map(str, facts.python.version)) if facts.python else "none",
        facts.python.packages.get("torch", "none") if facts.python else "",
        ".".join(map(str, version)) if version else "none",
        f"{facts.cpu.usable:g} {facts.cpu.capability}" if facts.cpu else "",
        _devices(facts),
        f"{facts.memory.available_bytes / _GIBIBYTE:.0f}/{facts.memory.total_bytes / _GIBIBYTE:.0f} GiB"
        if facts.memory
        else "",
        f"{facts.disk.free_bytes / _GIBIBYTE:,.1f} GiB" if facts.disk else "",
        f"{clock:+.1f} s" if clock else "same",
        _network(host, known.choice),
    )


def _devices(facts: HostFacts) -> str:
    if facts.devices is None:
        return ""
    parts = [f"{len(facts.devices.tenstorrent)} tt"] if facts.devices.tenstorrent else []
    parts += [f"{len(facts.devices.nvidia)} NVIDIA"] if facts.devices.nvidia else []
    return ", ".join(parts) or "none"


def _network(host: str, choice: NetworkChoice | None) -> str:
    if choice is None or host not in choice.interfaces:
        return ""
    interface = choice.interfaces[host]
    return f"{interface.name} {interface.address.ip}"


def _table(known: Examination) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    headings = _headings(known)
    rows = [cells(host, known) for host in known.hosts]
    kept = [
        number
        for number, heading in enumerate(headings)
        if heading not in _USUAL or {row[number] for row in rows} - _USUAL[heading]
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number in kept:
        table.add_column(headings[number], overflow="fold", no_wrap=headings[number] in {"host", "state"})
    for row in rows:
        style = {"state": _STYLES.get(known.states.get(row[0], ""), "dim")}
        table.add_row(*(Text(clean(row[number]), style=style.get(headings[number], "")) for number in kept))
    return Group(table, *([Text(clean(known.step), style="dim")] if known.step else []))


def render_lines(known: Examination) -> list[str]:
    """Render one line for each host."""
    lines = []
    for host in known.hosts:
        name, state, *rest = cells(host, known)
        error = known.errors.get(host)
        state = f"{state}: {error.evidence}" if error else state
        facts = [f"{heading} {text}" for heading, text in zip(_headings(known)[2:], rest, strict=True) if text]
        lines.append(f"{name}: {state}" + (f"; {', '.join(facts)}" if facts else ""))
    return lines


def render_pairs(pairs: Sequence[Pair]) -> list[str]:
    """Render how many pairs of hosts can connect, and their latency and bandwidth if measured."""
    through = [pair for pair in pairs if pair.problem is None]
    if not pairs:
        return []
    text = f"{len(through)} of {counted(len(pairs), 'one-way connection')} between hosts work"
    measured = [
        (p.bytes_per_s, p.latency_s, p) for p in through if p.bytes_per_s is not None and p.latency_s is not None
    ]
    if not measured:
        return [text]
    lines = [text, f"{'from':16} {'to':16} {'latency':>10} {'bandwidth':>14}"]
    for bytes_per_s, latency_s, pair in measured:
        speed = f"{bytes_per_s * 8 / _GIGABIT:.2f} Gbit/s"
        lines.append(f"{pair.source:16} {pair.target:16} {latency_s * 1e6:>7.0f} us {speed:>14}")
    slowest = min(measured, key=lambda one: one[0])
    lines.append(f"slowest: from {slowest[2].source} to {slowest[2].target}, {slowest[0] * 8 / _GIGABIT:.2f} Gbit/s")
    return lines


def pairs_as_json(pairs: Sequence[Pair]) -> list[Mapping[str, object]]:
    """Return all pairs as JSON."""
    return [
        {
            "from": pair.source,
            "to": pair.target,
            "connect_s": pair.seconds,
            "latency_s": pair.latency_s,
            "bytes_per_s": pair.bytes_per_s,
            "problem": pair.problem,
        }
        for pair in pairs
    ]
