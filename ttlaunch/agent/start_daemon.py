"""Start an engine's daemon on a host, and move the sockets on which it listens from all interfaces to the chosen networks.

    python -I -S start_daemon.py NETWORKS DAEMON [ARGUMENT…]

The kernel lets only a parent do that, so this process stays for as long as the one that it starts, and exits with its status.
Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os
import sys
import time

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, _PACKAGE_PARENT)
from ttlaunch.agent.listeners import Listeners, addresses_in, descendants  # noqa: E402 - the path above makes it importable
from ttlaunch.agent.parent_death import prctl  # noqa: E402

sys.path.remove(_PACKAGE_PARENT)

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.005
_LONGEST_S = 30.0
_AFTER_MOVE_S = 0.2  # a daemon opens its sockets one after the other


def main() -> int:
    """Start the daemon; the exit status is its own, or 128 + signal."""
    networks, command = sys.argv[1], sys.argv[2:]
    addresses = addresses_in(networks)
    if not addresses:
        os.execv(command[0], command)  # noqa: S606 - no shell is wanted
    # A daemon that detaches itself stays our descendant, and so can be traced.
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    name = os.path.basename(command[0])
    # By this name whoever ends the run knows that this process belongs to the daemon, and ends it after the ranks.
    with open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)
    child = os.fork()
    if not child:
        try:
            os.execv(command[0], command)  # noqa: S606 - no shell is wanted
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
    _move_listeners(name, Listeners(addresses))
    _, wait_status = os.waitpid(child, 0)
    return 128 + os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else os.WEXITSTATUS(wait_status)


def _move_listeners(name: str, listeners: Listeners) -> None:
    """Move the sockets of a daemon as soon as they exist: it listens before it starts other programs."""
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        below = list(descendants(os.getpid()))
        daemons = [pid for pid, its_name in below if its_name == name]
        moved = listeners.moved
        if not daemons or not all(map(listeners.look, daemons)):
            return
        if listeners.moved > moved:
            deadline = time.monotonic() + _AFTER_MOVE_S
        if len(daemons) < len(below):
            return
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
