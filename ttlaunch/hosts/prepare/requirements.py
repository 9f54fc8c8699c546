"""The requirements for the environment of a rank, before pip has chosen versions."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ttlaunch.hosts.prepare.kind import Kind
from ttlaunch.hosts.prepare.lock import normalised

_RUNTIME = {"pydantic", "pyyaml"}
"""What `ttlaunch.runtime` and `ttlaunch.spec.recipe` import besides the extras of ranks; ttlaunch itself comes by sync."""


IMPORTS = {
    "torch": "torch",
    "numpy": "numpy",
    "mpi4py": "mpi4py.MPI",
    "grpcio": "grpc",
    "crc32c": "crc32c",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "safetensors": "safetensors",
}
"""What the check after installing imports, by package."""


@dataclass(frozen=True)
class Requirements:
    """The packages to install.

    Attributes:
        requirements: What ranks need, as pip reads it.
        constraints: The text of a constraints file, such as one `name==version` a line.
        constraints_origin: The source of the constraints, as messages name it.
        requirements_file: The absolute path of a file with the user's own packages.
    """

    requirements: tuple[str, ...]
    constraints: str
    constraints_origin: str
    requirements_file: Path | None = None

    def key(self, kind: Kind, *, pip_configuration: str) -> str:
        """Return the key of a lock in the cache, which covers everything that decides which wheels pip chooses."""
        own = self.requirements_file.read_text(encoding="utf-8", errors="replace") if self.requirements_file else ""
        parts = [self.requirements, self.constraints, own, str(kind), kind.python, pip_configuration]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def rank_requirements(*, instead: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the packages that a rank needs, from ttlaunch's own metadata, and the pip that installs them.

    Those of the extra `grpc` count if this environment has them: not every index offers them, and few runs need them.

    Args:
        instead: Packages, by the name of that which each of them replaces.
    """
    kept = ["pip"]
    extras = {f'extra == "{name}"' for name in ("train", *(["grpc"] if _is_installed("grpcio") else []))}
    for line in metadata.requires("ttlaunch") or ():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        is_of_ranks = marker.replace("'", '"') in extras
        if is_of_ranks or (not marker and _bare_name(requirement) in _RUNTIME):
            name = _bare_name(requirement)
            other = (instead or {}).get(name, name)
            kept.append(requirement if other == name else other)
    return tuple(kept)


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def find_constraints(given: Path | None, *, working_folder: Path) -> tuple[str, str]:
    """Return the text of the constraints and its source: a named file, the project's own file, or the packages installed here."""
    path = given or working_folder / "constraints.txt"
    if given or path.is_file():
        return path.read_text(encoding="utf-8", errors="replace"), str(given) if given else path.name
    return installed_versions(), "the versions installed here"


def installed_versions(distributions: Sequence[metadata.Distribution] | None = None) -> str:
    """The packages of this environment, as constraints; those installed from a folder or a repository are left out."""
    lines = []
    for found in metadata.distributions() if distributions is None else distributions:
        name = found.metadata["Name"]
        read = found.read_text
        is_wheel = "archive_info" in (read("direct_url.json") or "archive_info")
        if name and is_wheel and normalised(name) not in {"pip", "ttlaunch"}:
            lines.append(f"{name}=={found.version}\n")
    return "".join(sorted(set(lines), key=str.lower))


def _bare_name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return normalised(requirement[:end])
