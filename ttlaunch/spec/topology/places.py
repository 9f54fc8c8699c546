"""Find the files of a configuration, and choose the names under which messages show them."""

import os
from pathlib import Path

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import listed, shown
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology import codes

HOSTS_FILE = "hosts.txt"
BINDINGS_FILE = "rank_bindings.yaml"
DESCRIPTOR_FILES = ("mgd.yaml", "mgd.textproto")
SUB_CONTEXT_FILES = "subcontext_id_to_rank_bindings"
DESCRIPTORS = "subcontext_id_to_mesh_graph_descriptor"
MOCK_CLUSTERS = "rank_to_cluster_mock_cluster_desc"

_LONGEST_PATH = 200
_LONGEST_NAME = 300
_PARENTS_OUTSIDE_REPOSITORY = 2


@dataclass(frozen=True)
class Place:
    """A folder in which a descriptor is looked for.

    Attributes:
        why: How messages describe the folder, such as "beside rank_bindings.yaml".
    """

    folder: Path
    why: str


@dataclass(frozen=True)
class NamedFile:
    """A file that rank bindings refer to.

    Attributes:
        key: The key that names the file: `mesh_graph_desc_path`.
        written: The path as written in the file.
        usual: Usual names of such files, for the hint.
    """

    key: str
    written: str
    span: Span
    usual: tuple[str, ...] = ()


def find_file(named: NamedFile, *, bindings: Path, working_folder: Path) -> tuple[Path, str] | Diagnostic:
    """Return the file's absolute path and a description of where it was found, or the diagnostic that it does not exist."""
    places = descriptor_places(bindings, working_folder=working_folder)
    is_absolute = Path(named.written).is_absolute()
    for place in places[:1] if is_absolute else places:
        path = absolute(Path(named.written), working_folder=place.folder)
        if os.path.isfile(path):  # noqa: PTH113 - never raises, whatever the path
            return path, "an absolute path" if is_absolute else place.why
    looked = [
        "the current folder"
        if place.folder == working_folder
        else display_name(place.folder, working_folder=working_folder)
        for place in places
    ]
    paths = (absolute(Path(named.written), working_folder=place.folder) for place in places)
    there = next((path for path in paths if os.path.lexists(path)), None)
    problem = "does not exist"
    if there is not None:
        problem = "is a folder; a file was expected" if os.path.isdir(there) else "is not a regular file"  # noqa: PTH112 - as above
    message = f"`{named.key}` names `{shown(named.written, longest=_LONGEST_PATH)}`, which {problem}"
    notes = () if is_absolute or there is not None else (f"looked in {listed(looked, last='and', quote='')}",)
    beside = [file for file in (Path(named.written).name, *named.usual) if os.path.isfile(bindings.parent / file)]  # noqa: PTH113 - as above
    hints = tuple(f"did you mean `{file}`, which lies beside {bindings.name}?" for file in beside[:1])
    return Diagnostic(
        codes.MISSING_FILE,
        message,
        Label(named.span, "no such file" if there is None else "not a file"),
        notes=notes,
        hints=hints,
    )


def absolute(path: Path, *, working_folder: Path) -> Path:
    """Return the absolute path, relative to the working folder, with `..` resolved and symbolic links kept."""
    return Path(os.path.normpath(working_folder / path))


def display_name(path: Path, *, working_folder: Path) -> str:
    """Return how the user would type this path: relative if it is inside the working folder, and always printable."""
    full_path = absolute(path, working_folder=working_folder)
    inside = full_path.is_relative_to(working_folder) and full_path != working_folder
    return shown(full_path.relative_to(working_folder) if inside else path, longest=_LONGEST_NAME)


def descriptor_places(bindings: Path, *, working_folder: Path) -> list[Place]:
    """List where the descriptor that a bindings file names is looked for, in order; the first match wins.

    These are the folder of the file, its parents up to the root of the repository, and the working folder. Outside a
    repository, only two parents are searched, which is enough for `configurations/NAME/mgd.yaml`. `tt-run` searches only
    `$TT_METAL_HOME` and the working folder.
    """
    folder = bindings.parent
    places = [Place(folder, f"beside {bindings.name}")]
    places += [Place(parent, "above it") for parent in _parents_in_repository(folder)]
    if all(place.folder != working_folder for place in places):
        places.append(Place(working_folder, "the current folder"))
    return places


def _parents_in_repository(folder: Path) -> list[Path]:
    parents = [folder, *folder.parents]
    root = next(
        (index for index, parent in enumerate(parents) if os.path.lexists(parent / ".git")), _PARENTS_OUTSIDE_REPOSITORY
    )
    return parents[1 : root + 1]
