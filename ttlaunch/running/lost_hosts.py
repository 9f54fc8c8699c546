"""Decide when a host is lost, and report it: as it falls silent, when it is lost, and in the report of the run.

A host is lost once the launcher can no longer reach it and its agent must have ended its ranks by itself (`Lease`). What
follows is decided elsewhere: whether it was the first failure, how soon the run ends, whether it starts again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.errors import HostError
from ttlaunch.running.logs.output import View
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import RankState

NEXT_STEP = "`ttlaunch doctor --on NAME` shows whether the host is back"
"""The hint for a failure whose cause is a lost host."""
RANK_WENT_WITH_HOST = "was on a host that was lost"
"""Why a rank of a lost host did not do its work; one clause that follows "rank 3"."""
RANKS_WENT_WITH_HOST = ("went with its host", "went with their host")
"""The same clause for one rank and for several, where the report counts the failures that followed from another."""
_CONNECTIONS = {"host_silent": "silent", "host_back": "", "host_lost": "lost"}
"""Events of the supervisor, and the state of the connection to a host after each of them."""
FENCE_S = 2.5
"""The time in which an agent kills its ranks after its lease has run out."""
_SILENCE_S = 8.0  # after which the user is informed


@dataclass(frozen=True)
class LostHost:
    """A host that can no longer be reached.

    Attributes:
        error: Why it cannot be reached.
        last_heard: Its last sign of life, seconds since the epoch on this machine.
    """

    error: HostError
    last_heard: float


@dataclass(frozen=True)
class SilentHost:
    """A host that does not answer and may still come back.

    Attributes:
        since: Its last sign of life, seconds since the epoch on this machine.
        lost_at: When it counts as lost, seconds since the epoch: by then its own agent has ended its ranks.
    """

    since: float
    lost_at: float


class Lease:
    """The launcher's view of the lease that an agent holds on its ranks.

    The agent counts from the newest of its own clock readings that we sent back, so its lease began before we heard that
    reading. We count from the last frame that came, which is later: when our count is over, the agent's lease has run out
    too, whatever the network between us did. Nobody may take the places of its ranks before that.

    Attributes:
        last_heard: When the last frame came, seconds since the epoch on this machine.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.heard()

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard, self.last_heard = time.monotonic(), time.time()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._heard

    @property
    def left_s(self) -> float:
        """Seconds until the agent must have ended its ranks, so that the host counts as lost; 0 from then on."""
        return max(0.0, self._lease_s + FENCE_S - self.silent_s)

    def silence(self) -> SilentHost | None:
        """Describe a silence that is long enough to inform the user; None if it is not."""
        if self.silent_s < min(_SILENCE_S, 0.55 * self._lease_s):
            return None
        return SilentHost(self.last_heard, self.last_heard + self._lease_s + FENCE_S)


@dataclass(frozen=True)
class Losses:
    """Shims and hosts that are gone without a record of their end.

    Attributes:
        shims: Ranks whose shim vanished, with the time at which that was seen, seconds since the epoch.
        hosts: Hosts that cannot be reached any more, by name.
        silent: Hosts that have not answered for long, by name.
    """

    shims: Mapping[int, float]
    hosts: Mapping[str, LostHost]
    silent: Mapping[str, SilentHost] = field(default_factory=dict)


class SilenceWatch:
    """Informs the user of silent and lost hosts, once each, and notes it in the run's history."""

    def __init__(self, folder: RunFolder, view: View) -> None:
        self._folder = folder
        self._view = view
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
        for host in losses.hosts.keys() - self._lost:
            self._lost.add(host)
            append_event(self._folder, "host_lost", host=host, reason=losses.hosts[host].error.evidence)

    def _report_silent(self, host: str, silence: SilentHost) -> None:
        now = time.time()
        append_event(self._folder, "host_silent", host=host, silent_s=round(now - silence.since, 1))
        left_s = max(0.0, silence.lost_at - now)
        self._say(f"host {host} has not answered for {now - silence.since:.0f} s; {_prospect(left_s)}")

    def _report_return(self, host: str, silence: SilentHost) -> None:
        silent_s = time.time() - silence.since
        append_event(self._folder, "host_back", host=host, silent_s=round(silent_s, 1))
        self._say(f"host {host} answers again after {silent_s:.0f} s, and nothing of its output is lost")

    def _say(self, text: str) -> None:
        self._view.output("stderr", clean(text).encode())


def connection_after(event: str) -> str | None:
    """The `RankState.connection` of a host's ranks after an event; None if the event does not change it."""
    return _CONNECTIONS.get(event)


def loss_message(lost: LostHost) -> str:
    """The message of a failure whose cause is a lost host."""
    return f"host {lost.error.host} was lost: {lost.error.evidence}"


def loss_notes(lost: LostHost, ranks: Sequence[RankState], *, stood_still_s: float) -> tuple[str, ...]:
    """The notes of a failure whose cause is a lost host.

    Args:
        lost: The host.
        ranks: Those that ran on it.
        stood_still_s: For how long the supervisor, or all of its machine, did not run; 0 if it always did. The note about
            it keeps a user from looking for a mistake on the host.
    """
    who = ", ".join(f"rank {state.row.rank} ({state.row.role})" for state in ranks)
    notes = (f"it ran {who}", *lost.error.notes) if who else lost.error.notes
    if not stood_still_s:
        return notes
    note = (
        f"this machine, or the supervisor, stood still for {stood_still_s:.0f} s; "
        "hosts that hear nothing from it for the time of their lease end their ranks"
    )
    return (*notes, note)


def _prospect(left_s: float) -> str:
    return f"unless it comes back within {left_s:.0f} s, its ranks end and the run with them"
