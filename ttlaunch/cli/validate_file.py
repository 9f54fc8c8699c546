"""`ttlaunch validate FILE`: check one file, whose kind is recognised from its content."""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics
from ttlaunch.diagnostics import (
    Diagnostic,
    Format,
    Label,
    Severity,
    Source,
    exit_status,
    has_errors,
    shown,
    usage_error,
    usage_mistake,
)
from ttlaunch.spec.topology.recognise import Kind, recognise
from ttlaunch.system_reason import system_reason

_STANDARD_INPUT = "standard input"
_HOW_TO_SAY = "choose with `--kind hosts`, `mgd`, `bindings`, `cluster`, `train` or `mapping`"


@dataclass
class _Checked:
    """The result of a check: `content` counts the parts of the file, `remarks` name the files it was checked against."""

    diagnostics: list[Diagnostic]
    kind: Kind | None = None
    content: str = ""
    remarks: list[str] = field(default_factory=list)


def names_a_file(target: str, *, kind: str | None) -> bool:
    """Whether a target is one file rather than a configuration."""
    from ttlaunch.spec.topology.discovery import find_configuration

    if target == "-" or kind is not None:
        return True
    try:
        path = Path.cwd() / Path(target).expanduser()
        there, folder = os.path.lexists(path), path.is_dir()
    except (OSError, ValueError, RuntimeError):
        return False
    if folder or (there and not isinstance(find_configuration(target, working_folder=Path.cwd()), Diagnostic)):
        return False
    return there or Path(target).suffix in {".txt", ".yaml", ".yml", ".textproto"}


def validate_file(
    target: str,
    *,
    kind: str | None,
    recipe: str | None,
    overrides: Sequence[str],
    unused: Sequence[str],
    form: Format,
    verbose: bool,
) -> None:
    """Check one file, print its kind and its mistakes, and exit.

    Args:
        target: The path of the file; `-` for standard input.
        kind: The value of `--kind`; None to recognise the kind from the file's text.
        recipe: The recipe against which a training file is checked.
        overrides: The values of `--set`, which change a training file.
        unused: Options on the command line that have no meaning for a single file.
        form: The form of the output.
        verbose: Whether to show notes too.
    """
    known = Kind(kind) if kind in set(Kind) else None
    if kind is not None and known is None:
        raise usage_error(f"`--kind {shown(kind)}` is no kind of file", _HOW_TO_SAY)
    if unused:
        words = " and ".join(f"`{word}`" for word in unused) + (" goes" if len(unused) == 1 else " go")
        message = f"{words} with a configuration; {_name(target)} is a single file"
        raise usage_error(message)
    checked = _check(target, known, recipe=recipe, overrides=overrides)
    name = _name(target)
    valid = not has_errors(checked.diagnostics)
    show_diagnostics(checked.diagnostics, form=form, verbose=verbose)
    if form is Format.JSON:
        found = [diagnostic.as_json() for diagnostic in checked.diagnostics]
        print_json({"valid": valid, "kind": checked.kind, "diagnostics": found}, schema="validate")
    elif valid and checked.kind:
        content = f": {checked.content}" if checked.content else ""
        print_lines([f"{name} is consistent as {checked.kind.what}{content}"])
        print_lines(checked.remarks)
    exit_with(exit_status(checked.diagnostics))


def _name(target: str) -> str:
    return _STANDARD_INPUT if target == "-" else shown(target, longest=300)


def _check(target: str, kind: Kind | None, *, recipe: str | None, overrides: Sequence[str]) -> _Checked:
    from ttlaunch.spec.located.codes import CONFIGURATION, TOPOLOGY
    from ttlaunch.spec.located.source import source_from_bytes

    path = Path.cwd() / (_STANDARD_INPUT if target == "-" else Path(target).expanduser())
    data = _read(target, path)
    if isinstance(data, Diagnostic):
        return _Checked([data])
    name = _name(target)
    codes = CONFIGURATION if kind is Kind.TRAIN else TOPOLOGY
    what = kind.what if kind else "a file of a cluster or a training file"
    source, found = source_from_bytes(data, codes=codes, what=what, name=name)
    if source is None:
        return _Checked(found, kind)
    kind, doubt = _kind(source, kind)
    if kind is None:
        return _Checked([*found, *doubt])
    if (recipe is not None or overrides) and kind is not Kind.TRAIN:
        word = "`--set`" if recipe is None else "`--recipe`"
        message = f"{word} goes with a training file or a whole configuration; {name} was read as {kind.what}"
        return _Checked([*doubt, usage_mistake(message, _HOW_TO_SAY)], kind)
    checked = _check_training(data, name, recipe=recipe, overrides=overrides) if kind is Kind.TRAIN else None
    checked = checked or _check_topology(source, kind, path)
    checked.diagnostics[:0] = [*(() if kind is Kind.TRAIN else found), *doubt]
    return checked


def _read(target: str, path: Path) -> bytes | Diagnostic:
    from ttlaunch.diagnostics import did_you_mean
    from ttlaunch.spec.located.source import LARGEST_FILE_MIB, ends_by_itself

    largest_file = LARGEST_FILE_MIB * 1024 * 1024
    try:
        if target != "-" and path.exists() and not path.is_dir() and not ends_by_itself(path):
            return usage_mistake(f"{shown(target, longest=300)} is not a regular file", code="P005")
        with contextlib.nullcontext(sys.stdin.buffer) if target == "-" else path.open("rb") as file:
            data = file.read(largest_file + 1)
        message = f"{_name(target)} is larger than {LARGEST_FILE_MIB} MiB, which none of these files ever is"
        return data if len(data) <= largest_file else Diagnostic("T003", message)
    except FileNotFoundError:
        folder = path.parent
        beside = sorted({*os.listdir(folder)} - {path.name}) if folder.is_dir() else []  # noqa: PTH208 - names, not paths
        return usage_mistake(
            f"{shown(target, longest=300)} does not exist", *did_you_mean(path.name, beside), code="P005"
        )
    except OSError as error:
        return usage_mistake(f"{shown(target, longest=300)} cannot be read: {system_reason(error)}", code="P005")


def _kind(source: "Source", given: Kind | None) -> tuple[Kind | None, list[Diagnostic]]:
    """Return the file's kind, and a diagnostic if the kind is in doubt."""
    if given is not None:
        return given, []
    seen = recognise(source)
    if seen.kind is None:
        message = f"{source.name} is none of the files that ttlaunch knows"
        return None, [Diagnostic("P014", message, Label(source.start()), hints=(_HOW_TO_SAY,))]
    if seen.others:
        could = " or ".join(kind.what for kind in seen.others)
        message = f"{source.name} was read as {seen.kind.what}, but could be {could}"
        severity = Severity.WARNING
        return seen.kind, [Diagnostic("P014", message, Label(source.start()), hints=(_HOW_TO_SAY,), severity=severity)]
    return seen.kind, []


def _check_topology(source: "Source", kind: Kind, path: Path) -> _Checked:
    from ttlaunch.spec.topology.single import check_file

    checked = check_file(source, kind, path, environment=os.environ, working_folder=Path.cwd())
    remarks = [f"descriptor found: {checked.descriptor_found}"] if checked.descriptor_found else []
    return _Checked(checked.diagnostics, kind, checked.content, remarks)


def _check_training(data: bytes, name: str, *, recipe: str | None, overrides: Sequence[str]) -> _Checked:
    from ttlaunch.app.check_data import check_data
    from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe
    from ttlaunch.spec.recipe.shared import check_training_file

    declared = None
    if recipe is not None:
        found = find_recipe(recipe, working_folder=Path.cwd())
        declaration = found if isinstance(found, Diagnostic) else load_recipe(found)
        if isinstance(declaration, Diagnostic):
            return _Checked([declaration], Kind.TRAIN)
        declared = declaration
    loaded, diagnostics = check_training_file(data, name=name, recipe=declared, overrides=overrides)
    if loaded.config is not None and declared is not None and declared.uses_data:
        _, mistake = check_data(loaded, Path.cwd())
        diagnostics += [mistake] if mistake else []
    remark = f"checked against {recipe}" if declared else "checked against the sections that recipes share; "
    remark += "" if declared else "`--recipe NAME` checks it against one"
    return _Checked(diagnostics, Kind.TRAIN, "", [remark])
