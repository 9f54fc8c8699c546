"""Part of the probe: which Python, engine and MPI the ranks of a host would get, found by metadata and file names."""

from __future__ import annotations

import ast
import contextlib
import glob
import os
import re
import shutil
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

_DEADLINE_S = 2.0
_LONGEST_ANSWER = 1000
_METADATA = re.compile(r"(?P<name>[\w.]+)-(?P<version>[^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")
_LIBRARY = re.compile(rb"(/[^\0\n]*/libmpi\.so[.0-9]*)\0")
_CACHE = "/etc/ld.so.cache"
_SYMBOL = b"ompi_mpi_comm_self"

# Works with Python 2.7 and later. The user's site-packages and PYTHONPATH count, as they do for ranks.
_ASK = (
    "import sys; sys.stdout.write(repr((list(sys.version_info[:3]), sys.executable, sys.prefix, "
    "getattr(sys, 'base_prefix', sys.prefix), [p for p in sys.path if p])))"
)


def find_software(arguments: dict[str, Any]) -> dict[str, Any]:
    """The first usable interpreter for ranks, its packages, the engine that belongs to it, and mpi4py's library."""
    tried = []
    python: dict[str, Any] | None = None
    path: list[str] = []
    base = ""
    for candidate in arguments["pythons"]:
        tried.append(candidate)
        answer = _ask(candidate)
        if answer is not None:
            version, executable, prefix, base, path = answer
            packages = packages_in(path, {_normal(name) for name in arguments["packages"]})
            python = {"executable": executable, "version": version, "prefix": prefix, "packages": packages}
            break
    mpi = _engine(arguments, python["executable"] if python else None)
    if python is not None:
        python["tried"] = tried
        mpi.update(_library(path, [python["prefix"], base]))
    return {"python": python, "tried": tried, "mpi": mpi}


def _ask(candidate: str) -> tuple[list[int], str, str, str, list[str]] | None:
    program = shutil.which(os.path.expanduser(candidate))
    if program is None:
        return None
    # The folder may be a link that is swapped while a run lives, as `env` is; its ranks must all find the same one.
    program = os.path.join(os.path.realpath(os.path.dirname(program)), os.path.basename(program))
    with contextlib.suppress(OSError, ValueError, SyntaxError, subprocess.SubprocessError):
        answer = subprocess.run(
            [program, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DEADLINE_S,
            check=True,
            cwd="/",
        )
        version, executable, prefix, base, path = ast.literal_eval(answer.stdout.decode())
        return version, executable or program, prefix, base, path
    return None


def packages_in(path: Sequence[str], wanted: Collection[str]) -> dict[str, str]:
    """Read the versions of packages from the names of metadata folders; as for an import, the first in the path counts."""
    found: dict[str, str] = {}
    for folder in path:
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(folder)):
                match = _METADATA.fullmatch(entry)
                if match and _normal(match["name"]) in wanted:
                    found.setdefault(_normal(match["name"]), match["version"])
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _engine(arguments: dict[str, Any], python: str | None) -> dict[str, Any]:
    """Find the engine's command, in `mpi_prefix` or else beside the interpreter or in PATH, and what it says about its version."""
    name, prefix = arguments["program"], arguments["mpi_prefix"]
    places = [os.path.join(os.path.expanduser(prefix), "bin")] if prefix else []
    if not prefix and python:
        places.append(os.path.dirname(python))
    programs = [os.path.join(place, name) for place in places]
    program = next((one for one in programs if os.access(one, os.X_OK) and os.path.isfile(one)), None)
    if program is None and not prefix:
        program = shutil.which(name)
    found: dict[str, Any] = {"mpirun": program, "prefix": None, "says": None, "library": None, "abi": None}
    if program is not None:
        found["prefix"] = os.path.dirname(os.path.dirname(program))
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            environment = {"HOME": os.path.expanduser("~"), **os.environ}
            answer = subprocess.run(
                [program, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_DEADLINE_S,
                check=False,
                env=environment,
            )
            text = (answer.stdout + answer.stderr).decode("utf-8", "replace").strip()
            # Up to the version, which may be in a later line than the first, or else the first line.
            version = re.search(arguments["version"], text[:_LONGEST_ANSWER])
            found["says"] = " ".join(text[: version.end()].split() if version else text.split("\n")[:1])[:200]
    return found


def _library(path: list[str], prefixes: list[str]) -> dict[str, str | None]:
    """Find the libmpi that mpi4py would load, and its ABI; mpi4py's wheel looks beside the interpreter, then in the system."""
    package = next((folder for folder in path if os.path.isdir(os.path.join(folder, "mpi4py"))), None)
    if package is None:
        return {}
    modules = glob.glob(os.path.join(glob.escape(package), "mpi4py", "MPI.*.so"))
    fixed = [module for module in modules if not re.search(r"/MPI\.(openmpi|mpich|mpiabi|impi)\.", module)]
    if fixed:  # built for one library, whose name it holds
        wants = b"libmpi.so.12" if _holds(fixed[0], b"libmpi.so.12") else b"libmpi.so.40"
        for library in _known_to_the_loader():
            if library.encode().endswith(wants):
                return {"library": library, "abi": _abi(library)}
        return {"library": None, "abi": "mpich" if wants.endswith(b"12") else "openmpi"}
    named = [name for name in os.environ.get("MPI4PY_LIBMPI", "").split(os.pathsep) if name]
    own = dict.fromkeys([*prefixes[:1], os.path.expanduser("~/.local"), *prefixes[1:]])
    beside = [os.path.join(prefix, "lib", name) for prefix in own if prefix != "/usr" for name in _NAMES]
    for library in [*named, *beside, *_known_to_the_loader()]:
        if _is_library(library):
            return {"library": library, "abi": _abi(library)}
    return {"library": None, "abi": None}


_NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")


def _known_to_the_loader() -> list[str]:
    """Libraries in the loader's cache, in the order in which mpi4py asks for them."""
    with contextlib.suppress(OSError):
        with open(_CACHE, "rb") as file:
            paths = {match.decode("utf-8", "replace") for match in _LIBRARY.findall(file.read())}
        return sorted(paths, key=lambda one: (len(os.path.basename(one)), os.path.basename(one)))
    return []


def _abi(library: str) -> str:
    return "openmpi" if _holds(library, _SYMBOL) else "mpich"


def _holds(path: str, text: bytes) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return text in file.read()
    return False


def _is_library(path: str) -> bool:
    """Whether a file is an ELF library: Open MPI's `libmpi.so` may be a linker script, which cannot be loaded."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"
    return False
