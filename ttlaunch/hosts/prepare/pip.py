"""Let the launching machine's pip choose versions and download wheels for a host of another kind.

The user's pip configuration applies: indexes, proxies, certificates, folders of wheels. pip judges conditions such as
`platform_machine == "aarch64"` by the interpreter that runs it, so it is started with the host's values in their place.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from ttlaunch.hosts.prepare.kind import Kind
from ttlaunch.hosts.prepare.lock import Lock, Wheel, normalised
from ttlaunch.hosts.prepare.requirements import Requirements

_RESOLVE_S = 1800
_FETCH_S = 7200
_CONFIG_S = 60

# Run as `python -P -c … MARKERS WORDS…`.
_DRIVER = """\
import json, sys
markers = json.loads(sys.argv.pop(1))
from pip._vendor.packaging import markers as module
module.default_environment = lambda: dict(markers)
from pip._internal.cli.main import main
sys.exit(main())
"""


class PipError(Exception):
    """pip has failed.

    Attributes:
        output: Everything that pip printed.
    """

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


@dataclass(frozen=True)
class Pip:
    """The pip of one interpreter on this machine."""

    python: str = sys.executable

    def is_there(self) -> bool:
        """Whether this environment has a pip at all."""
        return self.python != sys.executable or find_spec("pip") is not None

    def configuration(self) -> str:
        """Pip's configuration on this machine, from files and variables."""
        return self._run(["config", "list"], deadline_s=_CONFIG_S)

    def resolve(self, wanted: Requirements, kind: Kind) -> Lock:
        """Choose the version of every package for a kind of host.

        Raises:
            PipError: If pip fails; holds its output.
        """
        with tempfile.TemporaryDirectory(prefix="ttlaunch-") as folder:
            constraints, report = Path(folder) / "constraints.txt", Path(folder) / "report.json"
            constraints.write_text(wanted.constraints, encoding="utf-8")
            words = ["install", "--dry-run", "--ignore-installed", f"--report={report}", f"--constraint={constraints}"]
            words += [f"--target={folder}/target", *_for_host(kind), *wanted.requirements]
            words += [f"--requirement={wanted.requirements_file}"] if wanted.requirements_file else []
            self._run(words, kind=kind, deadline_s=_RESOLVE_S)
            found = json.loads(report.read_text(encoding="utf-8"))["install"]
        return Lock(tuple(sorted((_wheel(row) for row in found), key=lambda wheel: wheel.name)))

    def has_wheel(self, requirement: str, kind: Kind) -> bool:
        """Whether a package has a wheel for a kind of host; its dependencies do not matter."""
        with tempfile.TemporaryDirectory(prefix="ttlaunch-") as folder:
            words = ["install", "--dry-run", "--ignore-installed", "--no-deps", f"--target={folder}", *_for_host(kind)]
            try:
                self._run([*words, requirement], kind=kind, deadline_s=_RESOLVE_S)
            except PipError:
                return False
        return True

    def fetch(self, wheels: Sequence[Wheel], kind: Kind, folder: Path, *, started: Callable[[str], None]) -> None:
        """Download exactly these wheels into a folder.

        Args:
            wheels: The wheels of a lock.
            kind: The kind of host that the lock is for.
            folder: An empty folder.
            started: Called with the name of each file when its download begins.

        Raises:
            PipError: If pip fails; holds its output.
        """
        listing = folder / "lock.txt"
        lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels]
        listing.write_text("".join(lines), encoding="utf-8")
        words = ["download", "--no-deps", "--require-hashes", f"--requirement={listing}", f"--dest={folder}"]
        self._run([*words, *_for_host(kind)], kind=kind, deadline_s=_FETCH_S, started=started)
        listing.unlink()

    def _run(
        self,
        words: Sequence[str],
        *,
        kind: Kind | None = None,
        deadline_s: float,
        started: Callable[[str], None] | None = None,
    ) -> str:
        markers = json.dumps(kind.markers()) if kind else ""
        start = ["-c", _DRIVER, markers] if kind else ["-m", "pip"]
        command = [self.python, "-P", *start, "--no-input", "--no-color", "--disable-pip-version-check", *words]
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "LC_ALL": "C.UTF-8", "PYTHONWARNINGS": "ignore"},
            ) as process,
        ):
            guard = threading.Timer(deadline_s, process.kill)
            guard.start()
            try:
                printed = _listen(process, started)
                status = process.wait()
            finally:
                guard.cancel()
                process.kill()
            errors.seek(0)
            if status == -signal.SIGKILL:
                raise PipError(f"ERROR: pip was killed, or did not end within {deadline_s} s")
            if status:
                raise PipError(printed + errors.read())
        return printed


def _listen(process: "subprocess.Popen[str]", started: Callable[[str], None] | None) -> str:
    """Return everything that pip prints; calls `started` as each download begins."""
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        begun = re.match(r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?(\S+\.whl)", line)
        if begun and started:
            started(begun.group(1))
    return "".join(lines)


def _for_host(kind: Kind) -> list[str]:
    words = ["--only-binary=:all:", "--implementation=cp", f"--python-version={kind.python}"]
    return words + [f"--platform={tag}" for tag in kind.platforms()]


def _wheel(row: dict[str, object]) -> Wheel:
    metadata, source = row["metadata"], row["download_info"]
    assert isinstance(metadata, dict)  # noqa: S101 - the format of pip's report, version 1
    assert isinstance(source, dict)  # noqa: S101
    archive = source["archive_info"]
    sha256 = archive.get("hashes", {}).get("sha256") or str(archive["hash"]).removeprefix("sha256=")
    file = os.path.basename(str(source["url"]).partition("#")[0])  # noqa: PTH119 - it is a URL
    return Wheel(normalised(str(metadata["name"])), str(metadata["version"]), sha256, unquote(file))
