"""Use the sockets of a descendant and stop it for a moment, as a debugger does, without its notice.

The kernel lets a process do that with its descendants. Linux before 5.6 cannot, and a container or a security policy may forbid it.
Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import socket

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterator

_PIDFD_GETFD = 438  # the same number on every architecture; Python has no function for it
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # requests of ptrace
_EVERY_THREAD = 0x40000000  # __WALL: wait for a thread that is not the first of its process too


def may_trace() -> bool:
    """Whether the kernel lets this process use the sockets of its children and stop them; tried with a child that has one.

    Raises:
        OSError: No child can be started.
    """
    import subprocess  # noqa: PLC0415 - daemons need not wait for it

    ours, its = socket.socketpair()
    with ours, its, subprocess.Popen(["sleep", "60"], stdin=its.fileno()) as child:
        try:
            process = TracedProcess(child.pid)
            with contextlib.closing(process), process.borrowed(0), frozen(child.pid):
                return True
        except OSError:
            return False
        finally:
            child.kill()


class TracedProcess:
    """Another process, whose descriptors this one may borrow."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def close(self) -> None:
        os.close(self._descriptor)

    def sockets(self) -> Iterator[tuple[int, str]]:
        """Yield the numbers of the descriptors that are sockets, each with what the kernel calls the socket."""
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                target = os.readlink(f"/proc/{self.pid}/fd/{name}")
            except FileNotFoundError:  # closed meanwhile
                continue
            if target.startswith("socket:"):
                yield int(name), target

    @contextlib.contextmanager
    def borrowed(self, number: int) -> Iterator[socket.socket]:
        """A second descriptor of one of its sockets."""
        with socket.socket(fileno=_call("syscall", _PIDFD_GETFD, self._descriptor, number, 0)) as found:
            yield found

    @contextlib.contextmanager
    def connections(self, listener: socket.socket) -> Iterator[list[socket.socket]]:
        """Second descriptors of the connections that it has accepted from a listener."""
        port = listener.getsockname()[1]
        with contextlib.ExitStack() as borrowed:
            sockets = [borrowed.enter_context(self.borrowed(number)) for number, _ in self.sockets()]
            alike = [found for found in sockets if (found.family, found.type) == (listener.family, listener.type)]
            yield [found for found in alike if has_peer(found) and found.getsockname()[1] == port]


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop all threads of a descendant for as long as the block runs; it does not notice.

    Nobody else may wait for a child meanwhile: the stop would look like its end.
    """
    threads: list[int] = []
    try:
        while new := {int(task) for task in os.listdir(f"/proc/{pid}/task")} - set(threads):
            for thread in new:
                _call("ptrace", _SEIZE, thread, 0, 0)
                threads.append(thread)
                _call("ptrace", _INTERRUPT, thread, 0, 0)
                seen = os.waitid(os.P_PID, thread, os.WSTOPPED | os.WEXITED | os.WNOWAIT | _EVERY_THREAD)
                if seen is None or seen.si_code not in {os.CLD_TRAPPED, os.CLD_STOPPED}:
                    raise ProcessLookupError(thread)
                os.waitid(os.P_PID, thread, os.WSTOPPED | _EVERY_THREAD)
        yield
    finally:
        for thread in threads:
            try:
                _call("ptrace", _DETACH, thread, 0, 0)
            except OSError:  # it has been killed
                _pass_on_the_end(thread, pid)


def has_peer(found: socket.socket) -> bool:
    try:
        found.getpeername()
    except OSError:
        return False
    return True


def has_tracer(pid: int) -> bool:
    """Whether a debugger has the process now, so that it can be stopped when the debugger has gone."""
    return _status(pid).get("TracerPid", "0") != "0"


def read_text(path: str) -> str:
    """Return the text of a file about a process; empty if the process has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _pass_on_the_end(thread: int, pid: int) -> None:
    """Take the news of a traced thread's end, which its process's parent gets only then; leave that of our own child for its owner."""
    with contextlib.suppress(OSError):
        if thread != pid or _status(pid).get("PPid") != str(os.getpid()):
            os.waitid(os.P_PID, thread, os.WEXITED | _EVERY_THREAD)


def _status(pid: int) -> dict[str, str]:
    """Return the lines of a process's status by name; empty if it has ended."""
    lines = read_text(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _call(function: str, *arguments: int) -> int:
    """Call a function of the C library that Python has no name for.

    Raises:
        OSError: The kernel refuses.
    """
    import ctypes  # noqa: PLC0415 - whoever starts ranks imports this module, and few trace any

    library = ctypes.CDLL(None, use_errno=True)
    result: int = getattr(library, function)(*(ctypes.c_long(value) for value in arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
