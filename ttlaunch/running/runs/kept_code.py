"""Keep the code that runs execute: every file once, by its content, in a private folder beside the runs.

`runs/.code-UID/objects/` has each file under the SHA-256 of its content, and each tree as such a file too: a JSON object of
paths, hashes and rights. `code.json` of a run names its trees. So a run needs space only for files that no run before it had,
and whoever reads a tree back checks every byte against the run's own `code.json`.
"""

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import render_size
from ttlaunch.hosts.sync.listing import collect
from ttlaunch.hosts.sync.secret_files import has_private_key, looks_secret
from ttlaunch.planning.launch_plan import CommandProgram, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.regular_files import read_regular
from ttlaunch.running.runs.files import read_object
from ttlaunch.system_reason import system_reason

LARGE_BYTES = 5_000_000
"""A larger tree is kept with a warning: it is data rather than code."""

_MOST_BYTES = 100_000_000
_LEFT_BYTES = 50_000_000
"""What stays free on the disk: a run needs the space for its records and checkpoints, and can do without a copy of its code."""
_PACKAGE = Path(__file__).parents[2]
_BESIDE_THE_PACKAGE = ("recipes", "configurations")
_HASH = re.compile(r"[0-9a-f]{64}")
_SCRIPTS = {".py", ".sh"}


class KeptCodeError(Exception):
    """Code cannot be kept, or what was kept cannot be used; the text says why."""


@dataclass(frozen=True)
class Tree:
    """The files of a program before they are stored.

    Attributes:
        files: The path of each file in the tree, with its path on this machine. The tree of a recipe begins with the name
            of its folder, which is the recipe's name.
        withheld: Paths of files that look like secrets, which are never kept.
        script: The script, as the run's command names it; None for a recipe.
    """

    files: Mapping[str, Path]
    withheld: tuple[str, ...] = ()
    script: str | None = None


def program_tree(program: RecipeProgram | CommandProgram, working_folder: Path) -> Tree | None:
    """List the files of a recipe's folder, or a script and what it imports from its folder; None for any other program."""
    if isinstance(program, RecipeProgram):
        folder = Path(program.folder)
        listing = collect(os.fsencode(folder), environment=os.environ)
        names = sorted(os.fsdecode(path) for path in listing.paths)
        withheld = sorted(os.fsdecode(path) for path in listing.secrets)
        return _without_secrets(Tree({f"{folder.name}/{name}": folder / name for name in names}, tuple(withheld)))
    script = next((word for word in program.command if Path(word).suffix in _SCRIPTS), None)
    if script is None or not (working_folder / script).is_file():
        return None
    path = working_folder / script
    files = _imported_files(path) if path.suffix == ".py" else [path]
    named = {file.relative_to(path.parent).as_posix(): file for file in files}
    return _without_secrets(Tree(named, script=script))


def package_tree() -> Tree:
    """List the files of ttlaunch itself, with the built-in recipes and configurations."""
    return Tree({name: Path(entry.path) for name, entry in _package_files()})


def _package_files() -> "Iterator[tuple[str, os.DirEntry[str]]]":
    """Yield the files of `package_tree` with their paths in it; every run waits for this, and a `Path` of each takes as long again."""
    beside = [name for name in _BESIDE_THE_PACKAGE if not (_PACKAGE / f"_{name}").is_dir()]
    folders = [_PACKAGE.name, *beside]
    while folders:
        folder = folders.pop()
        with contextlib.suppress(OSError), os.scandir(_PACKAGE.parent / folder) as entries:
            for entry in entries:
                if not entry.is_dir():
                    yield f"{folder}/{entry.name}", entry
                elif entry.name != "__pycache__" and not entry.is_symlink():
                    folders.append(f"{folder}/{entry.name}")


def tree_id(tree: Tree) -> str:
    """Return the hash under which a tree is stored, without storing anything."""
    return hashlib.sha256(_manifest(tree, lambda _content, _sha256: None)[0]).hexdigest()


@contextlib.contextmanager
def open_store(runs_folder: Path, *, alone: bool = False) -> Iterator["Store"]:
    """Open the code of the runs in a folder, and make the folder for it if there is none.

    Args:
        alone: Whether no other process may have it open. A run has it open until its `code.json` names its files, so that
            they are not collected before.

    Raises:
        KeptCodeError: The folder cannot be made, is open to other users, or another process has it open.
    """
    store = Store(runs_folder / f".code-{os.geteuid()}")
    with contextlib.ExitStack() as until_done:
        try:
            store.path.mkdir(mode=0o700, exist_ok=True)
            look = store.path.lstat()
            if not stat.S_ISDIR(look.st_mode) or look.st_uid != os.geteuid() or look.st_mode & 0o077:
                raise KeptCodeError(f"{store.path} is no folder that only this user can open")
            descriptor = os.open(store.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            until_done.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
        except OSError as error:
            raise KeptCodeError(f"{error.filename or store.path}: {system_reason(error)}") from error
        yield store


def collect_unused(runs_folder: Path) -> int:
    """Remove the kept code that no run of a folder names any more, and return the bytes; 0 while a run is being started."""
    if not (runs_folder / f".code-{os.geteuid()}").is_dir():
        return 0
    try:
        with open_store(runs_folder, alone=True) as store:
            used: set[str] = set()
            for path in runs_folder.glob(f"[!.]*/{contract.CODE_FILE}"):
                kept = read_object(path).get("kept") or {}
                used |= {str(kept.get("package")), str((kept.get("program") or {}).get("tree"))}
            return store.collect(used)
    except (KeptCodeError, OSError, ValueError, AttributeError):
        return 0  # it stays until all that names it can be read


class Store:
    """The folder with the kept code of one user's runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, tree: Tree) -> dict[str, Any]:
        """Store a tree, and return what `code.json` says of it; `is_new` is not written but tells that it was not there.

        Raises:
            KeptCodeError: The tree is too large, or the disk is nearly full.
            OSError: A file cannot be read or stored.
        """
        size = sum(path.stat().st_size for path in tree.files.values())
        if size > _MOST_BYTES:
            raise KeptCodeError(f"its files have {render_size(size)}, more than {render_size(_MOST_BYTES)}")
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if free < size + _LEFT_BYTES:
            raise KeptCodeError(f"the disk of {self.path.parent} has only {render_size(free)} left")
        manifest, withheld = _manifest(tree, self._write)
        name = hashlib.sha256(manifest).hexdigest()
        is_new = not self._object(name).is_file()
        self._write(manifest, name)
        kept = {"tree": name, "bytes": size, "withheld": sorted({*tree.withheld, *withheld}), "is_new": is_new}
        return kept | ({"script": tree.script} if tree.script else {})

    def keep_package(self) -> str:
        """Store ttlaunch itself, and return the hash of its tree.

        If no file of it has another size or time than before, nothing is read: every run would wait for that.

        Raises:
            OSError: A file cannot be read or stored.
        """
        looks = [(name, look.st_size, look.st_mtime_ns) for name, file in _package_files() for look in [file.stat()]]
        known = self.path / f"package-{hashlib.sha256(repr(sorted(looks)).encode()).hexdigest()}"
        with contextlib.suppress(OSError):
            name = read_regular(known, most=64).decode("ascii", "replace")
            if _HASH.fullmatch(name) and self._object(name).is_file():
                return name
        name = str(self.keep(package_tree())["tree"])
        self._write_file(known, name.encode())
        return name

    def restore(self, name: str) -> Path:
        """Return a folder with the files of a tree, which are compared with their hashes.

        Raises:
            KeptCodeError: The tree is incomplete or damaged.
        """
        try:
            files = self._read_manifest(name)
            place = self.path / "trees" / name
            if not place.is_dir() or not _has_exactly(place, files):
                (self.path / "trees").mkdir(mode=0o700, exist_ok=True)
                made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.path / "trees"))
                for path, (sha256, is_executable) in files.items():
                    self._write_file(made / path, self._read(sha256), mode=0o700 if is_executable else 0o600)
                # If a damaged folder is in the way, or another process was faster, the new folder keeps its own name.
                with contextlib.suppress(OSError):
                    made = made.rename(place)
                return made
        except OSError as error:
            raise KeptCodeError(f"{error.filename or self.path}: {system_reason(error)}") from error
        return place

    def collect(self, used: Iterable[str]) -> int:
        """Remove what no tree in `used` needs, and return the bytes; the store has to be opened with `alone`.

        Raises:
            KeptCodeError: A tree is damaged, so that nobody knows which files it needs.
            OSError: A file cannot be removed.
        """
        trees = {name for name in used if self._object(name).is_file()}
        needed = trees.union(*({sha256 for sha256, _ in self._read_manifest(name).values()} for name in trees))
        freed = 0
        for path in (self.path / "objects").glob("*/*"):
            if path.parent.name + path.name not in needed:
                freed += path.lstat().st_size
                path.unlink()
        for path in self.path.glob("package-*"):
            if read_regular(path, most=64).decode("ascii", "replace") not in trees:
                path.unlink()
        for folder in (self.path / "trees").glob("*"):
            if folder.name.partition("-")[0] not in trees:
                shutil.rmtree(folder)
        return freed

    def _object(self, sha256: str) -> Path:
        return self.path / "objects" / sha256[:2] / sha256[2:]

    def _write(self, content: bytes, sha256: str) -> None:
        path = self._object(sha256)
        if not path.is_file() or path.stat().st_size != len(content):
            self._write_file(path, content)

    def _write_file(self, path: Path, content: bytes, *, mode: int = 0o600) -> None:
        for folder in reversed([one for one in path.parents if self.path in one.parents]):
            folder.mkdir(mode=0o700, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(made, mode)  # noqa: PTH101 - the name is a text
        os.replace(made, path)  # noqa: PTH105 - as above

    def _read(self, sha256: str) -> bytes:
        content = read_regular(self._object(sha256), most=_MOST_BYTES + 1)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise KeptCodeError(f"{self._object(sha256)} was changed")
        return content

    def _read_manifest(self, name: str) -> dict[str, tuple[str, bool]]:
        if not _HASH.fullmatch(name):
            raise KeptCodeError(f"{contract.CODE_FILE} names no tree")
        try:
            files = json.loads(self._read(name))["files"]
            found = {str(path): (str(sha256), bool(executable)) for path, (sha256, executable) in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KeptCodeError(f"{self._object(name)} is no tree of files") from error
        for path, (sha256, _) in found.items():
            parts = PurePosixPath(path)
            if parts.is_absolute() or ".." in parts.parts or not parts.parts or not _HASH.fullmatch(sha256):
                raise KeptCodeError(f"{self._object(name)} names a file outside the tree")
        return found


def _manifest(tree: Tree, write: Any) -> tuple[bytes, list[str]]:
    """Return the JSON of a tree, and the files in which a private key was found; `write` gets each file's content and hash."""
    files, withheld = {}, []
    for name, path in sorted(tree.files.items()):
        content = path.read_bytes()
        if has_private_key(content):
            withheld.append(name)
            continue
        sha256 = hashlib.sha256(content).hexdigest()
        write(content, sha256)
        files[name] = (sha256, bool(path.stat().st_mode & stat.S_IXUSR))
    return json.dumps({"files": files}, sort_keys=True).encode(), withheld


def _without_secrets(tree: Tree) -> Tree:
    """Leave out what is no regular file, and what looks like a secret, also behind a link and whatever a rule file says."""
    files, withheld = {}, list(tree.withheld)
    for name, path in tree.files.items():
        real = path.resolve()
        if not real.is_file():
            continue
        if looks_secret(os.fsencode(path)) or looks_secret(os.fsencode(real)):
            withheld.append(name)
        else:
            files[name] = path
    return Tree(files, tuple(sorted(withheld)), tree.script)


def _has_exactly(place: Path, files: Mapping[str, tuple[str, bool]]) -> bool:
    found = {
        path.relative_to(place).as_posix(): path
        for path in place.rglob("*")
        if "__pycache__" not in path.parts and not path.is_dir()
    }
    if found.keys() != files.keys():
        return False
    return all(
        not path.is_symlink() and hashlib.sha256(path.read_bytes()).hexdigest() == files[name][0]
        for name, path in found.items()
    )


def _imported_files(script: Path) -> list[Path]:
    """Return a script and the files of its folder that it imports, directly or not, as its statements name them."""
    root = script.parent
    found, to_read = {script}, [script]
    while to_read:
        path = to_read.pop()
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        new = {file for module in _imported_modules(tree, path, root) for file in _files_of(module, root)} - found
        found |= new
        to_read += new
    return sorted(found)


def _imported_modules(tree: ast.Module, path: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """Yield what a file's statements import, as paths of names below `root`."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - (node.level - 1)] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield module
            yield from ((*module, alias.name) for alias in node.names)


def _files_of(module: tuple[str, ...], root: Path) -> Iterator[Path]:
    """Yield the files that Python loads for a module in a folder: the packages above it, and itself."""
    for count in range(1, len(module) + 1):
        place = root.joinpath(*module[:count])
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                yield file
