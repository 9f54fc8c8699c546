"""Check that an environment holds exactly what its lock lists; run by that environment's own interpreter.

    env/bin/python -I check_environment.py <request.json

The request has `packages` (name to version) and, for the thorough check after installing, `imports` (package to
module) and `mpi` (the engine's signature, if the engine and mpi4py must be of one MPI). Prints
JSON: `{"problems": [[package, problem] …], "mpi": name and version or null}`. Standard library only.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LARGE = 64 * 1024
_VERSION_S = 20.0


def main() -> int:
    """Read the request, print the answer."""
    request = json.load(sys.stdin)
    problems = []
    for name, version in sorted(request["packages"].items()):
        words = check_package(name, version)
        if words:
            problems.append([name, words])
    mpi = None
    if not problems:
        for name, module in request.get("imports", {}).items():
            words = check_import(module)
            if words:
                problems.append([name, words])
        if not problems and request.get("mpi"):
            mpi, words = check_mpi(request["mpi"])
            if words:
                problems.append([request["mpi"]["package"], words])
    print(json.dumps({"problems": problems, "mpi": mpi}))
    return 0


def check_package(name: str, version: str) -> str | None:
    """Return what is wrong with a package, by its metadata and the sizes of its larger files; None if nothing is."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return "is not installed"
    if found.version != version:
        return f"is version {found.version} instead of {version}"
    return _missing_file(found)


def _missing_file(found: Distribution) -> str | None:
    """Find a file that is missing or shortened, as by a power cut; the very many small files are not checked."""
    for file in found.files or ():
        if file.size is None or file.size < _LARGE:
            continue
        try:
            size = os.stat(str(file.locate())).st_size
        except OSError:
            return f"lacks its file {file}"
        if size != file.size:
            return f"has {size} bytes instead of {file.size} in its file {file}"
    return None


def check_import(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    try:
        if module.startswith("mpi4py"):
            importlib.import_module("mpi4py").rc.initialize = False  # only load the library, do not start MPI
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - code of a package may raise anything when it is imported
        return f"cannot be imported: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return None


def check_mpi(engine: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the MPI that mpi4py loads, and what is wrong with it or with this environment's engine.

    Args:
        engine: The engine's signature: `program`, `title`, and regular expressions `version` and `library`, which find
            the version in the program's answer and in MPI's description of its library.
    """
    title, name = engine["title"], engine["program"]
    program = os.path.join(sys.prefix, "bin", name)
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        return None, f"has an {name} that does not run: {reason}"
    said = re.search(engine["version"], answer.stdout)
    if said is None:
        words = (answer.stderr or answer.stdout).strip().splitlines()
        return None, f"has an {name} that does not say its version: {words[-1] if words else 'no output'}"
    library = importlib.import_module("mpi4py.MPI").Get_library_version()
    loaded = re.search(engine["library"], library)
    if loaded is None or loaded.group(1) != said.group(1):
        first = library.strip().splitlines()[0].rstrip("\0")
        return None, f"has {name} {said.group(1)}, but mpi4py loads another MPI: {first}"
    return f"{title} {said.group(1)}", None


if __name__ == "__main__":
    sys.exit(main())
