"""Find the folders of recipes and configurations by name, in the current folder first and then built in, or by path."""

import os
from pathlib import Path

from ttlaunch.diagnostics import Blame, Diagnostic, did_you_mean, listed, shown
from ttlaunch.quick_dataclass import dataclass

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that users name, such as recipes.

    Attributes:
        noun: The word for one such folder in messages; its plural is the name of the parent folder.
        code: The code of the diagnostic for an unknown name.
        marker: A file that every such folder has.
        hint: The hint for an unknown name that resembles no known one.
    """

    noun: str
    code: str
    marker: str
    hint: str


@dataclass(frozen=True)
class NamedFolder:
    """A recipe's or configuration's folder, before its files are read.

    Attributes:
        built_in: Whether the folder comes with ttlaunch.
        hides: Whether a built-in folder has the same name; the name then means this one.
    """

    name: str
    folder: Path
    built_in: bool
    hides: bool = False

    @property
    def train_file(self) -> Path:
        """Return the training file of a recipe."""
        return self.folder / "train.yaml"


def built_in_folder(kind: str) -> Path:
    """Return the folder of the built-in `recipes` or `configurations`: in the wheel, else beside the package."""
    packaged = _PACKAGE / f"_{kind}"
    return packaged if packaged.is_dir() else _PACKAGE.parent / kind


def list_folders(kind: FolderKind, working_folder: Path) -> list[NamedFolder]:
    """List all folders that a name can mean, one per name: those of the current folder hide built-in ones."""
    built_in, own = built_in_folder(f"{kind.noun}s"), working_folder / f"{kind.noun}s"
    found: dict[str, NamedFolder] = {}
    for folder, is_built_in in ((built_in, True), (own, False)):
        # In a checkout both are the same folder.
        if folder.is_dir() and (is_built_in or folder.resolve() != built_in.resolve()):
            children = sorted(child for child in folder.iterdir() if (child / kind.marker).is_file())
            found |= {one.name: NamedFolder(one.name, one, is_built_in, hides=one.name in found) for one in children}
    return [found[name] for name in sorted(found)]


def find_folder(name: str, kind: FolderKind, *, working_folder: Path) -> NamedFolder | Diagnostic:
    """Return the folder that the user means by a name or a path; a path need not have the marker."""
    known = list_folders(kind, working_folder)
    for one in known:
        if one.name == name:
            return one
    path = working_folder / os.path.expanduser(name)  # noqa: PTH111 - this one never raises, whatever was typed
    if name and os.path.isdir(path):  # noqa: PTH112 - as above
        return NamedFolder(path.resolve().name, path, built_in=False)
    names = [one.name for one in known]
    return Diagnostic(
        kind.code,
        f"there is no {kind.noun} `{shown(name)}`" if name else f"the name of the {kind.noun} is empty",
        notes=(f"{kind.noun}s here: {listed(names, last='and')}",),
        hints=(did_you_mean(name, names) or (kind.hint,)) if name else (),
        blame=Blame.COMMAND_LINE,
    )
