"""Tells the user about hosts that do not answer, and about those that do again: in a line each, and as events of the run."""

import time

from ttlaunch.running.crew import Losses, SilentHost
from ttlaunch.running.logs.output import View
from ttlaunch.running.runs.run_folder import RunFolder, append_event


class SilenceWatch:
    """Remembers what has been told of which host."""

    def __init__(self, folder: RunFolder, view: View) -> None:
        self._folder = folder
        self._view = view
        self._told: dict[str, SilentHost] = {}
        self._lost: set[str] = set()

    def notice(self, losses: Losses) -> None:
        """Say what is new; call a few times a second."""
        for host, silence in losses.silent.items():
            if host not in self._told:
                self._told[host] = silence
                self._tell_silent(host, silence)
        for host in [host for host in self._told if host not in losses.silent]:
            silence = self._told.pop(host)
            if host not in losses.hosts:
                self._tell_back(host, silence)
        for host in losses.hosts.keys() - self._lost:
            self._lost.add(host)
            append_event(self._folder, "host_lost", host=host, reason=losses.hosts[host].error.evidence)

    def _tell_silent(self, host: str, silence: SilentHost) -> None:
        now = time.time()
        append_event(self._folder, "host_silent", host=host, silent_s=round(now - silence.since, 1))
        left_s = max(0.0, silence.lost_at - now)
        self._say(f"host {host} has not answered for {now - silence.since:.0f} s; {_prospect(left_s)}")

    def _tell_back(self, host: str, silence: SilentHost) -> None:
        silent_s = time.time() - silence.since
        append_event(self._folder, "host_back", host=host, silent_s=round(silent_s, 1))
        self._say(f"host {host} answers again after {silent_s:.0f} s, and nothing of its output is lost")

    def _say(self, text: str) -> None:
        self._view.output("stderr", text.encode())


def _prospect(left_s: float) -> str:
    return f"unless it comes back within {left_s:.0f} s, its ranks end and the run with them"
