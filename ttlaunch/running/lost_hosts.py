"""Decide when a host is lost, and report silent and lost hosts, during the run and in its report.

A host is lost once the launcher can no longer reach it and its agent must have ended its ranks by itself (`Lease`). Other
modules decide whether the loss was the first failure, how soon the run ends, and whether it starts again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import field

from ttlaunch import contract
from ttlaunch.diagnostics.count import render_duration
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.errors import HostError, Trouble
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.logs.output import View
from ttlaunch.running.lost_folders import LostFolder
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import RankState

NEXT_STEP = "`ttlaunch doctor --on NAME` shows whether the host is back"
"""The hint for a failure whose cause is a lost host."""
RANK_WENT_WITH_HOST = "was on a host that was lost"
"""Why a rank of a lost host did not finish; the clause follows a subject such as "rank 3"."""
RANKS_WENT_WITH_HOST = ("went with its host", "went with their host")
"""What a report adds about later failures, for one rank and for several: they followed from the lost host."""
_CONNECTIONS = {"host_silent": "silent", "host_back": "", "host_lost": "lost", "host_returned": ""}
"""The supervisor's events about a host, and the state of the connection after each."""
FENCE_S = 2.5
"""The time that an agent needs to kill its ranks after its lease has ended."""
_QUIET_S = 4.0  # an agent sends a frame every second
_SILENCE_S = 8.0  # the user is informed of a longer silence


@dataclass(frozen=True)
class LostHost:
    """A host that can no longer be reached.

    Attributes:
        error: Why the host cannot be reached.
        last_heard: When the last frame came from the host, seconds since the epoch on this machine.
    """

    error: HostError
    last_heard: float


def cut_off(host: str, *, last_heard: float) -> LostHost:
    """Return the loss of a host whose connection was cut."""
    return LostHost(HostError(host, Trouble.LOST, "the connection to it was cut"), last_heard)


@dataclass(frozen=True)
class SilentHost:
    """A host that does not answer and may still come back.

    Attributes:
        since: When the last frame came from the host, seconds since the epoch on this machine.
        lost_at: When the host counts as lost, seconds since the epoch; its own agent has then ended its ranks.
    """

    since: float
    lost_at: float


class Lease:
    """The launcher's count of the lease that an agent holds: the time for which its ranks may run without the launcher.

    The agent counts from the newest of its own clock readings that the launcher sent back, so from a moment before the
    launcher received this reading. The launcher counts from the last frame that it received, which is later. So when the
    launcher's count ends, the agent's lease has ended too, whatever the network did. Only then may other processes replace
    the host's ranks.

    Attributes:
        last_heard: When the last frame came, seconds since the epoch on this machine.
    """

    def __init__(self, lease_s: float, *, goes_on: bool = False) -> None:
        self._lease_s, self._goes_on = lease_s, goes_on
        self.heard()

    def heard(self) -> None:
        """Begin to count again, because a frame has come."""
        self._heard, self.last_heard = time.monotonic(), time.time()

    @property
    def silent_s(self) -> float:
        """Seconds since the last frame."""
        return time.monotonic() - self._heard

    @property
    def left_s(self) -> float:
        """Seconds until the agent must have ended its ranks, so that the host counts as lost; 0 from then on."""
        return max(0.0, self._tolerated_s - self.silent_s)

    @property
    def quiet_s(self) -> float:
        """Seconds without a frame after which the connection to the agent is taken for broken."""
        return max(min(2.0, 0.5 * self._lease_s), min(_QUIET_S, 0.3 * self._lease_s))

    @property
    def renew_s(self) -> float:
        """Seconds between two renewals."""
        return contract.beat_s(self._lease_s)

    def silence(self) -> SilentHost | None:
        """Return the silence if it is long enough to inform the user, else None."""
        if self.silent_s < min(_SILENCE_S, 0.55 * self._lease_s):
            return None
        return SilentHost(self.last_heard, self.last_heard + self._tolerated_s)

    @property
    def _tolerated_s(self) -> float:
        # Where the run goes on without the host, its ranks may still be ending meanwhile: the others no longer listen to them.
        return self._lease_s if self._goes_on else self._lease_s + FENCE_S


@dataclass(frozen=True)
class Losses:
    """Shims and hosts that are gone without a record of their end.

    Attributes:
        shims: Ranks whose shim is gone, with the time at which this was noticed, seconds since the epoch.
        hosts: Lost hosts, by name.
        silent: Hosts that have sent nothing for long and are not lost yet, by name.
        folders: Removed folders of the run, by host; that of this machine under "".
    """

    shims: Mapping[int, float]
    hosts: Mapping[str, LostHost]
    silent: Mapping[str, SilentHost] = field(default_factory=dict)
    folders: Mapping[str, LostFolder] = field(default_factory=dict)


class SilenceWatch:
    """Informs the user once of each silence of a host and of its return, and adds these and losses to the run's history."""

    def __init__(self, folder: RunFolder, view: View, *, goes_on: bool = False) -> None:
        """Know of no silence; `goes_on`: whether the run can go on without a host."""
        self._folder = folder
        self._view = view
        self._goes_on = goes_on
        self._reported: dict[str, SilentHost] = {}
        self._lost: set[str] = set()

    def notice(self, losses: Losses) -> None:
        """Report what is new; call it a few times a second."""
        for host, silence in losses.silent.items():
            if host not in self._reported:
                self._reported[host] = silence
                self._report_silent(host, silence)
        for host in [host for host in self._reported if host not in losses.silent]:
            silence = self._reported.pop(host)
            if host not in losses.hosts:
                self._report_return(host, silence)
        self._lost &= losses.hosts.keys()  # the others are back, or the run goes on without them
        for host in losses.hosts.keys() - self._lost:
            self._lost.add(host)
            append_event(self._folder, "host_lost", host=host, reason=losses.hosts[host].error.evidence)

    def _report_silent(self, host: str, silence: SilentHost) -> None:
        now = time.time()
        append_event(self._folder, "host_silent", host=host, silent_s=round(now - silence.since, 1))
        left_s = max(0.0, silence.lost_at - now)
        self._say(
            f"host {host} has not answered for {render_duration(now - silence.since)}; {_prospect(left_s, goes_on=self._goes_on)}"
        )

    def _report_return(self, host: str, silence: SilentHost) -> None:
        silent_s = time.time() - silence.since
        append_event(self._folder, "host_back", host=host, silent_s=round(silent_s, 1))
        self._say(f"host {host} answers again after {render_duration(silent_s)}, and nothing of its output is lost")

    def _say(self, text: str) -> None:
        self._view.output("stderr", clean(text).encode())


def connection_after(event: str) -> str | None:
    """Return the `RankState.connection` of a host's ranks after an event; None if the event does not change it."""
    return _CONNECTIONS.get(event)


def loss_message(lost: LostHost) -> str:
    """Return the message of a failure whose cause is a lost host."""
    return f"host {lost.error.host} was lost: {lost.error.evidence}"


def loss_notes(lost: LostHost, ranks: Sequence[RankState], *, stood_still_s: float) -> tuple[str, ...]:
    """Return the notes of a failure whose cause is a lost host.

    Args:
        lost: The host.
        ranks: The ranks that ran on the host.
        stood_still_s: For how long the supervisor, or its whole machine, did not run; 0 if it always did. A note then shows
            that the host need not be the cause.
    """
    who = ", ".join(f"rank {state.row.rank} ({state.row.role})" for state in ranks)
    notes = (f"it ran {who}", *lost.error.notes) if who else lost.error.notes
    if not stood_still_s:
        return notes
    note = (
        f"this machine, or the supervisor, stood still for {render_duration(stood_still_s)}; "
        "hosts that hear nothing from it for the time of their lease end their ranks"
    )
    return (*notes, note)


def _prospect(left_s: float, *, goes_on: bool) -> str:
    follows = "the run goes on without it" if goes_on else "its ranks end and the run with them"
    return f"unless it comes back within {render_duration(left_s)}, {follows}"
