"""Where the files of a configuration lie: what messages call them, and where a descriptor is looked for."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ttlaunch.diagnostics.suggest import shown

_LONGEST_NAME = 300


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

    The folder of the file, its parents up to the root of the repository (all of them if there is none), and the
    working folder. `tt-run` looks only under `$TT_METAL_HOME` and in the working folder.
    """
    folder = bindings.parent
    places = [Place(folder, f"beside {bindings.name}")]
    places += [Place(parent, "above it") for parent in _parents_in_repository(folder)]
    if all(place.folder != working_folder for place in places):
        places.append(Place(working_folder, "the current folder"))
    return places


def _parents_in_repository(folder: Path) -> Iterator[Path]:
    while not os.path.lexists(folder / ".git") and folder != folder.parent:
        folder = folder.parent
        yield folder
