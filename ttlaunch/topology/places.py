"""Where the files of a configuration lie: what messages call them, and where a descriptor is looked for."""

import os
from dataclasses import dataclass
from pathlib import Path

from ttlaunch.diagnostics.suggest import shown

_LONGEST_NAME = 300
_PARENTS_ELSEWHERE = 2


@dataclass(frozen=True)
class Place:
    """A folder in which a descriptor is looked for.

    Attributes:
        why: What it is to the user: "beside rank_bindings.yaml".
    """

    folder: Path
    why: str


def absolute(path: Path, *, working_folder: Path) -> Path:
    """The path seen from the working folder, without `..`, symbolic links left as they are."""
    return Path(os.path.normpath(working_folder / path))


def display_name(path: Path, *, working_folder: Path) -> str:
    """How the user would type this path: short if it is inside the working folder, printable in any case."""
    whole = absolute(path, working_folder=working_folder)
    inside = whole.is_relative_to(working_folder) and whole != working_folder
    return shown(whole.relative_to(working_folder) if inside else path, longest=_LONGEST_NAME)


def descriptor_places(bindings: Path, *, working_folder: Path) -> list[Place]:
    """Where the descriptor that a bindings file names is looked for, in this order; the first hit counts.

    The folder of the file, its parents up to the root of the repository, and the working folder. Outside a repository
    two parents count, enough for `configurations/NAME/mgd.yaml`. `tt-run` looks only under `$TT_METAL_HOME` and in the
    working folder.
    """
    folder = bindings.parent
    places = [Place(folder, f"beside {bindings.name}")]
    places += [Place(parent, "above it") for parent in _parents_in_repository(folder)]
    if all(place.folder != working_folder for place in places):
        places.append(Place(working_folder, "the current folder"))
    return places


def _parents_in_repository(folder: Path) -> list[Path]:
    parents = [folder, *folder.parents]
    root = next((index for index, parent in enumerate(parents) if os.path.lexists(parent / ".git")), _PARENTS_ELSEWHERE)
    return parents[1 : root + 1]
