"""Note a rank's files in shared memory that lie outside the run's own folder, so that they are removed with that folder.

MPICH 5 gives them names of its own in /dev/shm and removes them only at MPI_Finalize, which a killed rank never reaches. While
the rank lives, the kernel says which of the files it uses. Their names are kept as empty files in the run's folder in shared
memory. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import os

from ttlaunch.agent.claims import SEGMENTS, SHARED

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Sequence

_LOOK_S = 0.1
_MOST_LOOKS = 100  # at a file that the rank does not use; it belongs to another run


def note_segments(pid: int, patterns: Sequence[str], *, scratch: str) -> None:
    """Look for files of a rank's in shared memory for as long as this process lives, in a thread.

    Args:
        pid: The rank's process; its descendants count too.
        patterns: Patterns of the files' names.
        scratch: The run's folder in shared memory.
    """
    import threading  # noqa: PLC0415 - those who only remove files need not wait for it

    threading.Thread(target=_look, args=(pid, patterns, scratch), daemon=True).start()


def _look(pid: int, patterns: Sequence[str], scratch: str) -> None:
    import fnmatch  # noqa: PLC0415 - as above
    import time  # noqa: PLC0415 - as above

    from ttlaunch.agent.listeners import descendants  # noqa: PLC0415 - as above

    looks: dict[str, int] = {}
    with contextlib.suppress(OSError):  # without the folder nothing can be noted
        while True:
            time.sleep(_LOOK_S)
            found = [name for name in os.listdir(SHARED) if any(fnmatch.fnmatchcase(name, one) for one in patterns)]
            new = {name for name in found if looks.get(name, 0) < _MOST_LOOKS}
            if not new:
                continue
            used = _used([pid, *(child for child, _ in descendants(pid))])
            for name in new:
                looks[name] = _MOST_LOOKS if name in used else looks.get(name, 0) + 1
                if name in used:
                    os.makedirs(os.path.join(scratch, SEGMENTS), exist_ok=True)
                    with open(os.path.join(scratch, SEGMENTS, name), "wb"):
                        pass


def _used(pids: Sequence[int]) -> set[str]:
    """Return the names of the files in shared memory that any of these processes has mapped."""
    from ttlaunch.agent.tracing import read_text  # noqa: PLC0415 - as above

    paths = {line.split(None, 5)[-1] for pid in pids for line in read_text(f"/proc/{pid}/maps").splitlines()}
    return {os.path.basename(path) for path in paths if os.path.dirname(path) == SHARED}
