"""Make a lock from requirements, with its wheels on this machine: from the cache if nothing changed, else by asking pip."""

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ttlaunch.diagnostics import LaunchError
from ttlaunch.diagnostics.count import counted
from ttlaunch.hosts.prepare.kind import Kind
from ttlaunch.hosts.prepare.lock import Lock, Store, Wheel
from ttlaunch.hosts.prepare.pip import Pip, PipError
from ttlaunch.hosts.prepare.pip_output import explain_lock, explain_no_pip, pinned_in_conflict
from ttlaunch.hosts.prepare.requirements import Requirements

_REPORT_EVERY_S = 5.0
_CREDENTIALS = re.compile(r"//[^/]*@")


@dataclass
class Locksmith:
    """Makes one lock for each kind of host and provides its wheels. Safe to use from several threads.

    Attributes:
        report: Called with a line about each step that takes time.
    """

    wanted: Requirements
    store: Store
    pip: Pip
    report: Callable[[str], None] = lambda _line: None
    _configuration: str | None = None
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _fetching: threading.Lock = field(default_factory=threading.Lock)

    def lock(self, kind: Kind, *, with_sizes: bool = True) -> Lock:
        """Return the lock for a kind of host, from the cache if nothing that decides it has changed.

        Args:
            kind: The kind of the hosts.
            with_sizes: Whether the lock needs the sizes of the wheels; wheels of unknown size are then fetched.

        Raises:
            LaunchError: If pip finds no versions that fit together, or a wheel cannot be fetched.
        """
        if not self.pip.is_there():
            raise LaunchError([explain_no_pip()])
        key = self.wanted.key(kind, pip_configuration=self.ask_configuration())
        lock = self.store.load_lock(key)
        if lock is None:
            lock = self._resolve(kind)
            self.store.save_lock(key, lock)
        if with_sizes and any(wheel.size == 0 for wheel in lock.wheels):
            self.fetch(lock.wheels, kind)
            lock = Lock(tuple(self.store.measure(wheel) for wheel in lock.wheels))
            self.store.save_lock(key, lock)
        return lock

    def _resolve(self, kind: Kind) -> Lock:
        self.report(f"settling versions for {kind}")
        try:
            return self.pip.resolve(self.wanted, kind)
        except PipError as error:
            # pip reports a pinned version without a wheel as a conflict; asking for each alone tells the two apart.
            pinned = pinned_in_conflict(error.output)
            missing = [requirement for requirement in pinned if not self.pip.has_wheel(requirement, kind)]
            raise self._error(error.output, kind, missing=missing) from error

    def fetch(self, wheels: Iterable[Wheel], kind: Kind) -> None:
        """Download those of the wheels that are not on this machine yet, and check them against the lock.

        Raises:
            LaunchError: If a wheel cannot be fetched.
        """
        with self._fetching:  # hosts of one kind ask for the same wheels at the same moment; one download serves all
            missing = self.store.missing(wheels)
            if not missing:
                return
            self.store.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.store.folder, prefix="fetch-") as name:
                folder = Path(name)
                self.report(f"fetching {counted(len(missing), 'wheel')}")
                try:
                    self.pip.fetch(missing, kind, folder, started=self._report_now_and_then())
                except PipError as error:
                    raise self._error(error.output, kind) from error
                for wheel in missing:
                    file = folder / wheel.file
                    if not file.is_file() or not self.store.take(file, wheel):
                        raise self._error(f"ERROR: pip did not fetch {wheel.file}", kind)

    def _error(self, output: str, kind: Kind, *, missing: Sequence[str] = ()) -> LaunchError:
        return LaunchError([explain_lock(output, kind, self.wanted, missing=missing)])

    def _report_now_and_then(self) -> Callable[[str], None]:
        """A function that reports a file whose download begins, if nothing has been reported for 5 s."""
        last = time.monotonic()

        def started(file: str) -> None:
            nonlocal last
            if time.monotonic() - last > _REPORT_EVERY_S:
                last = time.monotonic()
                self.report(f"fetching {file}")

        return started

    def index_hints(self) -> dict[str, str]:
        """Return the indexes of this machine's pip as variables for a host's pip; an address with a password is left out."""
        found = {}
        for line in self.ask_configuration().splitlines():
            name, _, value = line.partition("=")
            key, text = name.rpartition(".")[2], value.strip().strip("'\"")
            if key in {"index-url", "extra-index-url"} and text.startswith("http") and not _CREDENTIALS.search(text):
                found[f"PIP_{key.upper().replace('-', '_')}"] = text
        return found

    def ask_configuration(self) -> str:
        """The configuration of pip on this machine.

        The first call takes half a second, so a thread can make it while hosts are being connected to.
        """
        with self._asking:
            if self._configuration is None:
                try:
                    self._configuration = self.pip.configuration()
                except PipError:
                    self._configuration = ""
            return self._configuration
