"""The rules of `.gitignore` and `.ttlaunchignore` files, exactly as git reads them: which paths they leave out or name with a `!`.

Patterns, names and contents are bytes, as git has them. `tests/hosts/sync/test_rules_as_git_reads_them.py` compares the
answers with those of git for random rules and trees.

Source: git 2.39, `Documentation/gitignore.txt`; where that leaves a case open, what git does.
"""

import errno
import os
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import field

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.regular_files import open_regular

GIT_RULES = b".gitignore"
OWN_RULES = b".ttlaunchignore"
_EXCLUDES = b".git/info/exclude"
_LARGEST = 1024 * 1024
_BOM = b"\xef\xbb\xbf"

_SPECIAL = re.compile(rb"[*?\[\\]")
_STAR = b"[^/]*"
_FOLDERS, _FOLDERS_AND_SLASH, _EVERYTHING = b"(?:.*/)?", b".*/", b".*"
_DEEP = {_FOLDERS: b"(?:.*?/)??", _FOLDERS_AND_SLASH: b".*?/", _EVERYTHING: _EVERYTHING}
"""What `**` matches before `/`, before an escaped `/` and at the end, and each again with the shortest text first."""
_CLASSES = {
    "alnum": string.ascii_letters + string.digits,
    "alpha": string.ascii_letters,
    "blank": " \t",
    "cntrl": "".join(map(chr, range(32))) + "\x7f",
    "digit": string.digits,
    "graph": string.ascii_letters + string.digits + string.punctuation,
    "lower": string.ascii_lowercase,
    "print": string.ascii_letters + string.digits + string.punctuation + " ",
    "punct": string.punctuation,
    "space": " \t\n\r",
    "upper": string.ascii_uppercase,
    "xdigit": string.hexdigits,
}


@dataclass(frozen=True)
class UselessLine:
    """A line of a rule file that no path can match.

    Attributes:
        file: The rule file, relative to the root.
        number: The line's number, from 1.
        lines: All lines of the file.
    """

    file: bytes
    number: int
    lines: Sequence[str]


@dataclass(frozen=True)
class _Rule:
    """One line of a rule file.

    Attributes:
        is_exception: Whether the line begins with `!`.
        only_folders: Whether it ends in `/`.
        by_name: Whether the pattern has no other `/`, so that it applies to the last part of a path at any depth.
    """

    pattern: re.Pattern[bytes]
    is_exception: bool
    only_folders: bool
    by_name: bool


@dataclass
class IgnoreRules:
    """All rule files of one name in a tree; each applies to its own folder and everything below it.

    Attributes:
        root: The folder that all other paths are relative to.
        name: The name of the rule files.
        has_exceptions: Whether one of them has a line that begins with `!`.
        useless: Lines that are not valid patterns; they are skipped, as git does.
    """

    root: bytes
    name: bytes
    has_exceptions: bool = False
    useless: list[UselessLine] = field(default_factory=list)
    _rules: dict[bytes, list[_Rule]] = field(default_factory=dict)
    _excludes: dict[bytes, list[_Rule]] = field(default_factory=dict)
    _folders: dict[bytes, bool | None] = field(default_factory=dict)
    _applying: dict[bytes, list[tuple[int, list[_Rule]]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def read(self, folder: bytes) -> None:
        """Read the rule file of a folder; the folders above it have been read before.

        Raises:
            OSError: If it is there and cannot be read, or is no regular file of a sensible size.
        """
        if folder not in self._rules:
            self._rules[folder] = []
            self._applying.clear()
            self._rules[folder] = self._parse(os.path.join(folder, self.name))

    def enter_repository(self, top: bytes) -> None:
        """Begin anew at the root of a repository: no rule from above it applies, its `info/exclude` does.

        Raises:
            OSError: If `info/exclude` is there and cannot be read, or is no regular file of a sensible size.
        """
        if top not in self._excludes:
            self._excludes[top] = []
            self._applying.clear()
            path = os.path.join(top, _EXCLUDES)
            if os.path.lexists(os.path.join(self.root, path)):
                self._excludes[top] = self._parse(path)

    def verdict(self, path: bytes, *, is_folder: bool = False) -> bool | None:
        """Return whether a path is left out; False if an exception names it or a folder around it, None if no rule matches.

        Nothing below a folder that is left out can be named. Otherwise the deepest rule file decides, and in it the last
        line that matches.
        """
        inherited = self._inherited(_above(path))
        matched = None if inherited else self._matched(path, is_folder=is_folder)
        return inherited if matched is None else matched

    def _inherited(self, folder: bytes) -> bool | None:
        """Return the verdict about a folder, which holds for what is in it unless a line says otherwise."""
        missing = []
        while folder and folder not in self._excludes and folder not in self._folders:
            missing.append(folder)
            folder = _above(folder)
        found = self._folders.get(folder)
        for each in reversed(missing):
            matched = None if found else self._matched(each, is_folder=True)
            found = self._folders[each] = found if matched is None else matched
        return found

    def _matched(self, path: bytes, *, is_folder: bool) -> bool | None:
        """Return what the last matching line says, of the deepest rule file that has one; None if no line matches."""
        for begin, rules in self._rules_for(_above(path)) if path else ():
            relative, name = path[begin:], path[path.rfind(b"/") + 1 :]
            for rule in rules:
                if (is_folder or not rule.only_folders) and rule.pattern.fullmatch(name if rule.by_name else relative):
                    return not rule.is_exception
        return None

    def _rules_for(self, folder: bytes) -> list[tuple[int, list[_Rule]]]:
        """Return the rules for what is in a folder, the last line of the deepest file first, each with where its relative paths begin."""
        missing = []
        while folder not in self._applying and folder and folder not in self._excludes:
            missing.append(folder)
            folder = _above(folder)
        found = self._applying.get(folder)
        if found is None:  # nothing above it applies
            missing.append(folder)
            found = []
        for each in reversed(missing):
            own = [*reversed(self._rules.get(each, ())), *reversed(self._excludes.get(each, ()))]
            found = self._applying[each] = [(len(each) + 1 if each else 0, own), *found] if own else found
        return found

    def _parse(self, file: bytes) -> list[_Rule]:
        path = os.path.join(self.root, file)
        with open_regular(path, follow=True) as opened:
            if os.fstat(opened.fileno()).st_size > _LARGEST:
                raise OSError(errno.EFBIG, f"it is larger than {_LARGEST} bytes", path)
            data = opened.read(_LARGEST)
        if os.path.basename(file) == GIT_RULES and os.path.islink(path):
            return []  # git reads no rules through such a link
        # A carriage return counts as part of the line's end, and a zero byte ends what git, written in C, takes for the line.
        lines = [line.removesuffix(b"\r") for line in data.removeprefix(_BOM).split(b"\n")]
        rules = []
        for number, line in enumerate(lines, start=1):
            written = _without_trailing_spaces(line.partition(b"\0")[0])
            if not written or written.startswith(b"#"):
                continue
            rule = _rule(written)
            if rule is None:
                self.useless.append(UselessLine(file, number, [os.fsdecode(each) for each in lines]))
            else:
                rules.append(rule)
        self.has_exceptions |= any(rule.is_exception for rule in rules)
        return rules


def _above(path: bytes) -> bytes:
    """The folder that a path lies in; empty for the root."""
    return path[: max(0, path.rfind(b"/"))]


def _without_trailing_spaces(line: bytes) -> bytes:
    """Remove the spaces at the end of a line, but not one after a backslash."""
    kept = line.rstrip(b" ")
    escapes = len(kept) - len(kept.rstrip(b"\\"))
    return line[: len(kept) + 1] if escapes % 2 else kept


def _rule(written: bytes) -> _Rule | None:
    """Return the rule of a line; None if no path can match it."""
    is_exception = written.startswith(b"!")
    pattern = written[is_exception:]
    only_folders = pattern.endswith(b"/")
    pattern = pattern[: len(pattern) - only_folders]
    by_name = b"/" not in pattern
    expression = _expression(pattern.removeprefix(b"/"))
    if expression is None:
        return None
    return _Rule(re.compile(expression, re.DOTALL), is_exception, only_folders, by_name)


class _NeverError(Exception):
    """No path can match the pattern."""


def _expression(pattern: bytes) -> bytes | None:
    """Translate a pattern into a regular expression for a whole path; None if no path can match it.

    Each wildcard but the last takes the shortest text that lets the piece after it match, and never another one: a later
    wildcard can match whatever an earlier one leaves. The time to match is therefore not exponential in the number of wildcards.
    """
    try:
        tokens = list(_tokens(pattern))
    except _NeverError:
        return None
    # A part is the text between two `**`, with the `**` before it; a `*` divides it into pieces.
    parts: list[tuple[bytes, list[bytes]]] = [(b"", [b""])]
    for token in tokens:
        if token in _DEEP:
            parts.append((token, [b""]))
        elif token == _STAR:
            parts[-1][1].append(b"")
        else:
            parts[-1][1][-1] += token
    expression = b""
    for deep, (piece, *pieces) in parts[:-1]:
        text = piece + b"".join(b"(?>[^/]*?" + each + b")" for each in pieces)
        expression += b"(?>" + _DEEP[deep] + text + b")" if deep else text
    deep, (piece, *pieces) = parts[-1]
    expression += deep + piece + b"".join(b"(?>[^/]*?" + each + b")" for each in pieces[:-1])
    return expression + b"".join(_STAR + each for each in pieces[-1:])


def _tokens(pattern: bytes) -> Iterator[bytes]:
    """Yield a regular expression for each character, class or wildcard of a pattern.

    Raises:
        _NeverError: If no path can match the pattern.
    """
    special = _SPECIAL.search(pattern)
    at, end = 0, len(pattern)
    is_after_slash, token = True, b"/"
    while at < end:
        character = pattern[at : at + 1]
        if character == b"*":
            begin, at = at, end - len(pattern[at:].lstrip(b"*"))
            # git compares the text before the first wildcard by itself, so a `**` there counts as one after a slash.
            is_first = special is not None and special.start() == begin
            is_deep = at - begin > 1 and (is_first or pattern[begin - 1 : begin] == b"/")
            slash = re.compile(rb"\\?/|\Z").match(pattern, at)
            if is_deep and slash:
                at = slash.end()
                token = {b"/": _FOLDERS, b"\\/": _FOLDERS_AND_SLASH, b"": _EVERYTHING}[slash.group()]
            else:
                token = _STAR
            is_after_slash = token in _DEEP
        elif character == b"[":
            token, at = _class(pattern, at + 1)
            is_after_slash = False
        else:
            at += character == b"\\"
            literal = pattern[at : at + 1]
            if not literal or (literal == b"/" and is_after_slash):  # no path begins with a slash or has two in a row
                raise _NeverError
            token = b"[^/]" if character == b"?" else re.escape(literal)
            is_after_slash, at = literal == b"/", at + 1
        yield token
    if token == b"/":
        raise _NeverError


def _class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """Translate the class of characters that begins after a `[`, and return the place after its `]`.

    Raises:
        _NeverError: If the class is not closed, unknown or empty.
    """
    is_negated = pattern[at : at + 1] in {b"!", b"^"}
    at += is_negated
    members: set[int] = set()
    previous = 0  # the beginning of a range, if a `-` follows
    is_begun = False  # a `]` at the beginning stands for itself
    while pattern[at : at + 1] != b"]" or not is_begun:
        is_begun = True
        name = re.compile(rb"\[:([^\]]*)\]").match(pattern, at)
        if name and name[1].endswith(b":"):
            if name[1][:-1].decode("latin-1") not in _CLASSES:
                raise _NeverError
            members |= set(_CLASSES[name[1][:-1].decode()].encode())
            previous, at = 0, name.end()
            continue
        is_range = bool(previous) and re.compile(rb"-[^\]]", re.DOTALL).match(pattern, at) is not None
        at += is_range
        at += pattern[at : at + 1] == b"\\"
        if at >= len(pattern):
            raise _NeverError
        members |= set(range(previous, pattern[at] + 1)) if is_range else {pattern[at]}
        previous, at = 0 if is_range else pattern[at], at + 1
    members = (set(range(256)) - members if is_negated else members) - {ord("/")}
    if not members:
        raise _NeverError
    return b"[" + b"".join(b"\\x%02x" % each for each in sorted(members)) + b"]", at + 1
