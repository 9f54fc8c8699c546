"""Register the runs of a user on this machine, wherever their folders are, in a small SQLite file.

It only points to run folders, which contain everything else. A broken registry must not stop a run from starting, so every
failure is a `RegistryError`, after some seconds at most. SQLite uses a rollback journal, because write-ahead logging does
not work on network file systems, where home folders may be.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ttlaunch import contract
from ttlaunch.errors import TtlaunchError
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.runs.files import read_object
from ttlaunch.running.runs.launcher import this_process
from ttlaunch.system_reason import system_reason

_PATIENCE_S = 5.0
_VERSION = 1
_SCHEMA = """\
CREATE TABLE IF NOT EXISTS runs (
    folder TEXT PRIMARY KEY, run_id TEXT NOT NULL, name TEXT NOT NULL, plan_hash TEXT NOT NULL, ranks INTEGER NOT NULL,
    machine TEXT NOT NULL, boot TEXT NOT NULL, pid INTEGER NOT NULL, pid_started INTEGER NOT NULL,
    started REAL NOT NULL, ended REAL, status TEXT, exit_status INTEGER
)"""


class RegistryError(TtlaunchError):
    """The registry cannot be read or written; the message says why and where."""


@dataclass(frozen=True)
class Entry:
    """A run that was registered.

    Attributes:
        started, ended: Seconds since the epoch; `ended` is None while the run is active, or if its launcher was killed.
    """

    folder: Path
    run_id: str
    name: str
    plan_hash: str
    started: float
    ended: float | None
    status: str | None
    exit_status: int | None


class Registry:
    """The registry's file; opened for each use, so that a run holds no lock."""

    def __init__(self, path: Path, *, patience_s: float = _PATIENCE_S) -> None:
        """Set the path of the file, and how long to wait while other processes write to it."""
        self.path = path
        self._patience_s = patience_s

    def enter(self, folder: Path, *, name: str, plan_hash: str, ranks: int) -> None:
        """Add a run that this process is about to start.

        Raises:
            RegistryError: The registry cannot be written.
        """
        us = this_process()
        with self._open(write=True) as connection:
            connection.execute(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)",
                (
                    str(folder),
                    folder.name,
                    name,
                    plan_hash,
                    ranks,
                    us.machine,
                    us.boot,
                    us.pid,
                    us.started,
                    time.time(),
                ),
            )

    def leave(self, folder: Path) -> None:
        """Record how a run ended, from its report; without a report, the entry does not change.

        Raises:
            RegistryError: The registry cannot be written.
        """
        try:
            report = read_object(folder / contract.REPORT_FILE)
            status, exit_status = str(report["status"]), int(report["exit_status"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        with self._open(write=True) as connection:
            connection.execute(
                "UPDATE runs SET ended = ?, status = ?, exit_status = ? WHERE folder = ?",
                (time.time(), status, exit_status, str(folder)),
            )

    def forget(self, folder: Path) -> None:
        """Remove a run.

        Raises:
            RegistryError: The registry cannot be written.
        """
        with self._open(write=True) as connection:
            connection.execute("DELETE FROM runs WHERE folder = ?", (str(folder),))

    def entries(self) -> list[Entry]:
        """Return all runs, oldest first; empty if there is no registry.

        Raises:
            RegistryError: The registry exists and cannot be read.
        """
        if not self.path.exists():
            return []
        with self._open(write=False) as connection:
            if connection.execute("PRAGMA user_version").fetchone() == (0,):
                return []  # another process has just created the file, and not yet the table
            rows = connection.execute(
                "SELECT folder, run_id, name, plan_hash, started, ended, status, exit_status FROM runs ORDER BY started"
            ).fetchall()
        return [Entry(Path(folder), *rest) for folder, *rest in rows]

    @contextlib.contextmanager
    def _open(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Readers open it for writing too: SQLite then rolls back what a killed writer has left half done.
            mode = "rwc" if write else "rw"
            connection = sqlite3.connect(
                f"{self.path.as_uri()}?mode={mode}", uri=True, timeout=self._patience_s, isolation_level=None
            )
        except (OSError, sqlite3.Error) as error:
            raise self._error(error) from error
        try:
            with connection:
                if write:
                    # Two processes that both read first would deadlock.
                    connection.execute("BEGIN IMMEDIATE")
                self._check(connection, write=write)
                yield connection
        except sqlite3.Error as error:
            raise self._error(error) from error
        finally:
            connection.close()

    def _check(self, connection: sqlite3.Connection, *, write: bool) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise RegistryError(f"{self.path}: it was written by a newer ttlaunch")
        if write and version < _VERSION:
            connection.execute(_SCHEMA)
            connection.execute(f"PRAGMA user_version = {_VERSION}")

    def _error(self, error: Exception) -> RegistryError:
        return RegistryError(f"{self.path}: {system_reason(error)}")


def find_registry(environment: Mapping[str, str]) -> Registry:
    """Return the user's registry, below `$XDG_STATE_HOME` or else below `~/.local/state`.

    Raises:
        RegistryError: Neither `XDG_STATE_HOME` nor `HOME` names an absolute path.
    """
    base = environment.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117 - the XDG rules ignore a relative path
        home = environment.get("HOME", "")
        if not home.startswith("/"):
            raise RegistryError("there is no home folder: neither HOME nor XDG_STATE_HOME is set")
        base = f"{home}/.local/state"
    return Registry(Path(base) / "ttlaunch" / "runs.sqlite")


def was_started_here(folder: Path, plan_hash: object) -> bool:
    """Whether this user has started the run of a folder on this machine, with the plan of this hash, as the registry knows."""
    try:
        entries = find_registry(os.environ).entries()
    except RegistryError:
        return False
    return any(entry.folder == folder.resolve() and entry.plan_hash == plan_hash for entry in entries)
