"""Check that every host has the program that its ranks run: copied with the project, or installed on the host."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.resolve import SCRIPT_PREFIX
from ttlaunch.diagnostics import Diagnostic, listed, shown, usage_mistake
from ttlaunch.hosts.sync.release import Release
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.transport import Completed, Transport, run
from ttlaunch.planning.launch_plan import CommandProgram

_LOOK_S = 5.0
_LONGEST = 300


def check_program(
    program: CommandProgram,
    transports: Sequence[Transport],
    *,
    release: Release,
    working_folder: Path,
    programs: Mapping[str, str],
) -> list[Diagnostic]:
    """Report hosts that lack the program; empty if every host has it.

    Args:
        program: The program that ranks run.
        transports: The hosts.
        release: The files that are copied to the hosts.
        working_folder: The folder in which the command was typed.
        programs: By host, the folder of the ranks' interpreter, in which programs are looked for first.
    """
    is_script, name = _script_of(program.command)
    if "/" not in name:
        return _missing(name, transports, test=f"command -v {shlex.quote(name)}", programs=programs)
    path = Path(os.path.normpath(working_folder / name))
    # A link is copied as a link, so the file to which it leads has to be there too.
    end = Path(os.path.realpath(path))
    is_inside = path.is_relative_to(release.project)
    if is_inside and not _is_copied(path, release):
        return [_left_out(path)]
    if is_inside and end.is_relative_to(release.project):
        return [] if _is_copied(end, release) else [_left_out(end)]
    if is_inside:
        name, path = str(end), end
    flag = "-r" if is_script else "-x"
    found = _missing(
        name, transports, test=f"[ -f {shlex.quote(name)} ] && [ {flag} {shlex.quote(name)} ]", programs={}
    )
    return [_outside(path, release)] if found and path.exists() else found


def _script_of(command: Sequence[str]) -> tuple[bool, str]:
    """Return whether the ranks' interpreter runs a script, and the script, or else the program itself."""
    if command[1:3] == SCRIPT_PREFIX:
        return True, command[3]
    is_script = command[0] == sys.executable and os.path.isabs("".join(command[1:2]))  # noqa: PTH117 - it is a text
    return is_script, command[1 if is_script else 0]


def _is_copied(path: Path, release: Release) -> bool:
    name = os.fsencode(f"{contract.PROJECT_DIR}/{path.relative_to(release.project)}")
    return any(entry.path == name for entry in release.manifest.entries)


def _left_out(path: Path) -> Diagnostic:
    if not path.exists():
        return usage_mistake(f"there is no program `{shown(path, longest=_LONGEST)}` to run")
    return Diagnostic(
        "P016",
        f"{shown(path, longest=_LONGEST)} is not copied to hosts",
        notes=("`.gitignore`, `.ttlaunchignore` or the rule about secrets leaves it out",),
        hints=("`ttlaunch sync --dry-run` lists what is copied; a line `!NAME` in .ttlaunchignore includes a file",),
    )


def _outside(path: Path, release: Release) -> Diagnostic:
    return Diagnostic(
        "P016",
        f"{shown(path, longest=_LONGEST)} is not copied to hosts",
        notes=(f"it lies outside the project {shown(release.project, longest=_LONGEST)}",),
        hints=("start from the folder that holds it, or copy it into the project",),
    )


def _missing(name: str, transports: Sequence[Transport], *, test: str, programs: Mapping[str, str]) -> list[Diagnostic]:
    def look(transport: Transport) -> Completed:
        first = programs.get(transport.host)
        path = f"PATH={shlex.quote(first)}:$PATH; " if first else ""
        return run(transport, f"{path}{test}", timeout_s=_LOOK_S)

    answers = {transport.host: answer for transport, answer in on_each(transports, look, timeout_s=2 * _LOOK_S)}
    lacking = [
        transport.host
        for transport in transports
        if isinstance(answer := answers[transport.host], Completed) and answer.status != 0
    ]
    if not lacking:
        return []
    return [usage_mistake(f"there is no program `{shown(name, longest=_LONGEST)}` on {listed(lacking, last='and')}")]
