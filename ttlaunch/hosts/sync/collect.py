"""What of a folder is copied: its files without those that rules leave out and those that look like secrets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ttlaunch.hosts.sync.ignore import UselessLine
from ttlaunch.hosts.sync.listing import folders_of, list_files
from ttlaunch.hosts.sync.secret_files import looks_secret


@dataclass(frozen=True)
class Collected:
    """A folder's part of a release; all paths are bytes relative to it.

    Attributes:
        paths: Files and links to copy.
        folders: Folders to make, also empty ones.
        secrets: Files that stay because they look like secrets.
        special: Named pipes, sockets and devices, which stay.
        unreadable: What could not be listed, and why.
        useless: Lines of rule files that mean nothing.
        without_git: Why git could not be asked in a repository, in its own words.
    """

    paths: list[bytes]
    folders: list[bytes]
    secrets: list[bytes] = field(default_factory=list)
    special: list[bytes] = field(default_factory=list)
    unreadable: dict[bytes, OSError] = field(default_factory=dict)
    useless: list[UselessLine] = field(default_factory=list)
    without_git: str | None = None


def collect(root: bytes, *, environment: Mapping[str, str], ask_git: bool = True) -> Collected:
    """Decide what of a folder is copied; `!path` in a `.ttlaunchignore` names what would else be left out."""
    listing = list_files(root, environment=environment, ask_git=ask_git)
    rules = listing.rules
    verdicts = {path: rules.verdict(path) for path in listing.paths | listing.ignored} if rules else {}
    kept = [path for path in listing.paths if verdicts.get(path) is not True]
    kept += [path for path in listing.ignored if verdicts.get(path) is False]
    below = root + b"/"
    secrets = {path for path in kept if verdicts.get(path) is not False and looks_secret(below + path)}
    paths = sorted(set(kept) - secrets)
    folders = {path for path in listing.folders if not (rules and rules.verdict(path, is_folder=True))}
    folders |= folders_of(paths)
    special = [path for path in listing.special if not (rules and rules.verdict(path))]
    return Collected(
        paths,
        sorted(folders),
        sorted(secrets),
        sorted(special),
        listing.unreadable,
        listing.useless,
        listing.without_git,
    )
