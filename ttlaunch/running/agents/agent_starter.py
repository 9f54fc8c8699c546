"""Start the agents of a run: at first on all hosts at the same time, later again on a host that was lost.

The files of the hosts are written byte for byte into the run's folder on this machine, so readers of a run's records need not
know where its ranks ran.
"""

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.pushed import Interpreter
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.records.agents import FilePiece
from ttlaunch.running.agents.agent_connection import START_S
from ttlaunch.running.agents.host_link import HostLink
from ttlaunch.running.runs.files import write_whole
from ttlaunch.running.runs.run_folder import RunFolder, append_event


class AgentStarter:
    """Starts agents, and the threads that follow each."""

    def __init__(
        self,
        transports: Sequence[Transport],
        arguments: Mapping[str, Mapping[str, Any]],
        *,
        last_step: int,
        folder: RunFolder,
        pythons: Mapping[str, str],
        goes_on: bool = False,
    ) -> None:
        """Take note of what the agents need; nothing starts yet.

        Args:
            transports: The hosts.
            arguments: The arguments of `agent/start_agent.py` for each host.
            last_step: The last step that can have a checkpoint; 0 if none can.
            folder: The run's folder, into which the files of the hosts are written.
            pythons: By host, the interpreter that starts its agent if none runs.
            goes_on: As for `HostLink`.
        """
        self._transports = {transport.host: transport for transport in transports}
        self._arguments = arguments
        self._last_step = last_step
        self._folder = folder
        self._pythons = pythons
        self._goes_on = goes_on
        self._writing = threading.Lock()

    def start_all(self, interpreters: Mapping[str, Interpreter] | None = None) -> dict[str, HostLink | HostError]:
        """Start agents on all hosts at the same time.

        Args:
            interpreters: By host, the Python that becomes its agent's; None to start one on each.

        Returns:
            By host, the link to its agent, or why there is none.
        """

        def start(transport: Transport) -> HostLink:
            link = self._link(transport, self._arguments[transport.host])
            link.start((interpreters or {}).get(transport.host))
            link.follow()
            return link

        answers = on_each(list(self._transports.values()), start, timeout_s=2 * START_S)
        return {transport.host: answer for transport, answer in answers}

    def start_again(self, lost: HostLink, *, timeout_s: float) -> HostLink:
        """Connect to a lost host within `timeout_s` seconds, end what is left of the run there, and start another agent.

        The lost link must be over, since both use the same connection to the host.

        Raises:
            HostError: The host cannot be reached, or no longer has what the run needs.
        """
        transport, arguments = self._transports[lost.host], self._arguments[lost.host]
        transport.close()
        transport.connect(timeout_s=timeout_s)
        link = self._link(transport, {**arguments, "replaces": lost.agent})
        link.start()
        link.follow()
        if len(link.ports) < arguments.get("holds_ports", 0):
            link.end()
            raise HostError(lost.host, Trouble.SCRIPT, "its agent holds too few ports for the ranks")
        return link

    def note(self, kind: str, **values: Any) -> None:
        """Add an event to the run's history; from any thread."""
        with self._writing, contextlib.suppress(OSError):
            append_event(self._folder, kind, **values)

    def _link(self, transport: Transport, arguments: Mapping[str, Any]) -> HostLink:
        return HostLink(
            transport,
            arguments,
            ranks=arguments["ranks"],
            last_step=self._last_step,
            python=self._pythons[transport.host],
            keep=self._keep,
            note=self.note,
            goes_on=self._goes_on,
        )

    def _keep(self, piece: FilePiece, body: bytes) -> None:
        write_piece(self._folder.file(piece.name), piece, body)


def write_piece(path: Path, piece: FilePiece, body: bytes) -> None:
    """Write a piece of a host's file into the copy on this machine; a file that is sent whole replaces its copy in one step.

    Raises:
        OSError: The copy cannot be written, for example because the disk is full.
        ValueError: The piece lies after a gap, or is called a whole file and does not begin at its start.
    """
    if piece.whole and piece.offset:
        raise ValueError(f"a whole file at offset {piece.offset}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if piece.whole:
        write_whole(path, body)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        # An agent that was started anew sends a file again from its beginning, so a piece may also lie before the end.
        if piece.offset > (size := os.fstat(descriptor).st_size):
            raise ValueError(f"a piece of {path.name} at offset {piece.offset}, after {size} bytes")
        os.pwrite(descriptor, body, piece.offset)
    finally:
        os.close(descriptor)
