"""A substitute for `ssh`, for mpirun: passes each command for a host to the launcher, which is connected to that host already.

    relay.py SOCKET [ssh's options] HOST COMMAND…

So keys, jump hosts and checks of host keys are the same for mpirun as for everything else, and nobody is asked for a
passphrase twice. Runs on the launching machine. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os
import signal
import sys

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, _PACKAGE_PARENT)
from ttlaunch import contract  # noqa: E402 - the path above makes it importable without site-packages
from ttlaunch.agent.claims import connect  # noqa: E402
from ttlaunch.agent.parent_death import end_with_parent  # noqa: E402

sys.path.remove(_PACKAGE_PARENT)

_WITH_VALUE = {"-l", "-p", "-i", "-o", "-F"}
_NO_ANSWER = 255  # what ssh says when the connection failed


def main() -> int:
    """Have the launcher run the command; prints the command's output and returns its exit status."""
    path, words = sys.argv[1], sys.argv[2:]
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] in _WITH_VALUE else words[1:]
    if not words:
        print("ttlaunch relay: no host was named", file=sys.stderr)
        return _NO_ANSWER
    try:
        with connect(path) as connection:
            host = words[0].rpartition("@")[2]  # the launcher is logged in already, as whoever the hostfile says
            connection.sendall(contract.pack_frame({"host": host, "command": " ".join(words[1:])}))
            # If mpirun is killed this process must end too: it holds mpirun's output open, and the launcher waits for its end.
            end_with_parent(signal.SIGTERM)
            if os.getppid() == 1:  # mpirun was killed before the line above
                return _NO_ANSWER
            frame = contract.read_frame(connection.recv)
    except (OSError, EOFError, ValueError) as error:
        print(f"ttlaunch relay: the launcher does not answer: {error}", file=sys.stderr)
        return _NO_ANSWER
    if frame is None:
        print("ttlaunch relay: the launcher has ended", file=sys.stderr)
        return _NO_ANSWER
    header, body = frame
    sys.stdout.buffer.write(body)
    sys.stderr.write(header.get("stderr", ""))
    return int(header["status"])


if __name__ == "__main__":
    sys.exit(main())
