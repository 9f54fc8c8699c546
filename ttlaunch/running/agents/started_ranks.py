"""Ranks that the agents on their hosts have started: one object that the supervisor treats like the process of an engine."""

import contextlib
import io
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from ttlaunch.running.agents.host_link import HostLink

_LOOK_S = 0.02
_KILLED_SHIM = re.compile(r"shim of rank (\d{1,9}) was killed by signal \d{1,3}")
_LONGEST_SAID = 4096  # characters of what a host's starter printed


class StartedRanks:
    """The ranks on all hosts, as an `engines.base.GrowingProcess`: it has ended when the ranks of every host have.

    Attributes:
        pid: None, because there is no process on this machine.
        returncode: None while ranks run; 0, the status of the first host that reported another one, or -9 after `kill`.
        stdout: Becomes readable when a rank has ended.
        stderr: The messages of the hosts' starters, once these have ended.
    """

    pid = None

    def __init__(
        self,
        links: Sequence[HostLink],
        ranks: Mapping[str, Sequence[int]],
        variables: Mapping[str, Mapping[str, str]],
        *,
        later: Collection[int] = (),
    ) -> None:
        """Order every host to start its ranks.

        Args:
            links: The links to the hosts.
            ranks: The ranks of each host.
            variables: By host, what shims read from their environment; it may hold secrets.
            later: Those of the ranks that are not started before they are added.
        """
        self._links = list(links)
        self._ranks = ranks
        self._forgotten: set[str] = set()
        self._later: dict[str, list[int]] = {}
        self._is_killing = False
        self.returncode: int | None = None
        self.stdout, self._wake = _pipe()
        self.stderr, self._errors = _pipe()
        for link in links:
            link.changed = self._changed
            own = ranks[link.host]
            self._later[link.host] = [rank for rank in own if rank in later]
            first = [rank for rank in own if rank not in later]
            link.order("start", ranks=first, variables=dict(variables[link.host]), later=self._later[link.host])

    def add(self, ranks: Sequence[int]) -> None:
        """Have the hosts of these ranks start them; a host that is lost starts nothing."""
        for link in self._links if self.returncode is None else ():
            here = [rank for rank in self._later[link.host] if rank in ranks]
            if here:
                self._later[link.host] = [rank for rank in self._later[link.host] if rank not in ranks]
                link.order("start", ranks=here, later=self._later[link.host])

    def add_no_more(self) -> None:
        """Let the starter of each host end with the ranks that run there."""
        for link in self._links if self.returncode is None else ():
            if self._later[link.host]:
                self._later[link.host] = []
                link.order("start", ranks=[], later=[])

    def started_on(self, host: str) -> list[int]:
        """Return the ranks that a host was ordered to start."""
        return [rank for rank in self._ranks[host] if rank not in self._later[host]]

    def forget(self, host: str) -> None:
        """Let nothing depend any more on how the ranks of a lost host ended."""
        self._forgotten.add(host)

    def replace(self, link: HostLink, variables: Mapping[str, str]) -> None:
        """Use another link to a host that was forgotten, on which only ranks that were not started before can be added."""
        self._links = [link if one.host == link.host else one for one in self._links]
        self._forgotten.discard(link.host)
        link.changed = self._changed
        link.order("start", ranks=[], variables=dict(variables), later=self._later[link.host])

    def poll(self) -> int | None:
        """Return the exit status; None while ranks run on a host that is not lost."""
        if self.returncode is None and all(link.ranks_ended or link.lost or link.over.is_set() for link in self._links):
            ends = [link.ranks_ended for link in self._links if link.host not in self._forgotten]
            self._finish(next((end.status if end else 1 for end in ends if end is None or end.status), 0))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Have every host send a signal to the process that started its ranks."""
        self._is_killing = self._is_killing or number == signal.SIGKILL
        for link in self._links if self.returncode is None else ():
            link.order("signal_starter", number=int(number))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Order all ranks to be killed, and wait for no host: the agents look for what is left when the run ends."""
        self.send_signal(signal.SIGKILL)
        self._finish(-signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: Ranks still run after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("ranks", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def _changed(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # full, or closed: nobody has to be woken
            os.write(self._wake, b"a rank has ended\n")

    def _said(self, link: HostLink) -> list[str]:
        """Return what a host's starter reported, with the host's name before all that is not about a shim of its own ranks."""
        end = link.ranks_ended
        if end is None:
            return []
        ranks = self._ranks[link.host]
        lines = end.said[-_LONGEST_SAID:].splitlines()
        found = [line if _is_about_own_rank(line, ranks) else f"{link.host}: {line}" for line in lines]
        was_killed = end.status == 128 + signal.SIGKILL and not self._is_killing
        return [*found, f"starter on {link.host} was killed by SIGKILL"] if was_killed else found

    def _finish(self, status: int) -> None:
        if self.returncode is not None:
            return
        self.returncode = status
        with contextlib.suppress(OSError):
            os.write(self._errors, "".join(f"{line}\n" for link in self._links for line in self._said(link)).encode())
        # The other end sees the end of both streams. A thread of a link may be about to write, so its number is not given away.
        os.close(self._errors)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._wake, inheritable=False)
        os.close(nothing)


def _is_about_own_rank(line: str, ranks: Sequence[int]) -> bool:
    found = _KILLED_SHIM.fullmatch(line)
    return found is not None and int(found[1]) in ranks


def _pipe() -> tuple[IO[bytes], int]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    return io.FileIO(reader), writer
