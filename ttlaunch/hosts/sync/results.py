"""The results of a sync: a host's progress, what a dry run would change on it, and what was changed."""

from ttlaunch.diagnostics import Diagnostic
from ttlaunch.errors import HostError
from ttlaunch.hosts.sync.release import Release
from ttlaunch.quick_dataclass import dataclass


@dataclass(frozen=True)
class Progress:
    """The progress of one host.

    Attributes:
        sent: The bytes of content sent to the host so far.
        total: The bytes of content that the host lacks.
        finished: Whether the host's last frame has arrived.
    """

    host: str
    sent: int
    total: int
    finished: bool = False


@dataclass(frozen=True)
class Synced:
    """The result for a host that has the release.

    Attributes:
        remote_folder: The absolute path of the remote folder on the host.
        release: The absolute path of the release on the host.
        data: The absolute path of each text on the host, by SHA-256.
        sent_bytes: The bytes sent over the network, as far as they were compressed, after that.
        files: The number of contents sent.
        seconds: The time from the first message to the last.
        already_there: Whether nothing was missing and nothing damaged.
        pruned: Tree hashes of old releases that were removed.
        repaired: Files of the release that had been changed on the host.
        differing_data: Paths at which the host has another text.
    """

    host: str
    tree_hash: str
    remote_folder: str
    release: str
    data: dict[str, str]
    sent_bytes: int
    files: int
    seconds: float
    already_there: bool
    pruned: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    differing_data: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """The result of a dry run for a host.

    Attributes:
        files: The number of contents that the host lacks.
        bytes: The size of these contents, before compression.
        already_there: Whether nothing is missing and nothing damaged.
        pruned: Tree hashes of old releases that would be removed.
        repaired: Files of the release that have been changed on the host.
        differing_data: Paths at which the host has another text.
    """

    host: str
    tree_hash: str
    remote_folder: str
    files: int
    bytes: int
    already_there: bool
    pruned: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    differing_data: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a sync.

    Attributes:
        release: The release that was sent; a newer one if files changed during the sync.
        hosts: The result of each host, in the order of the transports.
        changed: Files that changed during the sync.
        problems: Diagnostics about the newer release, if one was made.
    """

    release: Release
    hosts: dict[str, Synced | Planned | HostError]
    changed: tuple[str, ...] = ()
    problems: tuple[Diagnostic, ...] = ()
