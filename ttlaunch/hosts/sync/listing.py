"""Which files of a folder are copied: those that git lists, or a walk finds, without ignored ones and secrets.

Paths are bytes relative to the folder, as the system has them; a name need not be text.
"""

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Protocol

from ttlaunch.hosts.sync.ignore import GIT_RULES, OWN_RULES, IgnoreRules, UselessLine
from ttlaunch.hosts.sync.repository import GitError, Repository, open_repository, top_of_repository
from ttlaunch.hosts.sync.secret_files import looks_secret
from ttlaunch.quick_dataclass import dataclass

_NEVER = {b".git", b"__pycache__"}
_VIRTUAL_ENVIRONMENT = b"pyvenv.cfg"


@dataclass
class Listing:
    """A folder's part of a release; all paths are bytes relative to it.

    Attributes:
        paths: Files and links to copy.
        ignored: Files that git would leave out; only looked for where a rule of ours may name one of them.
        folders: Folders to make, including empty ones.
        special: Named pipes, sockets and devices, which are not copied.
        secrets: Files that are not copied because they look like secrets.
        named: Files that an exception names, so that they are copied even if they look like secrets.
        unreadable: Folders and rule files that could not be read, and why.
        rules: The rules of `.ttlaunchignore` files.
        useless: Lines of rule files that are no pattern.
        without_git: Git's message if it failed in a repository; None if it worked or was not needed.
    """

    rules: IgnoreRules
    paths: set[bytes] = field(default_factory=set)
    ignored: set[bytes] = field(default_factory=set)
    folders: set[bytes] = field(default_factory=set)
    special: set[bytes] = field(default_factory=set)
    secrets: set[bytes] = field(default_factory=set)
    named: set[bytes] = field(default_factory=set)
    unreadable: dict[bytes, OSError] = field(default_factory=dict)
    useless: list[UselessLine] = field(default_factory=list)
    without_git: str | None = None


def collect(root: bytes, *, environment: Mapping[str, str], ask_git: bool = True) -> Listing:
    """Decide what of a folder is copied; `!path` in a `.ttlaunchignore` names what would else be left out."""
    listing = _list_files(root, environment=environment, ask_git=ask_git)
    rules, below = listing.rules, root + b"/"
    verdicts = {path: rules.verdict(path) for path in listing.paths | listing.ignored} if rules else {}
    kept = {path for path in listing.paths if verdicts.get(path) is not True}
    kept |= {path for path in listing.ignored if verdicts.get(path) is False}
    listing.named = {path for path in kept if verdicts.get(path) is False}
    listing.secrets = {path for path in kept - listing.named if looks_secret(below + path)}
    listing.paths = kept - listing.secrets
    if rules:
        listing.folders = {path for path in listing.folders if not rules.verdict(path, is_folder=True)}
        listing.special = {path for path in listing.special if not rules.verdict(path)}
    listing.folders |= folders_of(listing.paths)
    return listing


def _list_files(root: bytes, *, environment: Mapping[str, str], ask_git: bool) -> Listing:
    """List a folder; in a git repository tracked files and those that are neither tracked nor ignored."""
    listing = Listing(IgnoreRules(root, OWN_RULES))
    top = top_of_repository(root) if ask_git else None
    if top is not None:
        try:
            with open_repository(root, environment=environment) as repository:
                _look_around(root, listing, _Git(repository, root, environment))
                return listing
        except GitError as error:
            listing = Listing(IgnoreRules(root, OWN_RULES), without_git=str(error))
    _look_around(root, listing, _Walk(root, listing, top=root if top is None else top))
    return listing


def folders_of(paths: Iterable[bytes]) -> set[bytes]:
    """All folders that some paths lie in, without the root."""
    folders = {b""}
    for path in paths:
        folder = path[: max(0, path.rfind(b"/"))]
        while folder not in folders:
            folders.add(folder)
            folder = folder[: max(0, folder.rfind(b"/"))]
    return folders - {b""}


def _ask_git(repository: Repository, root: bytes, *which: str, environment: Mapping[str, str]) -> set[bytes]:
    """The paths that git lists below a folder, including those of repositories inside it."""
    answer = repository.ask("ls-files", "-z", "--exclude-standard", *which)
    listed = {path.rstrip(b"/") for path in answer.split(b"\0")}
    # The index of a stranger's repository may list `../x`, or `link/x` where `link` leads out of the folder.
    reachable = {b""}
    for folder in sorted(folders_of(listed)):  # the folder that holds another comes first
        above, name = os.path.split(folder)
        if above in reachable and name != b".." and not os.path.islink(root + b"/" + folder):
            reachable.add(folder)
    paths: set[bytes] = set()
    for path in listed:
        full = root + b"/" + path
        if os.path.dirname(path) not in reachable:
            continue
        try:
            mode = os.lstat(full).st_mode if path else 0
        except OSError:
            continue  # tracked by git, but deleted here
        if stat.S_ISDIR(mode):  # a submodule, or a repository inside this one
            with open_repository(full, environment=environment) as inside:
                inner = _ask_git(inside, full, *which, environment=environment)
            paths |= {os.path.join(path, one) for one in inner}
        elif path:
            paths.add(path)
    return paths


class _Lister(Protocol):
    """Knows which files and folders git ignores."""

    def files(self, *, ignored: bool = False) -> set[bytes]:
        """Return the files that git does not ignore, or those that it does."""

    def ignored_among(self, folders: Iterable[bytes]) -> set[bytes]:
        """Return those of some folders that git ignores."""


def _look_around(root: bytes, listing: Listing, lister: _Lister) -> None:
    """List a folder, with what git does not list: rules of ours, empty folders, special files, environments."""
    listing.paths = lister.files()
    known = {b"", *folders_of(listing.paths)}
    empty: set[bytes] = set()
    environments = []
    for folder in sorted(known):
        for entry in _scan(root, folder, listing):
            path = folder + b"/" + entry.name if folder else entry.name
            if entry.name == OWN_RULES:
                _read_rules(listing.rules.read, folder, listing)
            elif entry.name == _VIRTUAL_ENVIRONMENT and folder:
                environments.append(folder + b"/")
            elif entry.is_dir(follow_symlinks=False):
                empty |= set() if path in known else _empty_folders(root, path)
            elif not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                listing.special.add(path)
    listing.folders = known - {b""} | empty - lister.ignored_among(empty)
    listing.useless += listing.rules.useless
    if listing.rules.has_exceptions:
        listing.ignored = lister.files(ignored=True) - listing.paths

    def belongs(path: bytes) -> bool:
        return not _NEVER.intersection(path.split(b"/")) and not (path + b"/").startswith(tuple(environments))

    listing.paths = {path for path in listing.paths if belongs(path)}
    listing.ignored = {path for path in listing.ignored if belongs(path)}
    listing.folders = {path for path in listing.folders if belongs(path)}


def _scan(root: bytes, folder: bytes, listing: Listing) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(os.path.join(root, folder)) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        listing.unreadable[folder] = error
        return []


def _read_rules(read: Callable[[bytes], None], folder: bytes, listing: Listing) -> None:
    try:
        read(folder)
    except OSError as error:
        listing.unreadable[os.fsencode(error.filename or folder)] = error


def _empty_folders(root: bytes, folder: bytes) -> set[bytes]:
    """Return a folder and all folders in it; nothing if any of them has a file."""
    found = set()
    for inner, _, files in os.walk(os.path.join(root, folder)):
        if files:
            return set()
        found.add(os.path.relpath(inner, root))
    return found


@dataclass(frozen=True)
class _Git:
    """Asks git."""

    repository: Repository
    root: bytes
    environment: Mapping[str, str]

    def files(self, *, ignored: bool = False) -> set[bytes]:
        which = ("--others", "--ignored") if ignored else ("--cached", "--others")
        return _ask_git(self.repository, self.root, *which, environment=self.environment)

    def ignored_among(self, folders: Iterable[bytes]) -> set[bytes]:
        asked = b"\0".join(folders)  # without a slash at the end, which git would compare with the rules too
        try:
            answer = self.repository.ask("check-ignore", "-z", "--stdin", stdin=asked) if asked else b""
        except GitError:  # its exit status is 1 if it ignores none of them
            return set()
        return {path.rstrip(b"/") for path in answer.split(b"\0")}


def _is_repository(root: bytes, folder: bytes) -> bool:
    git = os.path.join(root, folder, b".git")
    return os.path.isfile(git) or os.path.lexists(os.path.join(git, b"HEAD"))


class _Walk:
    """Walks through a folder and reads its rules as git does; no file counts as tracked, and the user's settings of git as not made.

    Args:
        top: The root of the folder's repository, whose rules count; the folder itself if it is in none.
    """

    def __init__(self, root: bytes, listing: Listing, *, top: bytes) -> None:
        self._root, self._listing = root, listing
        self._rules = IgnoreRules(top, GIT_RULES)
        self._above = b"" if root == top else os.path.relpath(root, top)
        self._enter(b"", is_repository=True)
        for folder in sorted(folders_of([self._above])):
            self._enter(folder)

    def files(self, *, ignored: bool = False) -> set[bytes]:
        found: set[bytes] = set()
        folders = [b""]
        while folders:
            folder = folders.pop()
            entries = _scan(self._root, folder, self._listing)
            names = {entry.name for entry in entries}
            if not self._is_ignored(folder, is_folder=True):  # git reads no rules in a folder that it ignores
                self._enter(self._in_top(folder), is_repository=b".git" in names and _is_repository(self._root, folder))
            for entry in entries:
                path = os.path.join(folder, entry.name)
                is_folder = entry.is_dir(follow_symlinks=False)
                is_ignored = self._is_ignored(path, is_folder=is_folder)
                # Nothing of an environment is copied, so its mark stands for all that git would list there.
                if entry.name == b".git" or (folder and _VIRTUAL_ENVIRONMENT in names - {entry.name}):
                    continue
                if is_folder:
                    folders += [path] if ignored or not is_ignored else []
                elif is_ignored is ignored and (entry.is_symlink() or entry.is_file()):
                    found.add(path)
        return found

    def ignored_among(self, folders: Iterable[bytes]) -> set[bytes]:
        return {folder for folder in folders if self._is_ignored(folder, is_folder=True)}

    def _is_ignored(self, path: bytes, *, is_folder: bool) -> bool:
        return self._rules.verdict(self._in_top(path), is_folder=is_folder) is True

    def _in_top(self, path: bytes) -> bytes:
        return os.path.join(self._above, path) if path and self._above else path or self._above

    def _enter(self, folder: bytes, *, is_repository: bool = False) -> None:
        if is_repository:
            _read_rules(self._rules.enter_repository, folder, self._listing)
        if os.path.lexists(os.path.join(self._rules.root, folder, GIT_RULES)):
            _read_rules(self._rules.read, folder, self._listing)
        self._listing.useless += self._rules.useless
        self._rules.useless.clear()
