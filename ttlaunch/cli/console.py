"""Print results to stdout and messages to stderr, in the format that was asked for, and exit with the right status."""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, Severity, file_error, render, shown, usage_error


def show_diagnostics(diagnostics: Iterable[Diagnostic], *, form: Format, verbose: bool = False) -> None:
    """Write diagnostics to stderr, notes only with `verbose`; none with JSON, where the command's result contains them."""
    kept = [d for d in diagnostics if verbose or d.severity is not Severity.NOTE]
    if form is not Format.JSON and kept:
        separator = "\n" if form in {Format.CONCISE, Format.GITHUB} else "\n\n"
        sys.stderr.write(render(kept, form=form, colour=use_colour(sys.stderr)) + separator)
        sys.stderr.flush()


@contextmanager
def reporting_errors(*, form: Format, verbose: bool = False) -> Iterator[None]:
    """Show the diagnostics of a `LaunchError` that is raised in this context, and exit."""
    try:
        yield
    except LaunchError as error:
        if not error.was_shown:
            show_diagnostics(error.diagnostics, form=form, verbose=verbose)
            if form is Format.JSON:
                print_json({"diagnostics": [d.as_json() for d in error.diagnostics]})
        exit_with(error.exit_status)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it shows a `LaunchError` in the format that was asked for and exits with its status."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        with reporting_errors(form=options.get("form", Format.FULL), verbose=options.get("verbose", False)):
            command(*arguments, **options)

    return run


def write_file(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file that the user named.

    Raises:
        LaunchError: It exists and `force` is not set, or it cannot be written.
    """
    try:
        with path.open("wb" if force else "xb") as file:
            file.write(content)
    except FileExistsError as error:
        raise file_exists(path) from error
    except OSError as error:
        raise file_error(path, error) from error


def file_exists(path: Path) -> LaunchError:
    """Return the error for a file that only `--force` overwrites."""
    return usage_error(f"{shown(path)} already exists", "`--force` overwrites it")


@contextmanager
def discarding_unwritable(stream: TextIO) -> Iterator[None]:
    """Discard output, now and later, once a stream cannot be written: `| head` has ended, or the disk is full.

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
            sys.stderr.write(
                f"stdout cannot be written: {reason}; the run continues, and its folder keeps all output\n"
            )


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout and flush, so that they come before later output on stderr."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def exit_with(status: int) -> NoReturn:
    """End the command with an exit status."""
    import typer

    raise typer.Exit(status)


def use_colour(stream: Any) -> bool:
    """Return whether to colour a stream: it is a terminal that is not dumb, and `NO_COLOR` is not set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
