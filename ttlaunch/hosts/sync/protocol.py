"""The launching machine's side of what is said to one host: answer its requests until it has the release."""

import threading
from collections.abc import Callable
from typing import Protocol

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.sync.contents import Contents
from ttlaunch.hosts.sync.refusals import explain_refusal
from ttlaunch.hosts.sync.results import Progress
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import explain_end
from ttlaunch.records.hosts import SyncEnd, SyncMessage, SyncRefusal

SILENCE_S = 12.0
"""How long a host may say nothing, or take nothing in, before it counts as lost; at work it speaks every second."""

_STDERR_TAIL_S = 2.0
_PART = 256 * 1024
_FINAL = {"done", "plan"}


class SharedFolders:
    """Hosts that see one folder take turns: the first brings the code, the others find it there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[str, str] = {}

    def claim(self, folder: str, *, host: str) -> bool:
        """Whether it is this host's turn; if it is another's, wait for its end and then say no."""
        with self._changed:
            if not folder or self._owners.setdefault(folder, host) == host:
                return True
            self._changed.wait_for(lambda: folder not in self._owners)
            return False

    def leave(self, *, host: str) -> None:
        """This host's turn is over."""
        with self._changed:
            self._owners = {folder: owner for folder, owner in self._owners.items() if owner != host}
            self._changed.notify_all()


class Sender(Protocol):
    """What is sent; the same for all hosts."""

    contents: Contents
    folders: SharedFolders
    on_progress: Callable[[Progress], None]

    @property
    def manifest(self) -> bytes:
        """Compressed."""


class SyncProtocol:
    """What is said to one host.

    Attributes:
        sent_bytes: What went over the network.
        files: How many contents the host lacked.
    """

    def __init__(self, stream: FrameStream, sender: Sender) -> None:
        self._stream, self._sender, self._host = stream, sender, stream.host
        self.sent_bytes = 0
        self.files = 0
        self._bytes = 0

    def give(self, frame: bytes, *, files: int) -> None:
        """Send contents before the host asks for them.

        Raises:
            HostError: If it cannot take them in, or is lost.
        """
        try:
            self._stream.process.write(frame, timeout_s=SILENCE_S)
        except HostError as error:
            self._hear_why(error)
        self.sent_bytes += len(frame)
        self.files += files

    def hold(self) -> SyncEnd:
        """Answer until the host has said its last word, and return that.

        Raises:
            HostError: If it cannot take the release in, or is lost.
            SourceChangedError: If a file on this machine is not as it was.
        """
        while True:
            said, body = self._hear()
            if isinstance(said, SyncEnd):
                self._sender.on_progress(Progress(self._host, self._bytes, self._bytes, finished=True))
                return said
            if said.kind == "busy":
                continue
            if not self._sender.folders.claim(said.id, host=self._host):
                self._stream.send({"kind": "again"}, timeout_s=SILENCE_S)
            elif said.kind == "manifest":
                manifest = self._sender.manifest
                self._stream.send({"kind": "manifest", "packed": True}, manifest, timeout_s=SILENCE_S)
                self.sent_bytes += len(manifest)
            else:
                self._send(said, body)

    def _hear(self) -> tuple[SyncMessage | SyncEnd, bytes]:
        frame = self._stream.receive(timeout_s=SILENCE_S)
        if frame is None:
            reason = explain_end(self._stream, timeout_s=_STDERR_TAIL_S)
            if reason is not None:
                raise reason
            self._stream.expect(timeout_s=_STDERR_TAIL_S)  # raises with the last lines on the script's stderr
            raise HostError(self._host, Trouble.LOST, "our script on it ended without an answer")
        header, body = frame
        said = self._stream.checked(SyncMessage, header)
        if said.kind == "error":
            raise explain_refusal(self._host, self._stream.checked(SyncRefusal, header))
        return (self._stream.checked(SyncEnd, header) if said.kind in _FINAL else said), body

    def _send(self, said: SyncMessage, wanted: bytes) -> None:
        """Send what the host asked for."""
        before, self._bytes = self._bytes, self._bytes + said.bytes
        self.files += said.files
        for frame, carried in self._sender.contents.buffer(wanted).frames():
            try:
                for start in range(0, len(frame), _PART):
                    self._stream.process.write(frame[start : start + _PART], timeout_s=SILENCE_S)
            except HostError as error:
                self._hear_why(error)
            self.sent_bytes += len(frame)
            self._sender.on_progress(Progress(self._host, before + carried, self._bytes))

    def _hear_why(self, error: HostError) -> None:
        """A host that takes nothing in any more may have said why; that is better than a broken connection."""
        if error.trouble is not Trouble.LOST:
            raise error
        try:
            while not isinstance(self._hear()[0], SyncEnd):
                pass
        except HostError as said:
            raise (said if said.trouble is not Trouble.TIMED_OUT else error) from error
        raise error
