"""Check the names of hosts, and expand ranges of them as Slurm writes them: `node[01-16,20]`."""

import re
from itertools import product

from ttlaunch.quick_pattern import quick_pattern

_NAME = quick_pattern(r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*\.?\Z")
_USER = quick_pattern(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?\Z")
_SCOPE = quick_pattern(r"[A-Za-z0-9_.-]+\Z")
_NUMBERS = quick_pattern(r"[0-9.]+\Z")
_RANGE = quick_pattern(r"([0-9]+)(?:-([0-9]+))?\Z")
_LONGEST_NAME = 253
_LONGEST_PART = 63
_TOO_LONG = f"a name has at most {_LONGEST_NAME} characters, {_LONGEST_PART} between two dots"
_MOST_HOSTS = 65_536
_BYTE = 256


def host_name_problem(name: str) -> str | None:
    """Return why no machine can have this name, or None if one can. Host names and IP addresses are fine."""
    if ":" in name:
        return _ipv6_problem(name)
    if _NUMBERS.match(name) and name.count("."):
        parts = name.split(".")
        whole = len(parts) == 4 and all(part and int(part[:4]) < _BYTE for part in parts)  # noqa: PLR2004 - IPv4
        return None if whole else "an IPv4 address has four numbers from 0 to 255"
    if len(name) > _LONGEST_NAME or any(len(part) > _LONGEST_PART for part in name.split(".")):
        return _TOO_LONG
    if not _NAME.match(name):
        return "a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends"
    return None


def user_name_problem(user: str) -> str | None:
    """Return why this can't be a login name, or None if it can."""
    return None if _USER.match(user) else "a login name has letters, digits, `-`, `_` and `.`"


def expand_ranges(text: str) -> list[str] | str:
    """Return the names that `rack[1-2]-n[01-16]` stands for, in order; a text without brackets stands for itself.

    Returns:
        The names, or a sentence that says what is wrong with the brackets.
    """
    pieces = re.split(r"\[([^\[\]]*)\]", text)
    if any("[" in piece or "]" in piece for piece in pieces):
        return "a bracket has no partner"
    # Without this bound, 65,536 names could repeat a prefix of any length.
    if sum(len(piece) for piece in pieces[::2]) > _LONGEST_NAME:
        return _TOO_LONG
    choices: list[list[str]] = []
    total = 1
    for index, piece in enumerate(pieces):
        numbers = _numbers(piece) if index % 2 else [piece]
        if isinstance(numbers, str):
            return numbers
        total *= len(numbers)
        if total > _MOST_HOSTS:
            return f"the range stands for more than {_MOST_HOSTS} hosts"
        choices.append(numbers)
    return ["".join(parts) for parts in product(*choices)]


def _numbers(text: str) -> list[str] | str:
    """Expand `01-03,7` into `01`, `02`, `03`, `7`."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.match(part)
        if match is None or len(part) > 2 * _LONGEST_PART:
            return "a range looks like `[01-16]` or `[1,3,5-8]`"
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            return "a range counts upwards"
        if int(last) - int(first) >= _MOST_HOSTS:
            return f"the range stands for more than {_MOST_HOSTS} hosts"
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        if len(numbers) > _MOST_HOSTS:
            return f"the range stands for more than {_MOST_HOSTS} hosts"
    return numbers


def _ipv6_problem(name: str) -> str | None:
    from ipaddress import IPv6Address  # noqa: PLC0415 - hardly any hostfile needs it

    try:
        scope = IPv6Address(name).scope_id
    except ValueError:
        return "neither a name nor an IPv6 address"
    # Python takes any text for a scope; in the user's ssh configuration, `%h` hands the name to a shell.
    if scope is not None and not _SCOPE.match(scope):
        return "the scope of an IPv6 address has letters, digits, `-`, `_` and `.`"
    return None
