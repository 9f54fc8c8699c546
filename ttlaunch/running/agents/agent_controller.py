"""The rank controller of a run on other hosts: an agent on each host sends the files of its ranks, and ends these ranks.

The files are written byte for byte into the run's folder on this machine, so readers of a run's records need not know where
its ranks ran.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttlaunch.engines.base import Engine, EngineProcess
from ttlaunch.errors import HostError
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.pushed import Interpreter
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.planning.launch_plan import EngineCommand, EngineNames, RankRow
from ttlaunch.records.agents import FilePiece, ProcessReport
from ttlaunch.running.agents.host_link import START_S, HostLink
from ttlaunch.running.agents.relay import Relay
from ttlaunch.running.agents.started_ranks import StartedRanks
from ttlaunch.running.lost_hosts import Losses
from ttlaunch.running.rank_controller import (
    ProcessSnapshot,
    add_to,
    check_order,
    look_at_ranks,
    merge_reports,
    split_rows,
)
from ttlaunch.running.runs.files import write_whole
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import RankState

_TICK_S = 0.2


def start_agents(
    transports: Sequence[Transport],
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    last_step: int,
    folder: RunFolder,
    pythons: Mapping[str, str],
    interpreters: Mapping[str, Interpreter] | None = None,
) -> dict[str, HostLink | HostError]:
    """Start agents on all hosts at the same time, and the threads that follow each.

    Args:
        transports: The hosts.
        arguments: The arguments of `agent/start_agent.py` for each host.
        last_step: The last step that can have a checkpoint; 0 if none can.
        folder: The run's folder, into which the files of the hosts are written.
        pythons: By host, the interpreter that starts its agent if none runs.
        interpreters: By host, the Python that becomes its agent's; None to start one on each.

    Returns:
        By host, the link to its agent, or why there is none.
    """
    writing = threading.Lock()

    def keep(piece: FilePiece, body: bytes) -> None:
        write_piece(folder.file(piece.name), piece, body)

    def note(kind: str, **values: Any) -> None:
        with writing, contextlib.suppress(OSError):
            append_event(folder, kind, **values)

    def start(transport: Transport) -> HostLink:
        host = transport.host
        link = HostLink(
            transport,
            arguments[host],
            ranks=arguments[host]["ranks"],
            last_step=last_step,
            python=pythons[host],
            keep=keep,
            note=note,
        )
        link.start((interpreters or {}).get(host))
        link.follow()
        return link

    return {transport.host: answer for transport, answer in on_each(transports, start, timeout_s=2 * START_S)}


def end_agents(links: Sequence[HostLink], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Order all agents to end what is left of the run; return how many processes they had to kill.

    It waits until every host has sent its files. For a host that does not answer, it waits until its agent must have ended
    its ranks, so that the run can be started again afterwards. `meanwhile` is called a few times a second.
    """
    for link in links:
        link.end()
    for link in links:
        while not link.over.wait(_TICK_S):
            meanwhile()
    return sum(link.killed or 0 for link in links)


class AgentRankController:
    """Controls ranks through the agents on their hosts, and owns the relay through which the engine reaches them.

    If the engine reaches no hosts, there is no relay, and the agents start the ranks.
    """

    answers_at_once = False

    def __init__(
        self,
        links: Sequence[HostLink],
        relay: Relay | None,
        folder: RunFolder,
        *,
        ranks: Mapping[str, Sequence[int]] | None = None,
        variables: Mapping[str, str] | None = None,
        own: Mapping[str, Mapping[str, str]] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Control the ranks of a run.

        Args:
            links: The links to the agents.
            relay: By which the engine reaches the hosts; None if the agents start the ranks.
            folder: The run's folder.
            ranks: The ranks of each host.
            variables: What shims read from their environment.
            own: By host, what only its shims get.
            secrets: Variables that no file and no command line has.
        """
        self._variables = variables or {}
        self._ranks = ranks or {}
        self._own = own or {}
        self._secrets = secrets or {}
        self.recordings = folder.path
        self._run_id = folder.run_id
        self._links = links
        self._relay = relay
        self._started: StartedRanks | None = None

    def settings(self, names: EngineNames) -> Mapping[str, str]:
        return {**(self._relay.settings(names) if self._relay else {}), **self._variables}

    def start(
        self,
        engine: Engine,
        command: EngineCommand,
        *,
        folder: Path,
        environment: Mapping[str, str],
        rows: Sequence[RankRow],
    ) -> EngineProcess:
        if self._relay is not None:
            return engine.start(command, folder=folder, environment=environment)
        variables = {**command.environment, **self._variables, **self._secrets}
        own = {link.host: {**variables, **self._own.get(link.host, {})} for link in self._links}
        self._started = StartedRanks(self._links, self._ranks, own, later=split_rows(rows)[1])
        return self._started

    def add(self, ranks: Sequence[RankState]) -> None:
        add_to(self._started, ranks)

    def add_no_more(self) -> None:
        growing, self._started = self._started, None
        if growing is not None:
            growing.add_no_more()

    def losses(self, ranks: Sequence[RankState]) -> Losses:  # noqa: ARG002 - agents know by themselves
        for link in self._links:
            unwritable, link.unwritable = link.unwritable, None
            if unwritable is not None:
                raise unwritable
        shims = {rank: when for link in self._links for rank, when in link.lost_shims.items()}
        hosts = {link.host: link.lost for link in self._links if link.lost is not None}
        silent = {link.host: silence for link in self._links if (silence := link.silence()) is not None}
        folders = {link.host: link.lost_folder for link in self._links if link.lost_folder is not None}
        return Losses(shims, hosts, silent, folders)

    def signal_ranks(
        self,
        ranks: Sequence[RankState],
        number: int,
        *,
        marker: Mapping[str, Any] | None = None,
    ) -> None:
        for link in self._links:
            here = [state.row.rank for state in ranks if state.row.host == link.host and state.exit is None]
            if here:
                link.order("signal", ranks=here, number=int(number), marker=None if marker is None else dict(marker))

    def tell(self, number: int, message: bytes) -> None:
        check_order(message)
        for link in self._links:
            if number in self._ranks.get(link.host, ()):
                link.tell(number, message)

    def cut(self, host: str) -> None:
        found = [link for link in self._links if link.host == host]
        if not found:
            raise ValueError(f"no rank of this run is on a host {host}")
        found[0].cut()

    def snapshot(self, ranks: Sequence[RankState], *, since: float, closely: bool = False) -> ProcessSnapshot | None:
        hosts = {state.row.host for state in ranks if state.exit is None}
        asked = [link for link in self._links if link.host in hosts]
        answers = {link.host: answer for link in asked if (answer := link.snapshot(int(since * 1000))) is not None}
        if len(answers) < len(asked):
            return None
        # The engine runs on this machine, where no agent looks unless it is also a host of the run.
        here = look_at_ranks(self._run_id, [], closely=closely)
        known = {helper.pid for answer in answers.values() for helper in answer.helpers}
        helpers = tuple(helper for helper in here.helpers if helper.pid not in known)
        return merge_reports({**answers, "": ProcessReport(question=0, stopped=(), faults=(), helpers=helpers)})

    def dump_stacks(self, ranks: Sequence[RankState]) -> None:
        """Ask the agents for the stacks of their ranks, and return at once."""
        for link in self._links:
            here = [state.row.rank for state in ranks if state.row.host == link.host and state.exit is None]
            if here:
                link.order("stack_dump", ranks=here)

    def end(self, meanwhile: Callable[[], None]) -> int:
        """Order every agent to finish, and wait until the last one has done so or is given up."""
        killed = end_agents(self._links, meanwhile)
        if self._relay is not None:
            self._relay.close()
        return killed


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
