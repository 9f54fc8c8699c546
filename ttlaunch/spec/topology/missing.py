"""What is said about a file or a key of a configuration that is not there."""

import os
from dataclasses import replace
from pathlib import Path

from ttlaunch.diagnostics.diagnostic import Diagnostic, KeyMistake
from ttlaunch.diagnostics.suggest import did_you_mean
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.places import BINDINGS_FILE, DESCRIPTOR_FILES, HOSTS_FILE


def no_hosts(folder: Path, name: str) -> Diagnostic:
    present = _names_in(folder)
    message = f"{name} does not exist; a hostfile was expected"
    hints = did_you_mean(HOSTS_FILE, present) or ("list the hosts in it, one a line: `HOST slots=1`",)
    return Diagnostic(codes.MISSING_FILE, message, hints=hints)


def no_bindings(folder: Path, name: str, *, descriptor: str) -> Diagnostic:
    present = [file for file in _names_in(folder) if file not in DESCRIPTOR_FILES]
    message = f"{name} does not exist, so {descriptor} has meshes that no rank drives"
    hints = did_you_mean(BINDINGS_FILE, present) or ("say in it which rank drives which mesh",)
    return Diagnostic(codes.MISSING_FILE, message, hints=hints)


def with_descriptor_hint(diagnostic: Diagnostic, folder: Path) -> Diagnostic:
    """To "`mesh_graph_desc_path` is missing" add which file is there, or is missing too."""
    if diagnostic.key_mistake is not KeyMistake.MISSING or not diagnostic.message.startswith("`mesh_graph_desc_path`"):
        return diagnostic
    beside = next((file for file in DESCRIPTOR_FILES if (folder / file).is_file()), None)
    if beside:
        return replace(diagnostic, hints=(f'write `mesh_graph_desc_path: "{beside}"`',))
    hint = 'describe the meshes in mgd.yaml, and write `mesh_graph_desc_path: "mgd.yaml"`'
    return replace(diagnostic, notes=("there is no mgd.yaml beside it",), hints=(hint,))


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except OSError:
        return []
