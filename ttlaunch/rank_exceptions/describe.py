"""Describe an exception for the launcher: its whole message, the user's line, where it came from and which connections are broken.

The launcher cannot tell from a type such as `ConnectionResetError` whether a rank lost another rank or a server of data. So
the record says which code raised each exception of the chain, and which sockets of the process have lost their other end.
Python 3.9 and the standard library only.
"""

from __future__ import annotations

import builtins
import os
import select
import socket
import stat
import time
import traceback

from ttlaunch.rank_exceptions.outline import LONGEST_WORD, PAIR, causes_of, place_of, text_of

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any

    Record = dict[str, Any]

LONGEST_TEXT = 256 * 1024
"""The most characters of a message and of a traceback; the launcher refuses records that are far longer."""
_LONGEST_NOTE = 4096
_MOST_NOTES = 16
_LONGEST_CAUSE = 4096
_MOST_PARTS = 4
_MOST_DESCRIPTORS = 4096
_MOST_BROKEN = 16


def describe(error: BaseException, *, folder: str | None = None) -> Record:
    """Return the fields that a record of an exception has, whoever raised it; the caller adds what an exception does not know.

    Args:
        error: The exception, with its traceback.
        folder: The folder of the user's code, if it is known: the place is the innermost line of a file in it.
    """
    parts = _parts_of(error)
    only = parts[0] if len(parts) == 1 and parts[0].__traceback__ else error
    file, line = place_of(only.__traceback__, folder)
    return {
        "type": type(error).__name__[:LONGEST_WORD],
        "module": str(type(error).__module__)[:LONGEST_WORD],
        "message": text_of(error)[:LONGEST_TEXT],
        "notes": [str(note)[:_LONGEST_NOTE] for note in _notes_of(error)] + _part_notes(parts, folder),
        "causes": [
            {"type": name[:LONGEST_WORD], "message": message[:_LONGEST_CAUSE], "origin": origin}
            for name, message, origin in causes_of(error)
        ],
        "broken": broken_connections(),
        "traceback": _traceback_of(error)[-LONGEST_TEXT:],
        "file": file,
        "line": line,
        "time": time.time(),
    }


def broken_connections() -> list[str]:
    """Return the other ends of this process's sockets that have closed or reset the connection, such as `10.0.0.2:4711`.

    An end on this machine has `local ` in front; that of a Unix socket is `local`, or `pair` if only a process that shares it with
    this one, such as its child, can have had it.
    """
    broken: list[str] = []
    try:
        descriptors = sorted(map(int, os.listdir("/proc/self/fd")))[:_MOST_DESCRIPTORS]
    except (OSError, ValueError):
        return []
    for descriptor in descriptors:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if _is_broken(one) and len(broken) < _MOST_BROKEN:
                    broken.append(_other_end(one))
        except OSError:
            continue
    return broken


def _is_broken(one: socket.socket) -> bool:
    """Ask the system whether the other end has closed or reset the connection; bytes that it sent before stay unread."""
    if one.type != socket.SOCK_STREAM or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    question = select.poll()
    question.register(one, select.POLLRDHUP)
    answers = question.poll(0)
    return bool(answers) and bool(answers[0][1] & (select.POLLRDHUP | select.POLLHUP | select.POLLERR))


def _other_end(one: socket.socket) -> str:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return PAIR if _is_pair(one) else "local"
    try:
        host, port = one.getpeername()[:2]
    except OSError:  # reset: the system has forgotten the other end
        return "unknown"
    here = one.getsockname()[0]
    return f"{'local ' if host == here or host.startswith('127.') or host == '::1' else ''}{host}:{port}"


def _is_pair(one: socket.socket) -> bool:
    """Whether a Unix socket has no name at either end, as those of `socketpair` and `multiprocessing.Pipe`."""
    try:
        return not one.getpeername() and not one.getsockname()
    except OSError:
        return False


def _notes_of(error: BaseException) -> list[Any]:
    notes = getattr(error, "__notes__", None)
    return list(notes)[:_MOST_NOTES] if isinstance(notes, (list, tuple)) else []


def _parts_of(error: BaseException) -> list[BaseException]:
    """Return the exceptions in a group, as `asyncio.TaskGroup` raises it, without groups in between; empty if it is no group."""
    group = getattr(builtins, "BaseExceptionGroup", None)  # since Python 3.11
    if group is None or not isinstance(error, group):
        return []
    parts: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, group):
            waiting[:0] = one.exceptions
        else:
            parts.append(one)
    return parts


def _part_notes(parts: list[BaseException], folder: str | None) -> list[str]:
    """Say in a note for each exception of a group what it is and where it was raised: the group itself says only how many."""
    notes = []
    for one in parts[:_MOST_PARTS]:
        file, line = place_of(one.__traceback__, folder)
        where = f", at {os.path.basename(file)}:{line}" if file else ""
        notes.append(f"{type(one).__name__}: {text_of(one)}"[:_LONGEST_NOTE] + where)
    return notes + ([f"and {len(parts) - _MOST_PARTS} more in the group"] if len(parts) > _MOST_PARTS else [])


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:  # noqa: BLE001 - it formats messages of the user's exceptions
        return ""
