"""Move the sockets on which an engine listens to the loopback interface, where only this machine reaches them.

Both generations of Open MPI listen on all interfaces for daemons of other hosts, whatever their settings say, and whoever
connects there is asked for no key. When all ranks are on this machine there are no such daemons. The kernel lets a parent use
and stop its child as a debugger does; where it does not (Linux before 5.6, a container or a security policy that forbids it),
the engine listens as it chose to.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438  # the same number on every architecture; Python has no function for it
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # requests of ptrace
_EVERY_THREAD = 0x40000000  # __WALL: wait for a thread that is not the first of its process too
_FORBIDDEN = {errno.EPERM, errno.EACCES, errno.ENOSYS}
_LOOK_S = 0.005
_LONGEST_S = 10.0
_BACKLOG = 128
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def keep_on_loopback(pid: int) -> None:
    """Watch a child that has just been started, and move each socket on which it listens, until it has children itself.

    It returns when the ranks have started, after 10 s, or at once if the child has ended or may not be traced.
    """
    deadline = time.monotonic() + _LONGEST_S
    known: set[str] = set()
    is_starting = True
    descriptor = os.pidfd_open(pid)
    try:
        while is_starting and not _has_ended(descriptor) and time.monotonic() < deadline:
            try:
                # Asked first: an engine listens before it starts its ranks, so the look that follows sees every socket.
                has_ranks = any(path.read_bytes() for path in Path(f"/proc/{pid}/task").glob("*/children"))
                _look(pid, descriptor, known)
                is_starting = not has_ranks
            except OSError as error:
                if error.errno in _FORBIDDEN:
                    return
                # A socket or a thread has gone while it was looked at; the next look finds what there is then.
    finally:
        os.close(descriptor)


def _has_ended(descriptor: int) -> bool:
    """Whether a process has ended, after a moment in which it may do so."""
    return bool(select.select([descriptor], [], [], _LOOK_S)[0])


def _look(pid: int, descriptor: int, known: set[str]) -> None:
    """Move the sockets that listen on all interfaces; `known` has those that need no second look."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink())
        if not target.startswith("socket:") or target in known:
            continue
        with _borrowed(descriptor, int(link.name)) as listener:
            if listener.family not in _LOOPBACK:
                known.add(target)
            elif listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if ipaddress.ip_address(listener.getsockname()[0]).is_unspecified:
                    _move(listener, pid)
                known.add(target)


def _move(listener: socket.socket, pid: int) -> None:
    """Let a socket listen on the loopback interface in place of all interfaces, with the same port."""
    address, port, *rest = listener.getsockname()
    # The process must not find its socket in between, when it does not listen: it would report an error, and listen no more.
    # A stop by signal would do, but Open MPI 4 prints a line about the signal that continues it.
    with _frozen(pid):
        listener.shutdown(
            socket.SHUT_RDWR
        )  # gives back a port that the kernel chose, so that the socket can be bound again
        try:
            listener.bind((_LOOPBACK[socket.AddressFamily(listener.family)], port, *rest))
        except OSError:  # this machine has no loopback address of that family
            listener.bind((address, port, *rest))
        listener.listen(_BACKLOG)


@contextlib.contextmanager
def _borrowed(descriptor: int, number: int) -> Iterator[socket.socket]:
    """A second descriptor of a socket of another process."""
    with socket.socket(fileno=_call("syscall", _PIDFD_GETFD, descriptor, number, 0)) as found:
        yield found


@contextlib.contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """Stop all threads of a child for as long as the block runs; it does not notice.

    Nobody else may wait for the child meanwhile: the stop would look like its end.
    """
    threads: list[int] = []
    try:
        while new := {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - set(threads):
            for thread in new:
                _call("ptrace", _SEIZE, thread, 0, 0)
                threads.append(thread)
                _call("ptrace", _INTERRUPT, thread, 0, 0)
                # Its end is looked at and left for the child's owner, who needs its status.
                seen = os.waitid(os.P_PID, thread, os.WSTOPPED | os.WEXITED | os.WNOWAIT | _EVERY_THREAD)
                if seen is None or seen.si_code not in {os.CLD_TRAPPED, os.CLD_STOPPED}:
                    raise ProcessLookupError(thread)
                os.waitid(os.P_PID, thread, os.WSTOPPED | _EVERY_THREAD)
        yield
    finally:
        for thread in threads:
            with contextlib.suppress(OSError):
                _call("ptrace", _DETACH, thread, 0, 0)


def _call(function: str, *arguments: int) -> int:
    """Call a function of the C library that Python has no name for.

    Raises:
        OSError: The kernel refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    result: int = getattr(library, function)(*(ctypes.c_long(value) for value in arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
