"""Find configurations: in the current folder's `configurations/` first, then built in, or by path."""

from pathlib import Path

from ttlaunch.diagnostics.diagnostic import Diagnostic
from ttlaunch.spec.named_folders import FolderKind, NamedFolder, find_folder, list_folders
from ttlaunch.spec.topology.places import HOSTS_FILE

_HINT = "`ttlaunch init NAME --hosts a,b:2` writes a new one"
_KIND = FolderKind(noun="configuration", code="P005", marker=HOSTS_FILE, hint=_HINT)


def list_configurations(working_folder: Path) -> list[NamedFolder]:
    """List all configurations that a name can mean, one per name: those of the current folder hide built-in ones."""
    return list_folders(_KIND, working_folder)


def find_configuration(name: str, *, working_folder: Path) -> NamedFolder | Diagnostic:
    """Return the configuration that the user means by a name or a path of a folder."""
    found = find_folder(name, _KIND, working_folder=working_folder)
    own = working_folder / "configurations" / name
    # A folder there without a hostfile is accepted too: reading it reports the missing file. `is_dir` raises the system's
    # error for a name that is not possible, such as one that is too long.
    if isinstance(found, Diagnostic) and name and own.is_dir():
        return NamedFolder(name, own, built_in=False)
    return found
