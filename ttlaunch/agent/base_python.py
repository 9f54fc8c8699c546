"""Find the Python that a host's environment for ranks is built on, and say what kind of host this is.

Runs on the host, pushed through standard input. Answers one frame and ends. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any

    Facts = dict[str, Any]

_ANSWER_S = 10.0
_NEWEST_MINOR = 20
_KEPT_APART = (
    "/usr/local/bin/python3*",
    "/opt/python*/bin/python3*",
    "~/.pyenv/versions/*/bin/python3",
    "~/.local/share/uv/python/*/bin/python3",
)
"""Where interpreters lie that the PATH of a shell without a terminal does not show."""

# Any Python answers this, also one that is too old, as one line of JSON.
_ASK = """\
import json, os, platform, struct, sys
try:
    import venv
    makes_venv = True
except ImportError:
    makes_venv = False
try:
    import sysconfig
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
except ImportError:
    has_gil = True
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (ValueError, OSError, AttributeError):
    libc = ""
print(json.dumps({
    "path": getattr(sys, "_base_executable", None) or sys.executable,
    "version": platform.python_version(),
    "minor": list(sys.version_info[:2]),
    "implementation": platform.python_implementation(),
    "machine": platform.machine(),
    "bits": struct.calcsize("P") * 8,
    "libc": libc,
    "makes_venv": makes_venv,
    "has_gil": has_gil,
}))
"""


def main(arguments: Facts) -> int:
    """Send a frame `base`: the facts of the chosen interpreter, or None, and of all that were asked, each with `why_not`."""
    oldest = tuple(arguments["oldest"])
    found: list[Facts] = []
    base = None
    for path in candidates(arguments["pythons"], preferred_minor=arguments["preferred_minor"], oldest=oldest):
        facts = ask(path)
        facts["why_not"] = objection(facts, oldest=oldest)
        if facts["path"] not in [other["path"] for other in found]:
            found.append(facts)
        if facts["why_not"] is None:
            base = facts
            break
    contract.send_frame({"kind": "base", "base": base, "found": found})
    return 0


def candidates(named: list[str], *, preferred_minor: int, oldest: tuple[int, ...]) -> list[str]:
    """Interpreters that exist here, best first: named ones, the launching machine's minor version, then any other."""
    minors = [preferred_minor, *range(oldest[1], _NEWEST_MINOR)]
    names = [os.path.expanduser(name) for name in named]
    names += [f"python3.{minors[0]}", "python3", *(f"python3.{minor}" for minor in minors[1:])]
    names += [f"/usr/bin/python3.{minors[0]}", "/usr/bin/python3"]
    for pattern in _KEPT_APART:
        names += sorted(path for path in glob.glob(os.path.expanduser(pattern)) if not path.endswith("-config"))
    seen = set()
    existing = []
    for name in names:
        path = shutil.which(name)
        real = os.path.realpath(path) if path else None
        if path and real not in seen:
            seen.add(real)
            existing.append(path)
    return existing


def ask(path: str) -> Facts:
    """Ask an interpreter what it is; the answer has `error` instead if it does not run."""
    try:
        answer = subprocess.run(
            [path, "-I", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )
        facts: Facts = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"path": path, "version": None, "error": f"{type(error).__name__}: {error}"}
    facts.setdefault("path", path)
    return facts


def objection(facts: Facts, *, oldest: tuple[int, ...]) -> str | None:
    """Why no environment can be built on an interpreter; None if one can."""
    if facts.get("version") is None:
        return "does not run"
    if tuple(facts["minor"]) < oldest:
        return "too old"
    if facts["implementation"] != "CPython":
        return f"is {facts['implementation']}"
    if facts["bits"] != 64:  # noqa: PLR2004 - torch has wheels for nothing else
        return f"is a {facts['bits']}-bit program"
    if not facts["has_gil"]:
        return "is a build without the global lock"
    if not facts["makes_venv"]:
        return "lacks the module venv"
    return None
