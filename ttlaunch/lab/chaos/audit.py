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
class Leftovers:
    """The leftovers of a run on a host.

    Attributes:
        host: The name of the host; "this machine" for the launching machine.
        processes: The processes that carry the run's id: `pid` and `name`.
        folders: The folders of the run or of its engine.
        clean_after_s: Seconds until nothing was left; None if something is left or the host could not be asked.
        error: Why the host could not be asked; None if it answered.
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
) -> list[Leftovers]:
    """Look for leftovers here and then on all hosts at once, repeatedly, until nothing is left or `patience_s` is over.

    Args:
        run_id: The id of the run, which has ended.
        scratch: The run's folder in shared memory.
        transports: Transports to the run's hosts, not connected; none if the run had only this machine.
        names: The engine's names for its files.
        began: When the run began, in seconds since the epoch.
        patience_s: How long leftovers may take to disappear.
    """
    question: dict[str, Any] = {
        "run_id": run_id,
        "scratch": str(scratch),
        "age_s": time.time() - began,
        "patience_s": patience_s,
        "folders": names.folders,
        "segments": names.segments,
    }

    def ask(transport: Transport) -> Leftovers:
        transport.connect()
        stream = start_script(
            transport, "leftovers", beside=("run_processes",), arguments=question, timeout_s=_ANSWER_S
        )
        return _leftovers(transport.host, stream.answer(LeftOver, timeout_s=patience_s + _ANSWER_S))

    here = _leftovers("this machine", checked("LeftOver", find_leftovers(**question)))
    answers = {
        transport.host: answer if isinstance(answer, Leftovers) else Leftovers(transport.host, error=answer.evidence)
        for transport, answer in on_each(transports, ask, timeout_s=patience_s + 2 * _ANSWER_S)
    }
    return [here, *(answers[transport.host] for transport in transports)]


def _leftovers(host: str, answer: LeftOver) -> Leftovers:
    processes = tuple({"pid": one.pid, "name": one.name} for one in answer.processes)
    return Leftovers(host, processes, answer.folders, answer.clean_after_s)
