"""The rules of `.gitignore` and `.ttlaunchignore` files: which paths they leave out, and which they name with a `!`."""

import errno
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttlaunch.records.regular_files import open_regular

GIT_RULES = b".gitignore"
OWN_RULES = b".ttlaunchignore"
_LARGEST = 1024 * 1024


@dataclass(frozen=True)
class UselessLine:
    """A line of a rule file that is not a valid pattern, so no path can match it.

    Attributes:
        file: The rule file, relative to the root.
        number: The line's number, from 1.
        lines: All lines of the file.
    """

    file: bytes
    number: int
    lines: Sequence[str]


class IgnoreRules:
    """All rule files of one name in a tree; each applies to its own folder and everything below it.

    Attributes:
        has_exceptions: Whether one of them has a line that begins with `!`.
        useless: Lines that are not valid patterns; they are skipped, as git does.
    """

    def __init__(self, root: bytes, name: bytes) -> None:
        self._root, self._name = root, name
        self._specs: dict[bytes, object] = {}
        self.has_exceptions = False
        self.useless: list[UselessLine] = []

    def __bool__(self) -> bool:
        return bool(self._specs)

    def read(self, folder: bytes) -> None:
        """Read the rule file of a folder, given relative to the root; empty for the root.

        Raises:
            OSError: If it is there and cannot be read, or is no regular file of a sensible size.
        """
        name = os.path.join(folder, self._name)
        path = os.path.join(self._root, name)
        with open_regular(path, follow=True) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST:
                raise OSError(errno.EFBIG, f"it is larger than {_LARGEST} bytes", path)
            lines = os.fsdecode(file.read(_LARGEST)).splitlines()
        self._specs[folder], useless = _parse(lines)
        self.useless += [UselessLine(name, number, lines) for number in useless]
        self.has_exceptions |= any(line.startswith("!") for line in lines)

    def verdict(self, path: bytes, *, is_folder: bool = False) -> bool | None:
        """Return whether a path is left out; False if an exception names it, None if no rule matches.

        If several rule files match, the deepest one decides.
        """
        for folder in _upwards(path):
            spec = self._specs.get(folder)
            if spec is None:
                continue
            relative = path[len(folder) + 1 :] if folder else path
            found: bool | None = spec.check_file(os.fsdecode(relative) + "/" * is_folder).include  # type: ignore[attr-defined]
            if found is not None:
                return found
        return None


def _parse(lines: Sequence[str]) -> tuple[object, list[int]]:
    """Return the rules of all valid lines, and the numbers of the other lines."""
    from pathspec import GitIgnoreSpec  # noqa: PLC0415 - 20 ms that a tree without rules of its own does not need

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about `[[`, whose meaning in regular expressions may change
        try:
            return GitIgnoreSpec.from_lines(lines), []
        except ValueError:
            useless = []
        for number, line in enumerate(lines, start=1):
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError:
                useless.append(number)
        kept = [line for number, line in enumerate(lines, start=1) if number not in set(useless)]
        return GitIgnoreSpec.from_lines(kept), useless


def _upwards(path: bytes) -> Iterator[bytes]:
    """The folders that a path lies in, the nearest first, the root (empty) last."""
    while path:
        path = os.path.dirname(path)
        yield path
