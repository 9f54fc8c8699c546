"""Which files of a folder are copied: those that git lists, or a walk finds, without ignored ones and secrets.

Paths are bytes relative to the folder, as the system has them; a name need not be text.
"""

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ttlaunch.hosts.sync.ignore import GIT_RULES, OWN_RULES, IgnoreRules, UselessLine
from ttlaunch.hosts.sync.repository import GitError, Repository, is_in_repository, open_repository
from ttlaunch.hosts.sync.secret_files import looks_secret

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
    if ask_git and is_in_repository(root):
        try:
            with open_repository(root, environment=environment) as repository:
                listing.paths = _ask_git(repository, root, environment=environment)
                _look_around(root, listing, repository)
                listing.useless = listing.rules.useless
                if listing.rules.has_exceptions:
                    ignored = _ask_git(repository, root, "--others", "--ignored", environment=environment)
                    listing.ignored = ignored - listing.paths
                return listing
        except GitError as error:
            listing = Listing(IgnoreRules(root, OWN_RULES), without_git=str(error))
    walk = _Walk(root, listing)
    walk.folder(b"", ignored=False)
    listing.useless = [*walk.git_rules.useless, *listing.rules.useless]
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
    answer = repository.ask("ls-files", "-z", "--exclude-standard", *(which or ("--cached", "--others")))
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


def _look_around(root: bytes, listing: Listing, repository: Repository) -> None:
    """Find what git does not list: rules of ours, empty folders, special files, environments."""
    known = {b"", *folders_of(listing.paths)}
    empty: set[bytes] = set()
    environments = []
    for folder in sorted(known):
        for entry in _scan(root, folder, listing):
            path = folder + b"/" + entry.name if folder else entry.name
            if entry.name == OWN_RULES:
                _read_rules(listing.rules, folder, listing)
            elif entry.name == _VIRTUAL_ENVIRONMENT and folder:
                environments.append(folder + b"/")
            elif entry.is_dir(follow_symlinks=False):
                empty |= set() if path in known else _empty_folders(root, path)
            elif not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                listing.special.add(path)
    listing.folders = known - {b""} | empty - _ignored_by_git(repository, empty)

    def belongs(path: bytes) -> bool:
        return not _NEVER.intersection(path.split(b"/")) and not (path + b"/").startswith(tuple(environments))

    listing.paths = {path for path in listing.paths if belongs(path)}
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


def _read_rules(rules: IgnoreRules, folder: bytes, listing: Listing) -> None:
    try:
        rules.read(folder)
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


def _ignored_by_git(repository: Repository, folders: Iterable[bytes]) -> set[bytes]:
    asked = b"\0".join(folder + b"/" for folder in folders)
    try:
        answer = repository.ask("check-ignore", "-z", "--stdin", stdin=asked) if asked else b""
    except GitError:  # its exit status is 1 if it ignores none of them
        return set()
    return {path.rstrip(b"/") for path in answer.split(b"\0")}


class _Walk:
    """Walks through a folder by the rules of its `.gitignore` files."""

    def __init__(self, root: bytes, listing: Listing) -> None:
        self._root, self._listing = root, listing
        self.git_rules = IgnoreRules(root, GIT_RULES)

    def folder(self, folder: bytes, *, ignored: bool) -> None:
        """List one folder; if it is `ignored`, only the paths that a `.ttlaunchignore` names are listed."""
        entries = _scan(self._root, folder, self._listing)
        names = {entry.name for entry in entries}
        if _VIRTUAL_ENVIRONMENT in names and folder:
            self._listing.folders.discard(folder)
            return
        for rules, name in ((self.git_rules, GIT_RULES), (self._listing.rules, OWN_RULES)):
            if name in names:
                _read_rules(rules, folder, self._listing)
        if folder and self.git_rules.verdict(os.path.join(folder, b"anything")):
            self._listing.folders.discard(folder)  # it ignores itself, as run folders do
        for entry in entries:
            if entry.name not in _NEVER:
                self._entry(entry, os.path.join(folder, entry.name), ignored=ignored)

    def _entry(self, entry: os.DirEntry[bytes], path: bytes, *, ignored: bool) -> None:
        is_folder = entry.is_dir(follow_symlinks=False)
        ignored = ignored or self.git_rules.verdict(path, is_folder=is_folder) is True
        if is_folder:
            if not ignored:
                self._listing.folders.add(path)
            if not ignored or self._listing.rules.has_exceptions:
                self.folder(path, ignored=ignored)
        elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode) and not entry.is_symlink():
            if not ignored:
                self._listing.special.add(path)
        else:
            (self._listing.ignored if ignored else self._listing.paths).add(path)
