"""Print results to stdout and messages to stderr, in the format that was asked for, and leave with the right status."""

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic, Format, Severity, has_errors, render, shown

_COMMAND_LINE_CODES = {
    "C017",
    "P001",
    "P004",
    "P005",
    "P009",
    "P015",
    "P030",
    "P032",
    "P035",
    "P036",
    "P037",
    "P038",
    "P039",
    "P040",
    "P041",
    "P042",
    "P043",
    "P046",
    "P047",
}
_LONGEST_PATH = 300


def show_diagnostics(diagnostics: Iterable[Diagnostic], *, form: Format, verbose: bool = False) -> None:
    """Write diagnostics to stderr; notes only with `verbose`. JSON goes to stdout with the command's result."""
    kept = [d for d in diagnostics if verbose or d.severity is not Severity.NOTE]
    if form is not Format.JSON and kept:
        separator = "\n" if form in {Format.CONCISE, Format.GITHUB} else "\n\n"
        sys.stderr.write(render(kept, form=form, colour=use_colour(sys.stderr)) + separator)
        sys.stderr.flush()


def stop_on_errors(diagnostics: list[Diagnostic], *, form: Format, verbose: bool = False) -> None:
    """Show the diagnostics, and leave if one of them is an error."""
    if has_errors(diagnostics):
        refuse(diagnostics, form=form, verbose=verbose)
    show_diagnostics(diagnostics, form=form, verbose=verbose)


def refuse(diagnostics: list[Diagnostic], *, form: Format, verbose: bool = False) -> NoReturn:
    """Show why nothing was started, and leave."""
    show_diagnostics(diagnostics, form=form, verbose=verbose)
    if form is Format.JSON:
        print_json({"diagnostics": [d.as_json() for d in diagnostics]})
    leave(exit_status(diagnostics))


def refuse_file(path: Path | str, error: OSError, *, verb: str = "written", form: Format) -> NoReturn:
    """Say why a file or folder that the user named cannot be written, or read, and leave.

    Args:
        path: As it was typed.
        error: Its own path may be another, of which the user knows nothing.
        verb: What was to be done with it.
    """
    reason = (error.strerror or str(error)).lower()
    refuse([Diagnostic("P032", f"{shown(path, longest=_LONGEST_PATH)} cannot be {verb}: {reason}")], form=form)


def exit_status(diagnostics: Iterable[Diagnostic]) -> int:
    """0 without errors; 4 if hosts are at fault, 5 if only copying to them is, 2 if only the command line is, else 3."""
    codes = {d.code for d in diagnostics if d.severity is Severity.ERROR}
    if not codes:
        return contract.STATUS_DONE
    if all(code.startswith(("H", "S")) for code in codes):
        return contract.STATUS_HOST if any(code.startswith("H") for code in codes) else contract.STATUS_SYNC
    if codes <= _COMMAND_LINE_CODES:
        return contract.STATUS_USAGE
    return contract.STATUS_DESCRIPTION


@contextmanager
def needs_no_reader(stream: TextIO) -> Iterator[None]:
    """Write to a stream that may take no more (`| head`, a full disk): what is written then vanishes, here and later.

    Raises:
        OSError: The terminal is gone.
    """
    try:
        yield
        stream.flush()
    except OSError as error:
        if error.errno == errno.EIO:
            raise
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())  # a later flush, of what is still in the buffer, must not fail again
        os.close(nothing)
        if error.errno != errno.EPIPE and stream is not sys.stderr:
            reason = (error.strerror or str(error)).lower()
            sys.stderr.write(f"stdout cannot be written: {reason}; the run goes on, and its folder keeps all\n")


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def leave(status: int) -> NoReturn:
    """End the command with an exit status."""
    import typer

    raise typer.Exit(status)


def use_colour(stream: Any) -> bool:
    """Whether a stream wants colour: a terminal, and `NO_COLOR` not set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
