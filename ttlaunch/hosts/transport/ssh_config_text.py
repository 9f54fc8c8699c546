"""Expand `Include` in an ssh configuration and rewrite what paramiko would read differently.

OpenSSH understands more than paramiko does. A line to which paramiko would silently give another meaning is refused.
"""

import shlex
from pathlib import Path

from ttlaunch.hosts.transport.quick_paramiko import paramiko
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.system_reason import system_reason

_MAX_INCLUDE_DEPTH = 16
_CRITERIA = {"all", "canonical", "final", "exec", "host", "originalhost", "user", "localuser"}
_WITHOUT_VALUE = {"all", "canonical", "final"}
_VALUE_IS_A_COMMAND = {"proxycommand", "localcommand", "remotecommand", "knownhostscommand", "match"}


@dataclass
class UnreadableConfigError(Exception):
    """A line of an ssh configuration that cannot be read as OpenSSH reads it.

    Attributes:
        where: The file and the number of the line.
        reason: What is wrong, as a clause for a message.
    """

    where: str
    reason: str


def read_config(path: Path, *, folder: Path) -> list[str]:
    """Return the lines of a configuration, with included files in place; none if the file does not exist.

    Args:
        path: The file.
        folder: The folder that relative names in `Include` start from: `~/.ssh` or `/etc/ssh`.

    Raises:
        UnreadableConfigError: If it cannot be read, or has a line that paramiko does not understand.
    """
    return _expand(path, folder=folder, outer="", depth=0)


def _expand(path: Path, *, folder: Path, outer: str, depth: int) -> list[str]:
    """Return the lines of one file. `outer` is the condition of the `Include` that names it, as criteria of `Match`; empty: none."""
    if depth > _MAX_INCLUDE_DEPTH:
        raise UnreadableConfigError(str(path), f"it is included more than {_MAX_INCLUDE_DEPTH} levels deep")
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnreadableConfigError(str(path), system_reason(error)) from error
    found: list[str] = []
    condition = outer
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        where = f"{path}:{number}"
        key, value = _parse_line(line, where)
        if key in {"host", "match"}:
            inner = _host_criteria(value, where) if key == "host" else _match_criteria(value, where)
            condition = _both(outer, inner)
            # An included file may hold under a condition. `Host` cannot express both, so it becomes `Match originalhost`.
            found.append(f"Host {value}" if key == "host" and not outer else f"Match {condition}")
        elif key == "include":
            for name in _words(value, where):
                for included in _included(name, folder):
                    found += _expand(included, folder=folder, outer=condition, depth=depth + 1)
            # A section of the included file must not continue here: return to the condition of the `Include` itself.
            found.append(f"Match {condition or 'all'}")
        else:
            found.append(f"{key} {value}")
    return found


def _parse_line(line: str, where: str) -> tuple[str, str]:
    match = paramiko.SSHConfig.SETTINGS_REGEX.match(line)
    if not match:
        raise UnreadableConfigError(where, f"`{line}` has no value")
    key, value = match.group(1).lower(), match.group(2)
    if key not in _VALUE_IS_A_COMMAND and '"' not in value:
        value = value.partition(" #")[0].rstrip()
    return key, value


def _words(value: str, where: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise UnreadableConfigError(where, f"`{value}`: {str(error).lower()}") from error


def _host_criteria(value: str, where: str) -> str:
    return f"originalhost {shlex.quote(','.join(_words(value, where)))}"


def _match_criteria(value: str, where: str) -> str:
    """Check the criteria of a `Match` line and return them in lower case, as paramiko compares them."""
    words = _words(value, where)
    parts: list[str] = []
    while words:
        word = words.pop(0)
        criterion = word.lower().removeprefix("!")
        if criterion not in _CRITERIA:
            raise UnreadableConfigError(where, f"criterion `{word}` of `Match` is not supported")
        parts.append(word.lower())
        if criterion not in _WITHOUT_VALUE:
            if not words:
                raise UnreadableConfigError(where, f"criterion `{word}` of `Match` has no value")
            parts.append(shlex.quote(words.pop(0)))
    if "all" in parts and set(parts) - {"all", "canonical"}:
        raise UnreadableConfigError(where, "`all` cannot be combined with other criteria of `Match`")
    return " ".join(parts)


def _both(outer: str, inner: str) -> str:
    """Join two criteria of `Match` so that both must hold; `all` cannot be combined with others."""
    if inner == "all":
        return outer or inner
    return inner if outer in {"", "all"} else f"{outer} {inner}"


def _included(name: str, folder: Path) -> list[Path]:
    path = Path(name).expanduser()
    path = path if path.is_absolute() else folder / path
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
