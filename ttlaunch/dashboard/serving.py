"""What the page shows of a serving run while it answers: its texts, their speed, and the address of its own chat page.

The chat is a link to the page that the serving run itself offers. This server has no part in it: it neither passes prompts on nor knows
the run's key, so whoever may read runs cannot ask a model in the name of another.
"""

from __future__ import annotations  # the parser of records reads the names of kinds

import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.parser import BadRecord, Flag, Word, read, record
from ttlaunch.records.regular_files import read_tail
from ttlaunch.records.telemetry import read_stretch
from ttlaunch.running.metrics.served import served_work
from ttlaunch.running.metrics.telemetry import RankTelemetry
from ttlaunch.running.runs.facts import DOOR_FILE
from ttlaunch.running.runs.files import read_file
from ttlaunch.running.runs.launcher import is_running

_TAIL = 64 << 10
_HIGHEST_PORT = 65535


@record
class _Door:
    """Where clients of a serving run can ask."""

    page: Word
    api: Word
    needs_key: Flag = False


def serving_as_json(path: Path, rows: Sequence[RankRow]) -> dict[str, Any]:
    """Return what the ranks of a serving run wrote last about their answers, and where its chat page is while it is active.

    Ranks count from their start, so the last line of each says everything: the files grow for as long as the run lasts.
    """
    telemetry = [_last_of(path, row.rank, world_size=len(rows)) for row in rows]
    work = served_work([one for one in telemetry if one.is_written]) if telemetry else None
    written = 0.0
    with suppress(OSError):
        written = (path / contract.traffic_file(0)).stat().st_mtime
    is_active = is_running(path)
    chat = _chat(path) if is_active else None
    return {"served": work.as_json() if work else None, "time": written, "is_running": is_active, "chat": chat}


def _last_of(path: Path, rank: int, *, world_size: int) -> RankTelemetry:
    found = RankTelemetry(rank)
    with suppress(OSError):
        for line in reversed(read_tail(path / contract.traffic_file(rank), most=_TAIL).split(b"\n")[:-1]):
            stretch = read_stretch(line, world_size=world_size)
            if not isinstance(stretch, BadRecord):
                found.is_written, found.facts = True, stretch.facts
                break
    return found


def _chat(path: Path) -> dict[str, Any] | None:
    """Return the addresses that a run has written; None unless both are of this machine, which no file of a stranger can change."""
    data = read_file(path / DOOR_FILE)
    door = read(_Door, data) if data is not None else None
    if not isinstance(door, _Door) or not (_is_of_this_machine(door.page) and _is_of_this_machine(door.api)):
        return None
    return {"page": door.page, "api": door.api, "needs_key": door.needs_key}


def _is_of_this_machine(address: str) -> bool:
    """Whether an address is `http://HOST:PORT`, and HOST an address of this machine; names are not looked up."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port or 0
        plain = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if address != plain or not 0 < port <= _HIGHEST_PORT:
            return False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.inet_pton(family, host)
        with closing(socket.socket(family, socket.SOCK_STREAM)) as one:
            one.bind((host, 0))  # only an address of this machine can be bound
    except (OSError, ValueError):
        return False
    return True
