"""From requirements to a lock with its wheels on this machine: remembered where nothing changed, else asked of pip."""

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ttlaunch.diagnostics import Diagnostic
from ttlaunch.diagnostics.count import counted
from ttlaunch.hosts.prepare.kind import Kind
from ttlaunch.hosts.prepare.lock import Lock, Store, Wheel
from ttlaunch.hosts.prepare.pip import Pip, PipError
from ttlaunch.hosts.prepare.pip_output import explain_lock, explain_no_pip, pinned_in_conflict
from ttlaunch.hosts.prepare.requirements import Requirements

_TELL_EVERY_S = 5.0
_CREDENTIALS = re.compile(r"//[^/]*@")


@dataclass
class Locksmith:
    """Makes one lock for each kind of host and keeps their wheels at hand. Safe to use from several threads.

    Attributes:
        told: Hears in words what takes time.
    """

    wanted: Requirements
    store: Store
    pip: Pip
    told: Callable[[str], None] = lambda _words: None
    _configuration: str | None = None
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _fetching: threading.Lock = field(default_factory=threading.Lock)

    def lock(self, kind: Kind, *, measured: bool = True) -> Lock | Diagnostic:
        """The lock of a kind of host; `measured` with the sizes of its wheels, for which they have to be fetched."""
        if not self.pip.is_there():
            return explain_no_pip()
        key = self.wanted.key(kind, pip_configuration=self.ask_configuration())
        lock = self.store.load_lock(key)
        if lock is None:
            found = self._resolve(kind)
            if isinstance(found, Diagnostic):
                return found
            lock = found
            self.store.save_lock(key, lock)
        if measured and any(wheel.size == 0 for wheel in lock.wheels):
            problem = self.fetch(lock.wheels, kind)
            if problem is not None:
                return problem
            lock = Lock(tuple(self.store.measure(wheel) for wheel in lock.wheels))
            self.store.save_lock(key, lock)
        return lock

    def _resolve(self, kind: Kind) -> Lock | Diagnostic:
        self.told(f"settling versions for {kind}")
        try:
            return self.pip.resolve(self.wanted, kind)
        except PipError as error:
            pinned = pinned_in_conflict(error.output)
            missing = [requirement for requirement in pinned if not self.pip.has_wheel(requirement, kind)]
            return explain_lock(error.output, kind, self.wanted, missing=missing)

    def fetch(self, wheels: Iterable[Wheel], kind: Kind) -> Diagnostic | None:
        """See to it that these wheels lie here, whole; says why not."""
        with self._fetching:
            missing = self.store.missing(wheels)
            if not missing:
                return None
            self.store.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.store.folder, prefix="fetch-") as name:
                folder = Path(name)
                try:
                    self.told(f"fetching {counted(len(missing), 'wheel')}")
                    self.pip.fetch(missing, kind, folder, told=self._report_now_and_then())
                except PipError as error:
                    return explain_lock(error.output, kind, self.wanted, missing=[])
                taken = [wheel for wheel in missing if (folder / wheel.file).is_file()]
                wrong = [
                    wheel for wheel in missing if wheel not in taken or not self.store.take(folder / wheel.file, wheel)
                ]
        if wrong:
            return explain_lock(f"ERROR: pip did not fetch {wrong[0].file}", kind, self.wanted, missing=[])
        return None

    def _report_now_and_then(self) -> Callable[[str], None]:
        """Tells of a file whose download begins, if nothing has been said for a while."""
        said = time.monotonic()

        def tell(file: str) -> None:
            nonlocal said
            if time.monotonic() - said > _TELL_EVERY_S:
                said = time.monotonic()
                self.told(f"fetching {file}")

        return tell

    def index_hints(self) -> dict[str, str]:
        """Where this machine's pip finds packages, for hosts without a configuration of their own; never a password."""
        found = {}
        for line in self.ask_configuration().splitlines():
            name, _, value = line.partition("=")
            key, text = name.rpartition(".")[2], value.strip().strip("'\"")
            if key in {"index-url", "extra-index-url"} and text.startswith("http") and not _CREDENTIALS.search(text):
                found[f"PIP_{key.upper().replace('-', '_')}"] = text
        return found

    def ask_configuration(self) -> str:
        """What pip was told here. Takes half a second the first time, which may pass while hosts are connected to."""
        with self._asking:
            if self._configuration is None:
                try:
                    self._configuration = self.pip.configuration()
                except PipError:
                    self._configuration = ""
            return self._configuration
