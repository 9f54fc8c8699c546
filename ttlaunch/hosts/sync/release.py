"""Make a release: the project, ttlaunch itself and, if it lies elsewhere, the recipe, under one tree hash."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic, has_errors
from ttlaunch.hosts.sync.check_release import check_collected, check_links, check_read, check_secrets, explain_changing
from ttlaunch.hosts.sync.hash_cache import HashCache, cache_folder
from ttlaunch.hosts.sync.listing import Listing, collect, folders_of
from ttlaunch.hosts.sync.manifest import FILE, FOLDER, Entry, Manifest, make_manifest
from ttlaunch.hosts.sync.read_files import FileReader, UnreadableError, is_inside
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.named_folders import built_in_folder

_PACKAGE = Path(__file__).parents[2]
_BUNDLED = ("recipes", "configurations")
_STAYS_HERE = b"diagnostics/pages"
"""The part of ttlaunch that no rank reads: a page for each diagnostic, a tenth of the files of many a release."""

_ATTEMPTS = 3
_STILL_NS = 5 * 10**9
"""A network file system's clock may be so far behind this machine's."""


@dataclass(frozen=True)
class Origin:
    """What a release is made from, so that it can be made again when files have changed.

    Attributes:
        working_folder: The current folder, without links.
        folder: `--folder`; None for the repository that has the current folder or, without one, the current folder.
        recipe: The recipe's folder, without links; None if there is none.
        environment: The environment of the launching machine, which decides how git behaves and where the cache is.
    """

    working_folder: Path
    folder: Path | None
    recipe: Path | None
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Release:
    """The code that every host is to receive.

    Attributes:
        project: Root of the project on the launching machine.
        working_folder: Where the current folder lies in the release, relative to it.
        recipe: Where the recipe's folder lies in the release, relative to it; None without one.
    """

    manifest: Manifest
    project: Path
    working_folder: str
    recipe: str | None
    origin: Origin

    @property
    def tree_hash(self) -> str:
        return self.manifest.tree_hash

    @cached_property
    def files(self) -> int:
        """The number of its files."""
        return sum(entry.kind == FILE for entry in self.manifest.entries)

    @cached_property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(entry.size for entry in self.manifest.entries)

    @cached_property
    def same_names(self) -> list[str]:
        """Two paths that differ in nothing but upper and lower case; empty if there are none."""
        seen: dict[str, str] = {}
        for entry in self.manifest.entries:
            name = os.fsdecode(entry.path)
            other = seen.setdefault(name.casefold(), name)
            if other != name:
                return [other, name]
        return []

    def again(self) -> "tuple[Release | None, list[Diagnostic]]":
        """Make the release again from what the files hold now; None if they cannot be read any more."""
        return _make(self.origin, on_progress=None)


def make_release(
    working_folder: Path,
    *,
    folder: Path | None = None,
    recipe: Path | None = None,
    environment: Mapping[str, str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Release | None, list[Diagnostic]]:
    """Read everything that is to be copied.

    Args:
        working_folder: The current folder; it chooses the project unless `folder` does.
        folder: The project's root.
        recipe: The recipe's folder.
        environment: The environment of the launching machine; None for that of this process.
        on_progress: Called with the number of files and of bytes read so far.

    Returns:
        The release, and the diagnostics; no release if one of them is an error.
    """
    origin = Origin(
        Path(os.path.realpath(working_folder)),
        Path(os.path.realpath(folder)) if folder is not None else None,
        Path(os.path.realpath(recipe)) if recipe is not None else None,
        os.environ if environment is None else environment,
    )
    return _make(origin, on_progress=on_progress)


@dataclass(frozen=True)
class _Tree:
    """What the files of a release held, each at the moment when it was read.

    Attributes:
        root: The project's root.
        recipe: Where the recipe lies in the release.
        entries: The release, without the folders above its parts.
        problems: Diagnostics about the files.
    """

    root: Path
    recipe: str | None
    entries: list[Entry]
    problems: list[Diagnostic]


def _make(origin: Origin, *, on_progress: Callable[[int, int], None] | None) -> tuple[Release | None, list[Diagnostic]]:
    began_ns = time.time_ns()
    project = _choose_project(origin)
    problems = list(check_collected(project[1], root=project[0]))
    if has_errors(problems):  # before gigabytes are read in vain
        return None, problems
    cache = HashCache(cache_folder(origin.environment), os.fsencode(project[0]))
    reader = FileReader(cache, on_progress=on_progress)
    tree = _read_tree(origin, project, reader)
    # While files are read one after another, a `git checkout` may change some of them: the release would mix two
    # versions that were never there together. If nothing changed since before the beginning, all is as it was then.
    # Otherwise a second look that finds every file as it was read proves that all of them were there at once.
    was_still = not reader.vanished and reader.newest_ns < began_ns - _STILL_NS
    for _ in range(_ATTEMPTS):
        if was_still or has_errors(tree.problems):
            break
        former, tree = tree, _read_tree(origin, _choose_project(origin), FileReader(cache))
        if tree.entries == former.entries:
            break
    else:
        tree.problems.append(explain_changing(tree.root, times=_ATTEMPTS + 1))
    cache.save()
    if has_errors(tree.problems):
        return None, tree.problems
    manifest = make_manifest(_with_parents(tree.entries))
    release = Release(manifest, tree.root, _in_project(origin.working_folder, tree.root), tree.recipe, origin)
    _ = release.tree_hash, release.manifest.sources, release.same_names  # known from now on, while hosts are reached
    return release, tree.problems


def _read_tree(origin: Origin, project: tuple[Path, Listing], reader: FileReader) -> _Tree:
    """Read the project, ttlaunch, and the recipe unless one of the two holds it."""
    (root, collected), into = project, contract.PROJECT_DIR
    entries, errors = _read_part(reader, root, collected, into=into)
    problems = [*check_collected(collected, root=root), *check_links(entries, into=into.encode())]
    for source, name in _package_parts():
        part = collect(os.fsencode(source), environment=origin.environment, ask_git=False)
        part.paths = {path for path in part.paths if not path.startswith(_STAYS_HERE + b"/")}
        part.folders.discard(_STAYS_HERE)
        found, unreadable = _read_part(reader, source, part, into=f"{contract.PACKAGE_DIR}/{name}")
        entries, errors = entries + found, errors + unreadable
    recipe, place = origin.recipe, None
    if recipe is not None:
        place = _recipe_in_release(recipe, root=root, entries=entries)
        if place is None:
            place = f"{contract.RECIPES_DIR}/{recipe.name}"
            part = collect(os.fsencode(recipe), environment=origin.environment, ask_git=False)
            found, unreadable = _read_part(reader, recipe, part, into=place)
            entries, errors = entries + found, errors + unreadable
            problems += check_secrets(part, inside=recipe)
    problems += check_read(errors, root=root)
    return _Tree(root, place, entries, problems)


def _read_part(
    reader: FileReader, source: Path, listing: Listing, *, into: str
) -> tuple[list[Entry], list[UnreadableError]]:
    """Read the files of a listing; a file that contains a private key is added to its secrets."""
    root = os.fsencode(source)
    folders = [b"", *sorted(listing.folders)]
    entries, errors = reader.read_all(root, sorted(listing.paths), folders=folders, into=into.encode())
    with_keys = {path for path in listing.paths - listing.named if root + b"/" + path in reader.with_keys}
    listing.secrets |= with_keys
    left_out = {root + b"/" + path for path in with_keys}
    return [entry for entry in entries if entry.source not in left_out], errors


def _choose_project(origin: Origin) -> tuple[Path, Listing]:
    """The project's root, and what of it is copied."""
    environment = origin.environment
    if origin.folder is not None:
        return origin.folder, collect(os.fsencode(origin.folder), environment=environment)
    here = origin.working_folder
    root = next((folder for folder in (here, *here.parents) if os.path.lexists(folder / ".git")), here)
    collected = collect(os.fsencode(root), environment=environment)
    inside = os.fsencode(os.path.relpath(here, root))
    if root != here and inside not in collected.folders:  # the repository ignores the current folder
        return here, collect(os.fsencode(here), environment=environment, ask_git=False)
    return root, collected


def _package_parts() -> list[tuple[Path, str]]:
    """Folders of ttlaunch, and their names in the release, where they lie as in an installed package."""
    bundled = [(built_in_folder(kind), f"ttlaunch/_{kind}") for kind in _BUNDLED]
    return [(_PACKAGE, "ttlaunch"), *((source, name) for source, name in bundled if source.parent != _PACKAGE)]


def _recipe_in_release(recipe: Path, *, root: Path, entries: list[Entry]) -> str | None:
    """Where a recipe lies that is part of the project or of ttlaunch; None if it has to be copied by itself."""
    bundled = built_in_folder("recipes").resolve()
    if is_inside(recipe, bundled):
        return f"{contract.PACKAGE_DIR}/ttlaunch/_recipes/{recipe.relative_to(bundled)}"
    place = _in_project(recipe, root)
    declared = os.fsencode(f"{place}/recipe.py")
    return place if is_inside(recipe, root) and any(entry.path == declared for entry in entries) else None


def _in_project(path: Path, root: Path) -> str:
    if path == root or not is_inside(path, root):
        return contract.PROJECT_DIR
    return f"{contract.PROJECT_DIR}/{path.relative_to(root)}"


def _with_parents(entries: list[Entry]) -> list[Entry]:
    """All entries, and the folders that hold them."""
    folders = {entry.path for entry in entries if entry.kind == FOLDER}
    missing = folders_of(entry.path for entry in entries) - folders
    return [*entries, *(Entry(FOLDER, folder, mode=0o755) for folder in missing)]
