"""Send a signal to a process of a run on this host that is no rank: a shim, or the run's agent.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import glob
import os

from ttlaunch import contract
from ttlaunch.agent.run_processes import signal_process

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any

_CLAIM = "agent.claim"


def main(arguments: dict[str, Any]) -> int:
    """Send a signal, and answer with the number of processes that got it.

    Args:
        arguments: `number`: the signal; `pid`: a process that carries `run_id`, or None for the run's agent, which
            is found by the claim in `scratch` that it holds open.
    """
    number, pid = arguments["number"], arguments["pid"]
    if pid is not None:
        sent = int(signal_process(pid, number, run_id=arguments["run_id"]))
    else:
        daemons = holders(os.path.join(arguments["scratch"], _CLAIM))
        for daemon in daemons:
            os.kill(daemon, number)
        sent = len(daemons)
    contract.send_frame({"kind": "sent", "sent": sent})
    return 0


def holders(path: str) -> list[int]:
    """Return the processes that have a file open, as far as we may see their descriptors."""
    found = set()
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link) == path:
                found.add(int(link.split("/")[2]))
        except OSError:
            continue
    return sorted(found)
