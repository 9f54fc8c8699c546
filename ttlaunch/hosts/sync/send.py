"""Send a release to many hosts at once: each requests what it lacks and receives only that, compressed once for all.

In the end a host has the complete new release as its current one, or exactly what it had before, also if this process is
killed. `agent/receive.py` lists the frames that host and launching machine exchange.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.sync.data import DataItem
from ttlaunch.hosts.sync.last_release import News, find_news, remember
from ttlaunch.hosts.sync.refusals import explain_loss, explain_refusal
from ttlaunch.hosts.sync.release import Release
from ttlaunch.hosts.sync.results import Outcome, Planned, Progress, Synced
from ttlaunch.hosts.sync.send_buffer import Contents, SourceChangedError
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import explain_end, start_script
from ttlaunch.hosts.transport.transport import Process, Transport
from ttlaunch.records.host_scripts import SyncEnd, SyncMessage, SyncRefusal

_BESIDE = ("claims", "releases", "unpack", "host_data", "spare")
_ATTEMPTS = 3
SILENCE_S = 12.0
"""How long a host may send nothing, or take nothing in, before it counts as lost; at work it sends a frame each second."""

_END_S = 2.0
_PART = 256 * 1024
_FINAL = {"done", "plan"}


def sync_release(
    transports: Sequence[Transport],
    *,
    release: Release,
    data: Sequence[DataItem] = (),
    remote_folder: str = "~/.ttlaunch",
    pythons: Sequence[str] = (),
    interpreters: Mapping[str, Future[Process]] | None = None,
    keep: int = 3,
    dry_run: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    timeout_s: float = 3600.0,
) -> Outcome:
    """Bring a release, and texts, to all hosts.

    Args:
        transports: The hosts; connected or not.
        release: The release to send.
        data: Training texts; a text that is a file of the project is found there and not sent again.
        remote_folder: The folder for ttlaunch's files on the hosts; `~/` at the start means the user's home there.
        pythons: Interpreters to try first on the hosts.
        interpreters: Interpreters that are being started already, by host; the first attempt uses them.
        keep: How many releases stay on a host, including the new one; releases in use stay too.
        dry_run: Whether to change nothing and only find out what is missing.
        on_progress: Called with the progress of a host, from several threads.
        timeout_s: The time allowed for the whole sync; a host that sends nothing is given up much sooner.

    Raises:
        SourceChangedError: If files kept changing while they were being sent, three times in a row.
    """
    waiting = dict(interpreters or {})
    changed: list[str] = []
    problems: Sequence[Diagnostic] = ()
    while True:
        arguments = {"remote_folder": remote_folder, "keep": keep, "dry_run": dry_run}
        task = _Task(release, data, arguments=arguments, pythons=pythons, on_progress=on_progress or (lambda _: None))
        task.interpreters, waiting = waiting, {}
        try:
            task.look_back()
            answers = {host.host: answer for host, answer in on_each(transports, task.bring_to, timeout_s=timeout_s)}
            if any(isinstance(answer, Synced) for answer in answers.values()):
                remember(release)
            hosts = {transport.host: answers[transport.host] for transport in transports}
            return Outcome(release, hosts, changed=tuple(dict.fromkeys(changed)), problems=tuple(problems))
        except SourceChangedError as error:
            changed.append(error.name)
            newer, problems = release.again() if len(changed) < _ATTEMPTS else (None, ())
            if newer is None:
                raise
            release = newer
        finally:
            task.close()


class _Task:
    """One release on its way to many hosts.

    Attributes:
        contents: What hosts may ask for.
        folders: Which host copies the code into each folder; hosts that share a folder take turns.
        interpreters: Started already, by host.
    """

    def __init__(
        self,
        release: Release,
        data: Sequence[DataItem],
        *,
        arguments: dict[str, Any],
        pythons: Sequence[str],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.release, self._pythons, self.on_progress = release, pythons, on_progress
        self.interpreters: Mapping[str, Future[Process]] = {}
        sources = release.manifest.sources
        self._inside = {item.sha256: sources[item.sha256].path for item in data if item.sha256 in sources}
        texts = [item for item in data if item.sha256 not in sources]
        self.contents = Contents(release.manifest, texts)
        self.folders = _SharedFolders()
        self._finished: list[FrameStream] = []
        self._arguments = {
            **arguments,
            "tree": release.tree_hash,
            "same_names": release.same_names,
            "data": [{"sha256": item.sha256, "size": item.size, "path": item.file} for item in texts],
        }
        self._news: News | None = None

    def look_back(self) -> None:
        """Find out what is new since the last sync.

        Raises:
            SourceChangedError: If a file is not as it was when the release was made.
        """
        if not self._arguments["dry_run"]:
            self._news = find_news(self.release, self.contents.all)
        self._arguments["news"] = None if self._news is None else self._news.arguments

    def bring_to(self, transport: Transport) -> Synced | Planned:
        """Bring the release to one host.

        Raises:
            HostError: If that is not possible; a `SyncError` once the host has been reached.
            SourceChangedError: If a file on this machine is not as it was when the release was made.
        """
        transport.connect()
        began = time.monotonic()
        waiting = self.interpreters.get(transport.host)
        try:
            stream = start_script(
                transport,
                "receive",
                beside=_BESIDE,
                arguments={**self._arguments, "owner": secrets.token_hex(8)},
                pythons=self._pythons,
                interpreter=waiting.result() if waiting is not None else None,
                timeout_s=SILENCE_S,
            )
            session = _SyncProtocol(stream, self, transport)
            try:
                if self._news is not None and self._news.frame:
                    session.send_unasked(self._news.frame, files=len(self._news.arguments["contents"]))
                end = session.serve()
                self._finished.append(stream)
            except BaseException:
                stream.process.kill()
                raise
            finally:
                # Whatever happened here, hosts that share the folder must not wait for this one any longer.
                self.folders.leave(host=transport.host)
        except HostError as error:
            raise explain_loss(error) from error
        return self._result(transport.host, end, session, seconds=time.monotonic() - began)

    def close(self) -> None:
        """Let the hosts remove old releases, which they put off while the launcher still waits for other hosts."""
        for stream in self._finished:
            stream.process.close_stdin()
        self.contents.close()

    def _result(self, host: str, end: SyncEnd, session: "_SyncProtocol", *, seconds: float) -> Synced | Planned:
        tree_hash, folder = self.release.tree_hash, end.folder
        lists = {"pruned": end.pruned, "repaired": end.repaired, "differing_data": end.differing}
        if end.kind == "plan":
            return Planned(host, tree_hash, folder, files=end.files, bytes=end.bytes, already_there=end.there, **lists)
        release = f"{folder}/{contract.RELEASES_DIR}/{tree_hash}"
        inside = {sha256: f"{release}/{os.fsdecode(path)}" for sha256, path in self._inside.items()}
        return Synced(
            host,
            tree_hash,
            folder,
            release=release,
            data={**(end.data or {}), **inside},
            sent_bytes=session.sent_bytes,
            files=session.files,
            seconds=seconds,
            already_there=end.there,
            **lists,
        )


class _SharedFolders:
    """Lets hosts that see one folder take turns: the first brings the code, the others then find it there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[str, str] = {}

    def claim(self, folder: str, *, host: str) -> bool:
        """Take the turn of a folder; returns False, after the other's turn is over, if another host has it.

        Args:
            folder: Its id, the same on every host that sees it; empty if the host could not make one.
            host: Who asks.
        """
        with self._changed:
            if not folder or self._owners.setdefault(folder, host) == host:
                return True
            self._changed.wait_for(lambda: folder not in self._owners)
            return False

    def leave(self, *, host: str) -> None:
        """End this host's turn."""
        with self._changed:
            self._owners = {folder: owner for folder, owner in self._owners.items() if owner != host}
            self._changed.notify_all()


class _SyncProtocol:
    """The exchange of frames with one host.

    Attributes:
        sent_bytes: The bytes sent over the network.
        files: The number of contents that the host lacked.
    """

    def __init__(self, stream: FrameStream, task: _Task, transport: Transport) -> None:
        self._stream, self._task, self._transport, self._host = stream, task, transport, stream.host
        self.sent_bytes = 0
        self.files = 0
        self._bytes = 0

    def send_unasked(self, frame: bytes, *, files: int) -> None:
        """Send contents before the host asks for them.

        Raises:
            HostError: If it cannot take them in, or is lost.
        """
        self._write([frame])
        self.files += files

    def serve(self) -> SyncEnd:
        """Answer the host's requests until its last frame, which is returned.

        Raises:
            HostError: If it cannot take the release in, or is lost.
            SourceChangedError: If a file on this machine is not as it was when the release was made.
        """
        while True:
            request, body = self._receive()
            if isinstance(request, SyncEnd):
                self._task.on_progress(Progress(self._host, self._bytes, self._bytes, finished=True))
                return request
            if request.kind == "busy":
                continue
            # Only now is the folder's id known. A host whose folder another host has just filled looks again, and then
            # finds everything there.
            if not self._task.folders.claim(request.id, host=self._host):
                self._stream.send({"kind": "again"}, timeout_s=SILENCE_S)
            elif request.kind == "manifest":
                manifest = self._task.release.manifest.packed
                self._stream.send({"kind": "manifest", "packed": True}, manifest, timeout_s=SILENCE_S)
                self.sent_bytes += len(manifest)
            else:
                self._send_contents(request, body)

    def _receive(self) -> tuple[SyncMessage | SyncEnd, bytes]:
        frame = self._stream.receive(timeout_s=SILENCE_S)
        if frame is None:
            reason = explain_end(self._stream, timeout_s=_END_S)
            if reason is not None:
                raise reason
            frame = self._stream.expect(timeout_s=_END_S)  # at the end of the stream: raises the script's own message
        header, body = frame
        request = self._stream.checked(SyncMessage, header)
        if request.kind == "error":
            raise explain_refusal(self._host, self._stream.checked(SyncRefusal, header))
        return (self._stream.checked(SyncEnd, header) if request.kind in _FINAL else request), body

    def _send_contents(self, request: SyncMessage, wanted: bytes) -> None:
        before, self._bytes = self._bytes, self._bytes + request.bytes
        self.files += request.files
        # Only now is the speed known: the script and the manifest have just been sent.
        buffer = self._task.contents.buffer(wanted, bytes_per_s=self._transport.bytes_per_s)
        for frame, carried in buffer.frames():
            # In parts, so that a slow host that keeps taking data in has the deadline for each part anew.
            self._write([frame[start : start + _PART] for start in range(0, len(frame), _PART)])
            self._task.on_progress(Progress(self._host, before + carried, self._bytes))

    def _write(self, parts: Sequence[bytes]) -> None:
        try:
            for part in parts:
                self._stream.process.write(part, timeout_s=SILENCE_S)
                self.sent_bytes += len(part)
        except HostError as error:
            raise self._reason(error) from error

    def _reason(self, error: HostError) -> HostError:
        """Return the host's own reason for ending the sync, if it sent one, which says more than a broken connection."""
        if error.trouble is not Trouble.LOST:
            return error
        try:
            while not isinstance(self._receive()[0], SyncEnd):
                pass
        except HostError as found:
            return found if found.trouble is not Trouble.TIMED_OUT else error
        return error
