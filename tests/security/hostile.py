"""Hosts that send whatever a test likes in the place of our scripts, and runs with one of them.

A hostile host is a `MemoryTransport`: each script that the launcher starts there answers with the given bytes.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttlaunch import contract
from ttlaunch.hosts.transport.memory import MemoryTransport, Streams

LOADER = "old=78;"
"""The first word of the command that starts any of our scripts."""


@dataclass
class HostileHost:
    """A host on which every script says what `says` returns; `commands` are those that it was asked to run."""

    name: str
    says: Callable[[], bytes]
    commands: list[list[str]] = field(default_factory=list)

    @property
    def transport(self) -> MemoryTransport:
        return MemoryTransport(self.name, {LOADER: self._talk})

    def _talk(self, streams: Streams) -> int:
        self.commands.append(streams.arguments)
        streams.write(self.says())
        while streams.read(65536):
            continue
        return 0


def greeting(**changes: Any) -> bytes:
    """The frame with which an agent begins."""
    ready = {"kind": "ready", "version": contract.AGENT_VERSION, "time": time.time(), "clock": 1.0, "done": 0}
    return contract.pack_frame({**ready, **changes})


def piece(name: str, body: bytes = b"x", *, number: int = 1, **changes: Any) -> bytes:
    """A frame with a piece of a file."""
    whole = name.endswith((".json", ".box"))
    header: Mapping[str, Any] = {"kind": "file", "name": name, "offset": 0, "whole": whole, "number": number}
    return contract.pack_frame({**header, **changes}, body)


def raw_frame(header: bytes, body: bytes = b"") -> bytes:
    """A frame whose header is any text."""
    return len(header).to_bytes(4, "big") + len(body).to_bytes(4, "big") + header + body
