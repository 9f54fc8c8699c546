"""Start an engine's daemon on a host, and keep its listening sockets from those who are to have no part in the run.

    python -I -S start_daemon.py FOLDER RANKS NETWORKS DAEMON [ARGUMENT…]

The sockets are moved from all interfaces to the chosen networks as soon as they exist. After this host's RANKS, separated by
commas, have reported in the run's FOLDER that they have found the others, the daemon takes no further connection. RANKS is empty
for programs, which report nothing, and whose processes may connect to the daemon at any time.

The kernel lets only an ancestor of the daemon do that. This process waits for the daemon and exits with its status. A second one
between the two does the work and ends when it is done. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ttlaunch.agent.listeners import Listeners

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S, _LOOK_AGAIN_S = 0.005, 0.02  # until a socket of the daemon listens, and for further ones
_LOOK_FOR_REPORTS_S = 0.1
_LONGEST_S = 30.0  # for a daemon to listen; then it starts ranks
_READY = b'"kind": "ready"'
_LONGEST_START = 65536  # bytes of a rank's progress; what it reports first


def main() -> int:
    """Start the daemon; the exit status is its own, or 128 + signal."""
    folder, ranks, networks, *command = sys.argv[1:]
    name = os.path.basename(command[0])
    # By this name whoever ends the run knows that this process belongs to the daemon, and ends it after the ranks.
    with open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)
    _adopt_orphans()
    reader, writer = os.pipe()
    companion = os.fork()
    if not companion:
        os.close(reader)
        _Companion(name, writer).start(command, networks, folder=folder, ranks=ranks)
    os.close(writer)
    with open(reader, encoding="ascii") as answers:
        child, *ended = (int(line) for line in answers)
    if ended:  # the daemon has detached itself, and the companion goes on
        wait_status = ended[0]
    else:
        os.waitpid(companion, 0)  # the daemon is our child only after its end
        _, wait_status = os.waitpid(child, 0)
    return 128 + os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else os.WEXITSTATUS(wait_status)


class _Companion:
    """The process between the starter and the daemon, for as long as it has something to do."""

    def __init__(self, name: str, answers: int) -> None:
        self._name = name
        self._answers = answers
        self._child = 0

    def start(self, command: list[str], networks: str, *, folder: str, ranks: str) -> None:
        """Start the daemon and do the work; never returns."""
        try:
            _adopt_orphans()  # before there is a daemon that could detach itself
            self._child = os.fork()
            if not self._child:
                os.close(self._answers)
                _become(command)
            self._answer(self._child)
            # Whoever waits for the output's end waits for the daemon, not for this process.
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            from ttlaunch.agent.listeners import Listeners, addresses_in  # noqa: PLC0415 - the daemon need not wait for it

            addresses = addresses_in(networks)
            if addresses:
                self._move_listeners(Listeners(addresses))
            if ranks:
                from ttlaunch import contract  # noqa: PLC0415 - as above

                files = [contract.progress_file(int(rank)) for rank in ranks.split(",")]
                self._refuse_connections([os.path.join(folder, name) for name in files])
        finally:
            os._exit(0)

    def _move_listeners(self, listeners: Listeners) -> None:
        """Move the sockets of the daemon as soon as they exist: it listens before it starts other programs."""
        from ttlaunch.agent.listeners import descendants  # noqa: PLC0415 - as above

        deadline = time.monotonic() + _LONGEST_S
        while time.monotonic() < deadline:
            below = list(descendants(os.getpid()))
            daemons = self._daemons(below)
            if not daemons or not all(map(listeners.look, daemons)) or len(daemons) < len(below):
                return
            self._wait(_LOOK_AGAIN_S if listeners.moved else _LOOK_S)

    def _refuse_connections(self, missing: list[str]) -> None:
        """Close the daemon to others once every rank of this host has reported that it has found the others."""
        from ttlaunch.agent.listeners import descendants, refuse_connections  # noqa: PLC0415 - as above

        while daemons := self._daemons(descendants(os.getpid())):
            missing = [path for path in missing if _READY not in _start_of(path)]
            if not missing:
                for daemon in daemons:
                    refuse_connections(daemon)
                return
            self._wait(_LOOK_FOR_REPORTS_S)

    def _daemons(self, below: Iterable[tuple[int, str]]) -> list[int]:
        return [pid for pid, name in below if name == self._name]

    def _wait(self, seconds: float) -> None:
        """Wait, and report the end of the child if it has ended; a daemon that detaches itself ends the child."""
        time.sleep(seconds)
        if self._child:
            ended, wait_status = os.waitpid(self._child, os.WNOHANG)
            if ended:
                self._child = 0
                self._answer(wait_status)
                os.close(self._answers)

    def _answer(self, value: int) -> None:
        os.write(self._answers, b"%d\n" % value)


def _adopt_orphans() -> None:
    """Make orphans below this process its children, so that a daemon that detaches itself can still be traced and waited for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _become(command: list[str]) -> None:
    try:
        os.execv(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _start_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST_START)
    except OSError:
        return b""


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.exit(main())
