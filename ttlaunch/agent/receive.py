"""The host's side of `ttlaunch sync`: request what is missing of a release, receive it, and make the release current.

Frames on standard input and output. This script sends: `manifest` (send me the manifest), `want` (send me these
contents; the body has a bit for each), `plan` (the answer of a dry run), `busy` (still at work), `done`, `error`.
It receives: `manifest`, `blobs` (the next piece of the contents, one after another in the order of the bits) and
`again` (another sync into this folder has ended: look again). It ends when its standard input ends. Then it removes
what it has not finished; if it was killed, the next sync does.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os

from ttlaunch import contract
from ttlaunch.agent import releases
from ttlaunch.agent.claims import close_to_others, hold
from ttlaunch.agent.host_data import HostData
from ttlaunch.agent.spare import drop_spares, prepare_spare, take_spare
from ttlaunch.agent.unpack import Building, Connection, Contents, LookAgain, Refused, Target, check_space, find_copies

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ttlaunch.agent.releases import Entry, Signature

_WHY = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read-only",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EEXIST: "in the way",
    errno.ENOTDIR: "in the way",
    errno.ENAMETOOLONG: "name",
    errno.EILSEQ: "name",
    errno.EINVAL: "name",
}
_F_SETPIPE_SZ = 1031  # not in Python 3.9's fcntl; sshd has to buffer what does not fit into the pipe, which is slow


def main(arguments: Mapping[str, Any]) -> int:
    """Receive one release; see `ttlaunch.hosts.sync.send` for the arguments."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(0, _F_SETPIPE_SZ, releases.CHUNK)
    connection = Connection()
    try:
        session = _Session(arguments, connection)
        try:
            session.run()
        finally:
            session.clean()
    except Refused as refused:
        connection.send({"kind": "error", **refused.facts})
    except (EOFError, BrokenPipeError):
        return 1  # the launching machine has closed the connection
    except OSError as error:
        connection.send({"kind": "error", **_explained(error, place=arguments["remote_folder"])})
    else:
        return 0
    return 1


def _explained(error: OSError, *, place: str) -> dict[str, Any]:
    """Describe an error for the launching machine; its path is `place` if the error names none."""
    why = _WHY.get(error.errno or 0, "other")
    name = error.filename if error.filename is not None else place
    return {"why": why, "reason": (error.strerror or str(error)).lower(), "path": os.fsdecode(name)}


class _Session:
    def __init__(self, arguments: Mapping[str, Any], connection: Connection) -> None:
        self._arguments, self._connection = arguments, connection
        self._owner: str = arguments["owner"]
        self._tree: str = arguments["tree"]
        home = os.path.expanduser(arguments["remote_folder"])
        self._folder = os.fsencode(os.path.abspath(home))
        self._releases = os.path.join(self._folder, contract.RELEASES_DIR.encode())
        self._release = os.path.join(self._releases, self._tree.encode())
        self._incoming = os.path.join(self._releases, releases.INCOMING + self._owner.encode())
        self._data = HostData(self._folder, alive=connection.alive)
        self._lock: int | None = None
        self._id = ""
        self._repaired: list[str] = []
        self._there = True
        self._done = False
        self._begun = False
        self._old: list[bytes] = []
        self._pruned: list[str] = []
        self._signatures: dict[int, Signature] = {}

    def run(self) -> None:
        if self._arguments["dry_run"]:
            self._plan()
            return
        self._make_folders()
        os.umask(0)  # from here on every file gets exactly the rights of the original
        # The order matters. Our own lock comes first: without it another sync would take our files for leftovers. The
        # release is locked before it is checked, so that no other sync removes it before this one ends.
        self._lock = hold(self._incoming + b".lock", fcntl.LOCK_EX)
        self._id = self._identify()
        releases.clear_leftovers(self._folder)
        held = releases.hold_release(self._folder, self._tree)
        while True:
            with contextlib.suppress(LookAgain):
                self._bring()
                break
            self._clear()
        os.utime(held)  # the lock's time is that of the last sync, by which old releases are chosen
        self._make_current()
        pruned = self._prune(keep=self._arguments["keep"])
        self._data.remember(owner=self._owner)
        self._done = True
        self._connection.send(
            {
                "kind": "done",
                "folder": os.fsdecode(self._folder),
                "there": self._there,
                "repaired": self._repaired,
                "pruned": pruned,
                "data": {sha256: os.fsdecode(path) for sha256, path in self._data.places.items()},
                "differing": [os.fsdecode(path) for path in self._data.differing],
            }
        )

    def clean(self) -> None:
        """Remove files that are not needed any more, and release the lock.

        After a success, old releases are removed, and a copy for the next sync is made, only once the launcher has the
        answers of all hosts, because both take time.
        """
        if self._done and (self._old or not self._there):
            self._connection.wait_for_end()
        for path in self._old:
            releases.remove(path)
        if self._done and not self._there:
            prepare_spare(self._folder, self._tree, owner=self._owner)
        self._clear()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._incoming + b".lock")
            os.close(self._lock)

    def _clear(self) -> None:
        if self._lock is not None:
            releases.remove(self._incoming)
            for sha256, _ in self._data.missing:
                releases.remove(self._data.incoming(sha256, self._owner))

    def _make_folders(self) -> None:
        os.makedirs(os.path.dirname(self._folder), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        others = [os.path.join(self._folder, name.encode()) for name in (contract.DATA_DIR, contract.SPARE_DIR)]
        for path in (self._releases, *others):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o777)
            close_to_others(path)
        ignore = os.path.join(self._folder, b".gitignore")
        if not os.path.lexists(ignore):
            with contextlib.suppress(FileExistsError):  # another host of the same file system was first
                releases.write_file(ignore, b"*\n")

    def _identify(self) -> str:
        """Return the folder's id. Hosts that share the folder have the same id, so the release is sent to only one of them."""
        path = os.path.join(self._folder, b".id")
        try:
            if not os.path.exists(path):
                temporary = self._incoming + b".id"
                releases.write_file(temporary, os.urandom(16).hex().encode())
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)
                os.unlink(temporary)
            with open(path, encoding="ascii") as file:
                return file.read(64)
        except (OSError, ValueError):
            return ""

    def _bring(self) -> None:
        """Fetch what is missing of the release and of the training texts."""
        entries = releases.read_manifest(self._release)
        manifest = None
        self._data.places, self._data.differing, self._data.missing = {}, [], []
        self._data.look(self._arguments["data"])
        if entries is None:
            manifest = releases.renew_manifest(self._releases, self._arguments["news"], tree_hash=self._tree)
        if entries is None and manifest is None:
            self._connection.send({"kind": "manifest", "id": self._id})
            manifest = self._connection.answer()
            if hashlib.sha256(manifest).hexdigest() != self._tree:
                raise Refused("damaged", path="the manifest")
        if entries is None:
            assert manifest is not None  # noqa: S101 - just found or sent
            entries = releases.parse_manifest(manifest)
        wrong = self._look(entries, manifest)
        if wrong or self._data.missing or manifest is not None:
            self._fetch(entries, wrong, manifest)

    def _look(self, entries: Sequence[Entry], manifest: bytes | None) -> list[int]:
        """Return the indices of the entries that are missing or wrong in the release."""
        if not os.path.isdir(self._release) or os.path.islink(self._release):
            if self._arguments["dry_run"]:
                return list(range(len(entries)))
            if os.path.lexists(self._release):
                self._put_away(self._release)
            taken = take_spare(self._folder, entries, into=self._incoming)
            self._begun = taken is not None
            wrong, self._signatures = taken or (list(range(len(entries))), {})
            return wrong
        wrong, self._signatures, read_any = releases.check_tree(self._release, entries, alive=self._connection.alive)
        if read_any and manifest is None and not self._arguments["dry_run"]:
            temporary = self._incoming + b".signatures"
            releases.write_signatures(self._release, self._signatures, count=len(entries), temporary=temporary)
        self._repaired = [os.fsdecode(entries[index][4]) for index in wrong]
        return wrong

    def _fetch(self, entries: Sequence[Entry], wrong: list[int], manifest: bytes | None) -> None:
        building = Building(self._release, entries, wrong, incoming=self._incoming, begun=self._begun)
        texts = [
            Target(self._data.incoming(sha256, self._owner), mode=0o644, size=size, digest=sha256.encode(), index=-1)
            for sha256, size in self._data.missing
        ]
        targets = [*building.targets, *texts]
        self._make_room(targets, others=len(wrong) - len(building.targets))
        building.prepare(names=[os.fsencode(name) for name in self._arguments["same_names"]])
        given = self._given(entries)
        lacking = {target.digest for target in targets} - {digest for digest, _ in given}
        copies = find_copies(self._folder, lacking, likely=self._likely())
        contents = Contents(self._connection, order=self._order(entries), about={"id": self._id}, given=given)
        building.signatures = {**self._signatures, **contents.bring(targets, copies=copies)}
        for (sha256, _), text in zip(self._data.missing, texts):  # noqa: B905 - `strict` is of Python 3.10
            final = self._data.target(sha256)
            os.replace(text.path, final)
            self._data.places[sha256] = final
        self._there = False
        if not building.finish(manifest=manifest):
            raise LookAgain
        self._clear()

    def _likely(self) -> list[bytes]:
        """Names of releases that have most of the contents: the same one, if it is damaged, and the one sent last."""
        news = self._arguments["news"]
        return [self._tree.encode(), *([news["tree"].encode()] if news else [])]

    def _given(self, entries: Sequence[Entry]) -> list[tuple[bytes, int]]:
        """The contents that the launching machine sends unasked, with their sizes."""
        names = self._arguments["news"]["contents"] if self._arguments["news"] else []
        sizes = {content: size for kind, _, size, content, _ in entries if kind == releases.FILE} if names else {}
        return [(name.encode(), sizes[name.encode()]) for name in names]

    def _order(self, entries: Sequence[Entry]) -> list[bytes]:
        """The contents in the order in which both sides count them."""
        digests = [content for kind, _, _, content, _ in entries if kind == releases.FILE]
        return list(dict.fromkeys(digests + [item["sha256"].encode() for item in self._arguments["data"]]))

    def _make_room(self, targets: Sequence[Target], *, others: int) -> None:
        """Give up the spare copy, and then old releases, if the disk has not enough room."""
        steps: tuple[Callable[[], None], ...] = (lambda: drop_spares(self._folder), self._remove_old)
        for give_up in steps:
            with contextlib.suppress(Refused):
                check_space(self._releases, targets, others=others)
                return
            give_up()
        check_space(self._releases, targets, others=others)

    def _remove_old(self) -> None:
        self._prune(keep=1)
        for path in self._old:
            releases.remove(path)

    def _make_current(self) -> None:
        current = os.path.join(self._folder, contract.CURRENT_LINK.encode())
        goal = os.path.join(contract.RELEASES_DIR.encode(), self._tree.encode())
        if os.path.islink(current) and os.readlink(current) == goal:
            return
        if os.path.isdir(current) and not os.path.islink(current):
            raise Refused("in the way", reason="is a directory", path=os.fsdecode(current))
        # A link cannot be changed, only replaced: a run that starts at this moment sees the old release or the new one.
        os.symlink(goal, self._incoming)
        os.replace(self._incoming, current)

    def _prune(self, *, keep: int) -> list[str]:
        """Rename old releases, so that nobody uses them any more; `clean` removes them later."""
        for name, lock in releases.old_releases(self._folder, keep=keep, own=self._tree.encode()):
            self._put_away(os.path.join(self._releases, name))
            os.unlink(os.path.join(self._releases, name + b".lock"))
            os.close(lock)
            self._pruned.append(os.fsdecode(name))
        return self._pruned

    def _put_away(self, path: bytes) -> None:
        away = self._incoming + b".old-" + os.path.basename(path)
        os.rename(path, away)
        self._old.append(away)

    def _plan(self) -> None:
        """Report what a sync would do, and change nothing."""
        entries = releases.read_manifest(self._release)
        self._data.look(self._arguments["data"])
        if entries is None:
            self._connection.send({"kind": "manifest", "id": ""})
            entries = releases.parse_manifest(self._connection.answer())
        wrong = self._look(entries, None)
        sizes = {entries[index][3]: entries[index][2] for index in wrong if entries[index][0] == releases.FILE}
        sizes.update((sha256.encode(), size) for sha256, size in self._data.missing)
        copies = find_copies(self._folder, set(sizes), likely=self._likely())
        lacking = {digest: size for digest, size in sizes.items() if digest not in copies}
        old = list(releases.old_releases(self._folder, keep=self._arguments["keep"], own=self._tree.encode()))
        for _, lock in old:
            os.close(lock)
        self._connection.send(
            {
                "kind": "plan",
                "folder": os.fsdecode(self._folder),
                "there": not wrong and not self._data.missing,
                "files": len(lacking),
                "bytes": sum(lacking.values()),
                "repaired": self._repaired,
                "pruned": [os.fsdecode(name) for name, _ in old],
                "differing": [os.fsdecode(path) for path in self._data.differing],
            }
        )
