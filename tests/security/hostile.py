"""Hosts that send whatever a test likes in the place of our scripts, and runs with one of them.

A hostile host is a `MemoryTransport`: each script that the launcher starts there answers with the given bytes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.agent import START_RANKS
from ttlaunch.app.run_diagnostics import run_diagnostics
from ttlaunch.diagnostics import render
from ttlaunch.engines.base import Capability
from ttlaunch.engines.choose import ENGINES
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.hosts.transport.memory import MemoryTransport, Streams
from ttlaunch.planning.engine import RanksToStart
from ttlaunch.planning.launch_plan import CommandProgram, EngineCommand, EngineNames, LaunchPlan, RankRow
from ttlaunch.running.agents.agent_controller import AgentRankController
from ttlaunch.running.agents.agent_starter import AgentStarter
from ttlaunch.running.agents.host_link import HostLink
from ttlaunch.running.agents.relay import Relay
from ttlaunch.running.logs.output import SilentView
from ttlaunch.running.report import Report
from ttlaunch.running.runs.facts import facts_of
from ttlaunch.running.runs.run_folder import create_run_folder, write_plan
from ttlaunch.running.supervise import supervise
from ttlaunch.running.watch import Watch

LOADER = "old=78;"
"""The first word of the command that starts any of our scripts."""


@dataclass
class HostileHost:
    """A host on which every script says what `says` returns, and then `repeats` twice a second.

    After its first frame, it sends signs of life until `may_go_on`. `commands` are those that it was asked to run.
    """

    name: str
    says: Callable[[], bytes]
    repeats: bytes = b""
    may_go_on: Callable[[], bool] = lambda: True
    commands: list[list[str]] = field(default_factory=list)

    @property
    def transport(self) -> MemoryTransport:
        return MemoryTransport(self.name, {LOADER: self._talk})

    def _talk(self, streams: Streams) -> int:
        self.commands.append(streams.arguments)
        said = self.says()
        first = 8 + sum(int.from_bytes(said[at : at + 4], "big") for at in (0, 4))
        streams.write(said[:first])
        while not self.may_go_on():
            streams.write(contract.pack_frame({"kind": "alive", "clock": 1.0, "done": 0}))
            time.sleep(0.2)
        streams.write(said[first:])
        while self.repeats:  # until the launcher closes its end, which raises
            streams.write(self.repeats)
            time.sleep(0.5)
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


@dataclass(frozen=True)
class EndedRun:
    """A run that has come to its end, and what its user is told."""

    report: Report | None  # None: its agents could not be started
    text: str
    folder: Path
    seconds: float


GOOD_WORDS = b"rank 0 was here\n"
_ENGINE_S = 9.0
_STARTER = Path(START_RANKS)


def run_beside(hostile: HostileHost, folder: Path, *, by_agents: bool = False) -> EndedRun:
    """A whole run: rank 0 on this machine behind a real agent, rank 1 on the hostile host, under a real supervisor.

    Rank 0 prints a line and ends well. The process in the engine's place ends after a few seconds, as an engine does whose
    ranks have ended; or, `by_agents`, the agents start the ranks, and the hostile host says more than its greeting once rank 0 has ended.
    """
    names = EngineNames("mpirun", rank_variables=("OMPI_COMM_WORLD_RANK",))
    rows = (RankRow(0, "good", 0, "rank"), RankRow(1, hostile.name, 0, "rank"))
    engine = next(finder for finder in ENGINES if (Capability.MPI in finder.can) is not by_agents).never_started()
    command = EngineCommand("Open MPI 5.0.0", ("sleep", str(_ENGINE_S)), {}, {}, names=names)
    if by_agents:
        command = engine.command(RanksToStart(sys.executable, str(_STARTER), rows, (("good", 1), (hostile.name, 1))))
    plan = LaunchPlan(
        topology="lab",
        program=CommandProgram("work", ("work",)),
        rank_command=("echo", *GOOD_WORDS.decode().split()),
        working_folder=str(folder),
        environment={},
        managed=(),
        ranks=rows,
        flows=(),
        links=(),
        engine=command,
    )
    run, began = create_run_folder(folder / "runs"), time.monotonic()
    write_plan(plan, run.path, run_id=run.run_id)
    there, scratch = folder / "there" / run.run_id, folder / "s"
    common = {"run_id": run.run_id, "scratch": str(scratch), "lease_s": contract.LEASE_S, "files": {}, "daemons": []}
    good = {**common, "folder": str(there), "socket": str(scratch / "a0"), "ranks": [0]}
    if by_agents:
        plan_file = there / contract.PLAN_FILE
        hostile.may_go_on = (run.path / contract.exit_file(0)).exists
        good["starter"] = [sys.executable, "-I", "-S", str(_STARTER), str(plan_file)]
        good["files"] = {contract.PLAN_FILE: (run.path / contract.PLAN_FILE).read_text()}
    evil = {**common, "folder": "/none", "socket": "/none", "ranks": [1], "lease_s": 1.0}
    starter = AgentStarter(
        [LocalTransport("good"), hostile.transport],
        {"good": good, hostile.name: evil},
        last_step=plan.last_checkpoint_step,
        folder=run,
        pythons={"good": "python3", hostile.name: "python3"},
    )
    started = starter.start_all()
    links = [link for link in started.values() if isinstance(link, HostLink)]
    failed = {name: error for name, error in started.items() if not isinstance(error, HostLink)}
    if failed:
        assert [hostile.name] == list(failed), failed
        for link in links:
            link.end()
            link.over.wait(30.0)
        return EndedRun(None, str(failed[hostile.name]), run.path, time.monotonic() - began)
    rank = None if by_agents else _good_rank(run.run_id, there)
    watch = Watch(plan, run)
    for link in links:
        watch.set_clock(link.host, link.clock_offset_s)
    relay = None if by_agents else Relay({}, {}, engine=engine, scratch=scratch, is_lost=lambda _: True)
    report = supervise(
        plan,
        run,
        engine=engine,
        environment=dict(os.environ),
        view=SilentView(),
        watch=watch,
        controller=AgentRankController(links, relay, run, ranks={"good": [0], hostile.name: [1]}),
        scratch=scratch,
    )
    if rank is not None:
        rank.wait(30.0)
    text = render(run_diagnostics(report, facts_of(plan), run))
    return EndedRun(report, text, run.path, time.monotonic() - began)


def _good_rank(run_id: str, there: Path) -> subprocess.Popen[bytes]:
    """A process of rank 0 that ends well after a moment, with the records that its shim would write."""
    rank = subprocess.Popen(["sleep", "2"], env={**os.environ, contract.ENV_RUN_ID: run_id})
    now = time.time()
    started = {"kind": "started", "time": now, "pid": rank.pid, "shim_pid": os.getpid(), "host": "good"}
    (there / contract.progress_file(0)).write_text(json.dumps(started) + "\n")
    (there / contract.stdout_file(0)).write_bytes(GOOD_WORDS)
    ending = {"rank": 0, "pid": rank.pid, "started": now, "time": now + 2.0, "status": 0, "signal": None}
    (there / contract.exit_file(0)).write_text(json.dumps(ending))
    return rank
