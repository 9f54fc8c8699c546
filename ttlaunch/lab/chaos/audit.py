"""Look for processes and files that a run has left on this machine and on its hosts."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttlaunch.agent.leftovers import find_leftovers
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.pushed import start_script
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.planning.launch_plan import EngineNames
from ttlaunch.records.host_scripts import LeftOver
from ttlaunch.records.parser import checked

_ANSWER_S = 10.0


@dataclass(frozen=True)
class Left:
    """The leftovers of a run on a host.

    Attributes:
        host: Its name; "this machine" for the launching one.
        processes: The processes that carry the run's id: `pid` and `name`.
        folders: The folders of the run or of its engine.
        clean_after_s: How long it took until nothing was left; None: something is, or nobody knows.
        error: Why the host could not be asked.
    """

    host: str
    processes: tuple[dict[str, Any], ...] = ()
    folders: tuple[str, ...] = ()
    clean_after_s: float | None = None
    error: str | None = None

    @property
    def is_clean(self) -> bool:
        return self.clean_after_s is not None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "processes": list(self.processes), "folders": list(self.folders)}


def audit(
    run_id: str,
    scratch: Path,
    transports: Sequence[Transport],
    *,
    names: EngineNames,
    began: float,
    patience_s: float,
) -> list[Left]:
    """Look for leftovers here and then on all hosts at once, repeatedly, until nothing is left or time is up.

    Args:
        run_id: The id of the run, which is over.
        scratch: Its folder in shared memory.
        transports: Transports to its hosts, not connected; none if this machine was its only host.
        names: What its engine calls the files that it makes.
        began: When it began, seconds since the epoch.
        patience_s: How long what is left may take to go.
    """
    question: dict[str, Any] = {
        "run_id": run_id,
        "scratch": str(scratch),
        "age_s": time.time() - began,
        "patience_s": patience_s,
        "folders": names.folders,
        "segments": names.segments,
    }

    def ask(transport: Transport) -> Left:
        transport.connect()
        stream = start_script(
            transport, "leftovers", beside=("run_processes",), arguments=question, timeout_s=_ANSWER_S
        )
        return _left(transport.host, stream.answer(LeftOver, timeout_s=patience_s + _ANSWER_S))

    here = _left("this machine", checked("LeftOver", find_leftovers(**question)))
    answers = {
        transport.host: answer if isinstance(answer, Left) else Left(transport.host, error=answer.evidence)
        for transport, answer in on_each(transports, ask, timeout_s=patience_s + 2 * _ANSWER_S)
    }
    return [here, *(answers[transport.host] for transport in transports)]


def _left(host: str, answer: LeftOver) -> Left:
    processes = tuple({"pid": one.pid, "name": one.name} for one in answer.processes)
    return Left(host, processes, answer.folders, answer.clean_after_s)
