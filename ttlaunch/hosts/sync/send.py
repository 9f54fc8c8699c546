"""Bring a release to many hosts at once: each says what it lacks, and only that travels, compressed once for all.

A host ends with the whole new release, made current, or with exactly what it had before; so does every host when this
process is killed. What host and launching machine say to each other stands in `agent/receive.py`.
"""

import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ttlaunch import contract
from ttlaunch.errors import HostError
from ttlaunch.hosts.sync.contents import Contents
from ttlaunch.hosts.sync.data import DataItem
from ttlaunch.hosts.sync.last_release import News, find_news, remember
from ttlaunch.hosts.sync.protocol import SILENCE_S, SharedFolders, SyncProtocol
from ttlaunch.hosts.sync.refusals import explain_loss
from ttlaunch.hosts.sync.release import Release
from ttlaunch.hosts.sync.results import Outcome, Planned, Progress, Synced
from ttlaunch.hosts.sync.send_buffer import SourceChangedError
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import start_script
from ttlaunch.hosts.transport.transport import Process, Transport
from ttlaunch.records.hosts import SyncEnd

_BESIDE = ("releases", "unpack", "contents", "host_data")
_ATTEMPTS = 3


__all__ = ["Outcome", "Planned", "Progress", "SourceChangedError", "Synced", "sync_release"]


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
        release: What they are to have.
        data: Texts; one that is a file of the project is found there and not sent again.
        remote_folder: On the hosts; `~/` at the start means the user's home there.
        pythons: Interpreters to try first on the hosts.
        interpreters: Being started already, by host; the first attempt uses them.
        keep: How many releases stay on a host, the new one included; those in use stay besides.
        dry_run: Only ask what is missing.
        on_progress: Called from several threads.
        timeout_s: Bounds the whole; silence is noticed much sooner.

    Raises:
        SourceChangedError: If files kept changing while they were being sent, three times in a row.
    """
    attempts_left, waiting = _ATTEMPTS, dict(interpreters or {})
    while True:
        arguments = {"remote_folder": remote_folder, "keep": keep, "dry_run": dry_run}
        task = _Task(release, data, arguments=arguments, pythons=pythons, on_progress=on_progress or _silent)
        task.interpreters, waiting = waiting, {}
        try:
            task.look_back()
            answers = {host.host: answer for host, answer in on_each(transports, task.bring_to, timeout_s=timeout_s)}
            if any(isinstance(answer, Synced) for answer in answers.values()):
                remember(release)
            return Outcome(release, {transport.host: answers[transport.host] for transport in transports})
        except SourceChangedError:
            attempts_left -= 1
            newer = release.again() if attempts_left else None
            if newer is None:
                raise
            release = newer
        finally:
            task.close()


def _silent(_: Progress) -> None:
    pass


class _Task:
    """One release for many hosts."""

    def __init__(
        self,
        release: Release,
        data: Sequence[DataItem],
        *,
        arguments: dict[str, Any],
        pythons: Sequence[str],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._release, self._pythons, self.on_progress = release, pythons, on_progress
        self.interpreters: Mapping[str, Future[Process]] = {}
        sources = release.manifest.sources
        self._inside = {item.sha256: sources[item.sha256].path for item in data if item.sha256 in sources}
        texts = [item for item in data if item.sha256 not in sources]
        self.contents = Contents(release.manifest, texts)
        self.folders = SharedFolders()
        self._packed: bytes | None = None
        self._finished: list[FrameStream] = []
        self._lock = threading.Lock()
        self._arguments = {
            **arguments,
            "tree": release.tree_hash,
            "same_names": release.same_names,
            "data": [{"sha256": item.sha256, "size": item.size, "path": item.file} for item in texts],
        }
        self._news: News | None = None

    def look_back(self) -> None:
        """See what is new since the last sync.

        Raises:
            SourceChangedError: If a file is not as it was.
        """
        if not self._arguments["dry_run"]:
            self._news = find_news(self._release, self.contents.all)
        self._arguments["news"] = None if self._news is None else self._news.arguments

    @property
    def manifest(self) -> bytes:
        """The manifest as it travels."""
        with self._lock:
            if self._packed is None:
                self._packed = zlib.compress(self._release.manifest.text, 1)
            return self._packed

    def bring_to(self, transport: Transport) -> Synced | Planned:
        """Make one host have it.

        Raises:
            HostError: If that is not possible; a `SyncError` once the host has been reached.
            SourceChangedError: If a file on this machine is not as it was.
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
            protocol = SyncProtocol(stream, self)
            try:
                if self._news is not None and self._news.frame:
                    protocol.give(self._news.frame, files=len(self._news.arguments["contents"]))
                said = protocol.hold()
                self._finished.append(stream)
            except BaseException:
                stream.process.kill()
                raise
            finally:
                self.folders.leave(host=transport.host)
        except HostError as error:
            raise explain_loss(error) from error
        return self._answer(transport.host, said, protocol, seconds=time.monotonic() - began)

    def close(self) -> None:
        """Let the hosts tidy up, which they put off for as long as others are still waited for."""
        for stream in self._finished:
            stream.process.close_stdin()
        self.contents.close()

    def _answer(self, host: str, said: SyncEnd, protocol: SyncProtocol, *, seconds: float) -> Synced | Planned:
        tree_hash, folder = self._release.tree_hash, said.folder
        lists = {
            "pruned": said.pruned,
            "repaired": said.repaired,
            "differing_data": said.differing,
        }
        if said.kind == "plan":
            return Planned(host, tree_hash, folder, said.files, said.bytes, said.there, **lists)
        release = f"{folder}/{contract.RELEASES_DIR}/{tree_hash}"
        inside = {sha256: f"{release}/{os.fsdecode(path)}" for sha256, path in self._inside.items()}
        data = {**(said.data or {}), **inside}
        return Synced(
            host, tree_hash, folder, release, data, protocol.sent_bytes, protocol.files, seconds, said.there, **lists
        )
