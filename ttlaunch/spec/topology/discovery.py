"""Find configurations: in the current folder's `configurations/` first, then built in, or by path."""

from dataclasses import dataclass
from pathlib import Path

from ttlaunch.diagnostics import Blame, Diagnostic, did_you_mean, listed, shown

_PACKAGE = Path(__file__).parents[2]
_HOSTFILE = "hosts.txt"


@dataclass(frozen=True)
class FoundConfiguration:
    """A configuration's folder, before its files are read.

    Attributes:
        built_in: Whether it came with ttlaunch.
    """

    name: str
    folder: Path
    built_in: bool


def list_configurations(working_folder: Path) -> list[FoundConfiguration]:
    """All configurations that a name can mean, one per name: those of the current folder hide built-in ones."""
    packaged = _PACKAGE / "_configurations"
    built_in = packaged if packaged.is_dir() else _PACKAGE.parent / "configurations"
    own = working_folder / "configurations"
    found: dict[str, FoundConfiguration] = {}
    for folder, is_built_in in ((built_in, True), (own, False)):
        if not folder.is_dir() or (not is_built_in and folder.resolve() == built_in.resolve()):
            continue
        for child in sorted(folder.iterdir()):
            if (child / _HOSTFILE).is_file():
                found[child.name] = FoundConfiguration(child.name, child, is_built_in)
    return [found[name] for name in sorted(found)]


def find_configuration(name: str, *, working_folder: Path) -> FoundConfiguration | Diagnostic:
    """The configuration that the user means by a name or a path of a folder."""
    known = list_configurations(working_folder)
    if not name:
        here = listed([one.name for one in known], last="and")
        return Diagnostic(
            "P005",
            "the name of the configuration is empty",
            notes=(f"configurations here: {here}",),
            blame=Blame.COMMAND_LINE,
        )
    for configuration in known:
        if configuration.name == name:
            return configuration
    path = working_folder / Path(name).expanduser()
    if path.is_dir():
        return FoundConfiguration(path.resolve().name, path, built_in=False)
    own = working_folder / "configurations" / name
    if own.is_dir():
        return FoundConfiguration(name, own, built_in=False)
    names = [configuration.name for configuration in known]
    return Diagnostic(
        "P005",
        f"there is no configuration `{shown(name)}`",
        notes=(f"configurations here: {listed(names, last='and')}",),
        hints=did_you_mean(name, names) or ("`ttlaunch init NAME --hosts a,b:2` writes a new one",),
        blame=Blame.COMMAND_LINE,
    )
