"""Exchange frames with one of our scripts on a host; `contract.pack_frame` has the format."""

import time
from collections.abc import Mapping
from typing import Any, TypeVar

from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.deadline import render_seconds, time_left
from ttlaunch.hosts.transport.transport import Process
from ttlaunch.records.parser import BadRecord, parse

_T = TypeVar("_T")

_SHOWN = 200
PYTHON_IS_UP = "python"
"""The kind of the frame by which a Python on a host says which bytecode it understands, before it runs the first script."""


class FrameStream:
    """Sends and receives frames through a process's standard input and output.

    After a frame has missed its deadline, no further frame is received: what comes later may be the rest of it, or the
    answer to an earlier question. A caller that wants to continue starts the script anew.

    Attributes:
        host: The host's name, for error messages.
        process: The script.
        bytecode: Which bytecode the Python that runs the script understands, `importlib.util.MAGIC_NUMBER` in hexadecimal;
            empty while it has not said so.
    """

    def __init__(self, host: str, process: Process) -> None:
        self.host = host
        self.process = process
        self.bytecode = ""
        self._has_begun = False  # a frame has come
        self._overdue: str | None = None
        self._next: tuple[dict[str, Any], bytes] | None = None  # a frame that `wait_for_python` has received

    def send(self, header: Mapping[str, Any], body: bytes = b"", *, timeout_s: float) -> None:
        """Send one frame.

        Raises:
            HostError: As `Process.write`; SCRIPT if the script has ended with a message on its standard error.
        """
        try:
            self.process.write(contract.pack_frame(header, body), timeout_s=timeout_s)
        except HostError as error:
            raise self._with_stderr_tail(error) from error

    def receive(
        self, *, timeout_s: float, largest_body: int = contract.LARGEST_BODY
    ) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame, or None at the end of the stream.

        Args:
            timeout_s: The time allowed until the frame has arrived completely.
            largest_body: The longest body, in bytes, that is accepted.

        Raises:
            HostError: TIMED_OUT if the frame, or one before it, was not complete within `timeout_s`, LOST if the
                connection broke, SCRIPT if something that is no frame came.
        """
        if self._next is not None:
            kept, self._next = self._next, None
            return kept
        end = time.monotonic() + timeout_s
        while True:
            frame = self._read(end, timeout_s=timeout_s, largest_body=largest_body)
            if frame is None or not self._says_bytecode(frame[0]):
                return frame

    def wait_for_python(self, *, timeout_s: float) -> None:
        """Wait until a Python that has not been given a script yet has said which bytecode it understands, or has ended.

        Raises:
            HostError: As `receive`.
        """
        frame = self._read(time.monotonic() + timeout_s, timeout_s=timeout_s, largest_body=contract.LARGEST_BODY)
        if frame is not None and not self._says_bytecode(frame[0]):
            self._next = frame

    def _says_bytecode(self, header: Mapping[str, Any]) -> bool:
        is_hello = header.get("kind") == PYTHON_IS_UP and not self._has_begun  # later it is no frame of our scripts
        self._has_begun = True
        if is_hello:
            self.bytecode = str(header.get("bytecode"))
        return is_hello

    def _read(self, end: float, *, timeout_s: float, largest_body: int) -> tuple[dict[str, Any], bytes] | None:
        if self._overdue is not None:
            raise HostError(self.host, Trouble.TIMED_OUT, self._overdue)
        try:
            return contract.read_frame(
                lambda size: self.process.read(size, timeout_s=time_left(end)), largest_body=largest_body
            )
        except HostError as error:
            if error.trouble is not Trouble.TIMED_OUT:
                raise
            self._overdue = f"no answer from our script on it within {render_seconds(timeout_s)}"
            raise HostError(self.host, Trouble.TIMED_OUT, self._overdue) from error
        except EOFError as error:
            lost = HostError(self.host, Trouble.LOST, "the connection ended in the middle of a message")
            raise self._with_stderr_tail(lost) from error
        except ValueError as error:
            raise HostError(
                self.host,
                Trouble.SCRIPT,
                f"something prints into our connection: {str(error)[:_SHOWN]}",
                hints=("let shell start-up files on the host print nothing when no terminal is there",),
            ) from error

    def expect(self, *, timeout_s: float, largest_body: int = contract.LARGEST_BODY) -> tuple[dict[str, Any], bytes]:
        """Return the next frame, where one must come; the arguments are those of `receive`.

        Raises:
            HostError: As `receive`; SCRIPT with the last line of the script's standard error if the stream has ended.
        """
        frame = self.receive(timeout_s=timeout_s, largest_body=largest_body)
        if frame is None:
            raise self._with_stderr_tail(HostError(self.host, Trouble.LOST, "our script on it ended without an answer"))
        return frame

    def checked(self, cls: type[_T], header: Mapping[str, Any]) -> _T:
        """Parse the header of a frame into a record of a class.

        Raises:
            HostError: SCRIPT if it is no such record.
        """
        found = parse(cls, header)
        if isinstance(found, BadRecord):
            raise HostError(self.host, Trouble.SCRIPT, f"what came from it is no answer: {found.reason}")
        return found

    def answer(self, cls: type[_T], *, timeout_s: float) -> _T:
        """Return the next frame as a record of a class, where one must come.

        Raises:
            HostError: As `expect` and `checked`.
        """
        header, _ = self.expect(timeout_s=timeout_s)
        return self.checked(cls, header)

    def _with_stderr_tail(self, error: HostError) -> HostError:
        """Replace an error by the script's own message, if there is one: better evidence than a closed pipe."""
        lines = self.process.stderr().decode("utf-8", "replace").strip().splitlines()
        if not lines or error.trouble is Trouble.TIMED_OUT:
            return error
        return HostError(self.host, Trouble.SCRIPT, f"our script on it broke: {lines[-1][:_SHOWN]}", notes=error.notes)
