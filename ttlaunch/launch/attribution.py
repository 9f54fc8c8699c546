"""Which rank broke first, and how: classify every ending, then order by time.

Sorting by time alone blames the wrong rank, because the ranks that lose their peer can be recorded before the one
that was killed. So an own exception, a signal from outside or a crash outranks an ending that follows from another.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ttlaunch.launch.crew import LostHost
from ttlaunch.launch.watch import RankState, failed_exit

_LOST_PEER = {"BrokenPipeError", "ConnectionAbortedError", "ConnectionResetError", "EOFError", "PeerLostError"}
_CHECKPOINTS = {
    "CheckpointWriteError": ("R030", "could not keep a checkpoint"),
    "CheckpointReadError": ("R031", "could not begin"),
}
_ENDED_BY_US = {signal.SIGTERM, signal.SIGINT}


@dataclass(frozen=True)
class Failure:
    """The first failure of a run.

    Attributes:
        code: An `R` code.
        cause: One clause that follows "rank 3 (aggregator, host)".
        time: Seconds since the epoch, None if unknown.
        evidence: Facts for notes.
    """

    code: str
    rank: int | None
    role: str | None
    host: str | None
    step: int | None
    cause: str
    time: float | None
    place: str | None = None
    evidence: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """The first line of the diagnostic."""
        if self.rank is None:
            return self.cause
        when = f" in step {self.step}" if self.step else ""
        return f"rank {self.rank} ({self.role}, {self.host}) {self.cause}{when}"

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "rank": self.rank,
            "role": self.role,
            "host": self.host,
            "step": self.step,
            "cause": self.cause,
            "place": self.place,
            "time": self.time,
            "evidence": list(self.evidence),
        }


def first_failure(
    ranks: list[RankState],
    *,
    lost_shims: Mapping[int, float],
    lost_hosts: Mapping[str, LostHost] | None = None,
    ordered: bool,
) -> Failure | None:
    """The failure that the others follow from, or None if every rank did its work.

    Args:
        ranks: All ranks, after their endings were read.
        lost_shims: Ranks whose shim vanished without a record, with the time at which that was seen.
        lost_hosts: Hosts that can no longer be reached. What follows from a lost host happens after its last sign of life.
        ordered: Whether we ended the run ourselves; then signals that we send do not count.
    """
    candidates = [
        found
        for state in ranks
        if (found := _classify(state, lost_shims.get(state.row.rank), ordered=ordered)) is not None
    ]
    candidates += [(0, _lost_host(lost, ranks)) for lost in (lost_hosts or {}).values()]
    return min(candidates, key=lambda pair: (pair[0], pair[1].time or 0.0))[1] if candidates else None


def _lost_host(lost: LostHost, ranks: list[RankState]) -> Failure:
    """A host that is gone takes its ranks along; it is named, since nothing is known of them."""
    host = lost.error.host
    its_ranks = [state for state in ranks if state.row.host == host]
    who = ", ".join(f"rank {state.row.rank} ({state.row.role})" for state in its_ranks)
    step = max((state.step for state in its_ranks), default=0)
    notes = (f"it ran {who}", *lost.error.notes) if who else lost.error.notes
    cause = f"host {host} was lost: {lost.error.evidence}"
    return Failure("R012", None, None, host, step or None, cause, lost.last_heard, None, notes)


def _classify(state: RankState, lost: float | None, *, ordered: bool) -> tuple[int, Failure] | None:
    """The failure of one rank with its class: 0 broke by itself or from outside, 1 left early, 2 followed."""
    if state.error is not None:
        return (2 if _lost_its_peer(state.error) else 0), _from_exception(state, state.error)
    if state.exit is not None and failed_exit(state.exit):
        return _from_exit(state, state.exit, ordered=ordered)
    if lost is not None and state.exit is None and not ordered:
        return 0, _failure(state, "R006", "was lost: its shim was killed from outside", lost)
    return None


def _lost_its_peer(error: dict[str, Any]) -> bool:
    """Whether an exception only says that another rank is gone; it may be recorded before that rank's own end is."""
    return error.get("type") in _LOST_PEER or str(error.get("message", "")).startswith("MPI_ERR_")


def _from_exception(state: RankState, error: dict[str, Any]) -> Failure:
    first_line = str(error.get("message", "")).partition("\n")[0]
    step, when = error.get("step"), float(error.get("time", 0.0))
    if error.get("type") in _CHECKPOINTS:  # says everything itself; a line of code would not help
        code, cause = _CHECKPOINTS[error["type"]]
        return replace(_failure(state, code, f"{cause}: {first_line}", when), step=None)
    place = f"{error['file']}:{error['line']}" if error.get("file") else None
    evidence = f"`{error.get('type')}: {first_line}`"
    code = "R001" if error.get("type") == "WorldSizeError" else "R002"
    failure = _failure(state, code, f"raised {error.get('type')}", when)
    return Failure(**{**vars(failure), "step": step or state.step or None, "place": place, "evidence": (evidence,)})


def _from_exit(state: RankState, record: dict[str, Any], *, ordered: bool) -> tuple[int, Failure] | None:
    time = float(record.get("time", 0.0))
    if record.get("start_error"):
        return 0, _failure(state, "R007", f"could not be started: {record['start_error']}", time)
    number = record.get("signal")
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number in _ENDED_BY_US:
            return None if ordered else (2, _failure(state, "R004", f"was ended by {name}", time))
        if ordered and number == signal.SIGKILL:
            return None
        return 0, _failure(state, "R004", f"was killed by {name}", time)
    if record.get("left_early"):
        return 1, _failure(state, "R005", "left with status 0 before its role was finished", time)
    return 1, _failure(state, "R003", f"exited with status {record.get('status')}", time)


def _failure(state: RankState, code: str, cause: str, time: float) -> Failure:
    row = state.row
    return Failure(code, row.rank, row.role, row.host, state.step + 1 if state.step else None, cause, time)
