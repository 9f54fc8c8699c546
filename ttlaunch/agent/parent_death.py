"""Have the kernel signal a process when its parent ends; as a script, start a program that way.

    python -I -S parent_death.py PROGRAM ARGUMENT…

The script replaces itself by the program. Starting an interpreter for this takes 12 ms, but unlike code that runs between
fork and exec it is safe in a program with threads. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> None:
    """Have this process sent a signal when its parent ends.

    If the parent ended before this call, no signal comes. A caller that must know this compares `os.getppid()` with the
    expected parent afterwards.
    """
    prctl(_PR_SET_PDEATHSIG, number)


def prctl(option: int, value: int) -> None:
    """Call `prctl` of Linux; does nothing on another system, where ranks rely on the engine alone."""
    try:
        ctypes.CDLL(None).prctl(option, value)
    except (OSError, AttributeError):
        return


def main() -> None:
    """Replace this process by the program that the arguments name."""
    parent = os.getppid()
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel took the order, so no signal will come
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - starting the named program is this script's purpose
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
