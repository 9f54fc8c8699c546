"""Print results to stdout and messages to stderr, in the format that was asked for, and leave with the right status."""

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
    """Write diagnostics to stderr; notes only with `verbose`. JSON goes to stdout with the command's result."""
    kept = [d for d in diagnostics if verbose or d.severity is not Severity.NOTE]
    if form is not Format.JSON and kept:
        separator = "\n" if form in {Format.CONCISE, Format.GITHUB} else "\n\n"
        sys.stderr.write(render(kept, form=form, colour=use_colour(sys.stderr)) + separator)
        sys.stderr.flush()


@contextmanager
def refusing(*, form: Format, verbose: bool = False) -> Iterator[None]:
    """Show the diagnostics of a `LaunchError` that is raised in this context, and exit."""
    try:
        yield
    except LaunchError as error:
        if not error.was_shown:
            show_diagnostics(error.diagnostics, form=form, verbose=verbose)
            if form is Format.JSON:
                print_json({"diagnostics": [d.as_json() for d in error.diagnostics]})
        leave(error.exit_status)


def shows_refusals(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it shows a `LaunchError` in the format that was asked for and leaves with its status."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        with refusing(form=options.get("form", Format.FULL), verbose=options.get("verbose", False)):
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
    """Refuse to overwrite a file without `--force`."""
    return usage_error(f"{shown(path)} exists already", "`--force` overwrites it")


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
            sys.stderr.write(
                f"stdout cannot be written: {reason}; the run continues, and its folder keeps all output\n"
            )


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout before anything that follows on stderr."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def leave(status: int) -> NoReturn:
    """End the command with an exit status."""
    import typer

    raise typer.Exit(status)


def use_colour(stream: Any) -> bool:
    """Whether a stream wants colour: a terminal, and `NO_COLOR` not set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
