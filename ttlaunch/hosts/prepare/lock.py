"""A lock: the list of wheels in an environment, by SHA-256; and the cache of the launching machine for locks and wheels.

<cache>/locks/<key>.json             the versions that pip chose for a set of requirements, when first asked
<cache>/wheels/<sha256>/<file>.whl   the wheel, verified after the download and again before it is sent
"""

import hashlib
import json
import re
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """One package.

    Attributes:
        name: The package's name as `normalised` returns it.
        file: The name of the wheel's file.
        size: The size of this file in bytes.
        unpacked: The size in bytes once installed.
        files: The number of files once installed.
    """

    name: str
    version: str
    sha256: str
    file: str
    size: int = 0
    unpacked: int = 0
    files: int = 0


@dataclass(frozen=True)
class Lock:
    """All packages of an environment and the pip that installs them, in order of their names."""

    wheels: tuple[Wheel, ...]

    @property
    def installed(self) -> tuple[Wheel, ...]:
        """The wheels that the environment gets: all but pip, which only installs them."""
        return tuple(wheel for wheel in self.wheels if wheel.name != "pip")

    def digest(self, *, base: str, version: str) -> str:
        """The name of the environment, which differs for other packages and for another base Python."""
        content = json.dumps([sorted(wheel.sha256 for wheel in self.wheels), base, version])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def normalised(name: str) -> str:
    """Return a package's name in the form in which names are compared: `PyYAML` and `pyyaml` are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass
class Store:
    """The folder on the launching machine that keeps locks and wheels between calls."""

    folder: Path
    _verified: set[str] = field(default_factory=set)
    _verifying: threading.Lock = field(default_factory=threading.Lock)

    def load_lock(self, key: str) -> Lock | None:
        """The lock that was saved under a key; None if there is none, or if it cannot be read."""
        try:
            rows = json.loads((self.folder / "locks" / f"{key}.json").read_text(encoding="utf-8"))
            return Lock(tuple(Wheel(**row) for row in rows))
        except (OSError, ValueError, TypeError):
            return None

    def save_lock(self, key: str, lock: Lock) -> None:
        path = self.folder / "locks" / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(wheel) for wheel in lock.wheels], indent=1)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)

    def path(self, wheel: Wheel) -> Path:
        return self.folder / "wheels" / wheel.sha256 / wheel.file

    def missing(self, wheels: Iterable[Wheel]) -> list[Wheel]:
        """Return the wheels that this store lacks, or whose contents have changed."""
        return [wheel for wheel in wheels if not self._is_sound(wheel)]

    def take(self, file: Path, wheel: Wheel) -> bool:
        """Move a downloaded file into the store; False if it is not the expected wheel."""
        if _sha256(file) != wheel.sha256:
            return False
        target = self.path(wheel)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The download may lie on another file system: copied beside its place first, then moved by one rename.
        with tempfile.TemporaryDirectory(dir=target.parent) as beside:
            shutil.move(file, Path(beside) / target.name)
            (Path(beside) / target.name).replace(target)
        self._verified.add(wheel.sha256)
        return True

    def measure(self, wheel: Wheel) -> Wheel:
        """Return the wheel with its sizes, which are read from the file."""
        path = self.path(wheel)
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        return Wheel(wheel.name, wheel.version, wheel.sha256, wheel.file, path.stat().st_size, unpacked, len(entries))

    def _is_sound(self, wheel: Wheel) -> bool:
        """Whether the store has a wheel with the right content; this object reads each wheel only once."""
        with self._verifying:
            if wheel.sha256 in self._verified:
                return True
            path = self.path(wheel)
            if not path.is_file() or _sha256(path) != wheel.sha256:
                path.unlink(missing_ok=True)
                return False
            self._verified.add(wheel.sha256)
            return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
