"""The rank controller of a run on other hosts: an agent on each host sends the files of its ranks, and ends these ranks."""

import json
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.engines.base import Engine, EngineProcess
from ttlaunch.planning.launch_plan import EngineCommand, EngineNames, RankRow
from ttlaunch.records.agents import ProcessReport
from ttlaunch.records.endings import RankExit
from ttlaunch.running.agents.agent_starter import AgentStarter
from ttlaunch.running.agents.host_link import HostLink
from ttlaunch.running.agents.relay import Relay
from ttlaunch.running.agents.returning_host import FIRST_PAUSE_S, ReturningHost
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
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import RankState

_TICK_S = 0.2


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
        starter: AgentStarter | None = None,
        renewed: Callable[[HostLink], Mapping[str, str]] = lambda _: {},
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
            starter: Starts an agent again on a host that was lost; None if no host can come back.
            renewed: Called with the link to a host that is back; returns those of the variables that are others there now.
        """
        self._variables = variables or {}
        self._common: Mapping[str, str] = {}  # what the shims of all hosts get
        self._ranks = ranks or {}
        self._own = own or {}
        self._secrets = secrets or {}
        self.recordings = folder.path
        self._run_id = folder.run_id
        self._folder = folder
        self._links = list(links)
        self._relay = relay
        self._started: StartedRanks | None = None
        self._adds = False
        self._starter, self._renewed = starter, renewed
        self._forgotten: set[str] = set()  # hosts without which the run goes on
        self._gone: set[int] = set()  # ranks that went with such a host, which may be back by now
        self._returning: dict[str, ReturningHost] = {}

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
        self._common = {**command.environment, **self._variables, **self._secrets}
        own = {link.host: self._variables_on(link.host) for link in self._links}
        later = split_rows(rows)[1]
        self._started, self._adds = StartedRanks(self._links, self._ranks, own, later=later), True
        return self._started

    def add(self, ranks: Sequence[RankState]) -> None:
        for state in ranks:
            if state.row.host in self._forgotten:
                raise ValueError(f"rank {state.row.rank} cannot start: host {state.row.host} is lost")
        add_to(self._started if self._adds else None, ranks)

    def add_no_more(self) -> None:
        if self._adds and self._started is not None:
            self._adds = False
            self._started.add_no_more()

    def losses(self, ranks: Sequence[RankState]) -> Losses:  # noqa: ARG002 - agents know by themselves
        for link in self._links:
            unwritable, link.unwritable = link.unwritable, None
            if unwritable is not None:
                raise unwritable
        links = [link for link in self._links if link.host not in self._forgotten]
        shims = {rank: when for link in links for rank, when in link.lost_shims.items() if rank not in self._gone}
        hosts = {link.host: link.lost for link in links if link.lost is not None}
        silent = {link.host: silence for link in links if (silence := link.silence()) is not None}
        folders = {link.host: link.lost_folder for link in links if link.lost_folder is not None}
        return Losses(shims, hosts, silent, folders)

    def forget(self, host: str) -> Collection[int]:
        link, started = self._link_to(host), self._started
        if started is None or link.lost is None:
            raise ValueError(
                f"the run cannot go on without host {host}, which is not lost or reached by the engine itself"
            )
        here = started.started_on(host)
        gone = [rank for rank in here if not self._folder.file(contract.exit_file(rank)).exists()]
        for rank in gone:
            self._record_end(rank, link.lost.last_heard + link.clock_offset_s)
        self._gone.update(here)
        self._forgotten.add(host)
        started.forget(host)
        return gone

    def rejoin(self, host: str) -> None:
        if host not in self._forgotten or self._starter is None:
            raise ValueError(f"host {host} is none without which the run goes on")
        link, earlier = self._link_to(host), self._returning.get(host)
        if link.is_cut or (earlier is not None and not earlier.over.is_set()):
            return
        link.abandon()
        starter = self._starter
        self._returning[host] = ReturningHost(
            host,
            lambda timeout_s: starter.start_again(link, timeout_s=timeout_s),
            starter.note,
            pause_s=FIRST_PAUSE_S if earlier is None else earlier.next_pause_s,
        )

    def rejoined(self) -> Collection[str]:
        back = []
        for host, returning in self._returning.items():
            link = returning.take()
            if link is None or self._started is None:
                continue
            self._links[self._links.index(self._link_to(host))] = link
            self._forgotten.discard(host)
            self._started.replace(link, {**self._variables_on(host), **self._renewed(link)})
            back.append(host)
        return back

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
        self._link_to(host).cut()

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
        for returning in self._returning.values():
            returning.stop()
        for returning in self._returning.values():
            while not returning.over.wait(_TICK_S):
                meanwhile()
        back = [link for returning in self._returning.values() if (link := returning.take()) is not None]
        killed = end_agents([*self._links, *back], meanwhile)
        if self._relay is not None:
            self._relay.close()
        return killed

    def _link_to(self, host: str) -> HostLink:
        """Return the link to a host; raises `ValueError` if there is none."""
        for link in self._links:
            if link.host == host:
                return link
        raise ValueError(f"no rank of this run is on a host {host}")

    def _variables_on(self, host: str) -> dict[str, str]:
        """Return what the shims of a host read from their environment."""
        return {**self._common, **self._own.get(host, {})}

    def _record_end(self, rank: int, time: float) -> None:
        """Write the record of a rank's end that its lost host cannot send; if the host is back, its own replaces this one.

        The agent kills its ranks when it has heard nothing for the time of its lease.

        Raises:
            OSError: The record cannot be written.
        """
        record = RankExit(rank=rank, time=time, signal=signal.SIGKILL)
        path = self._folder.file(contract.exit_file(rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(vars(record)).encode())
