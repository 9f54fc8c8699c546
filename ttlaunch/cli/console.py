"""Print results to stdout and messages to stderr, in the format that was asked for, and exit with the right status."""

import errno
import json
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO

from ttlaunch.app.signals import handled, handled_as_usual
from ttlaunch.contract import STATUS_USAGE
from ttlaunch.diagnostics import (
    Diagnostic,
    Format,
    LaunchError,
    Severity,
    file_error,
    render,
    shown,
    usage_error,
    usage_mistake,
)
from ttlaunch.diagnostics.terminal_text import clean, clean_output
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from rich.console import Console


STANDARD_OUTPUT = "standard output"
"""What is named as the file where stdout cannot be written."""

JSON_SCHEMAS = {
    "advise": 1,
    "bisect": 1,
    "chaos": 1,
    "compare": 1,
    "configs": 1,
    "convert": 1,
    "data": 1,
    "detached": 1,
    "diagnostics": 1,
    "diff": 1,
    "doctor": 1,
    "explain": 1,
    "export": 1,
    "hosts": 1,
    "init": 1,
    "join": 1,
    "log-line": 1,
    "losses": 1,
    "metric-event": 1,
    "grafana-export": 1,
    "metrics-export": 1,
    "parity": 1,
    "place": 2,
    "plan": 1,
    "prepare": 1,
    "ps": 1,
    "recipe": 1,
    "recipes": 1,
    "replay": 1,
    "report": 1,
    "run": 1,
    "runs-clean": 1,
    "show": 1,
    "simulate": 1,
    "simulate-virtual": 1,
    "simulate-virtual-elastic": 1,
    "simulate-what-if": 1,
    "stop": 1,
    "submit": 1,
    "sync": 1,
    "validate": 1,
    "verify": 1,
    "verify-checkpoint": 1,
    "weights": 1,
    "generate": 1,
    "weights-diff": 1,
    "weights-export": 1,
    "weights-import": 1,
    "weights-stats": 1,
    "workers": 1,
}
"""The version of each object that `--format json` prints. It is raised when a key is removed or changes its meaning or its
type, not when a key is added."""


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
                print_json({"diagnostics": [d.as_json() for d in error.diagnostics]}, schema="diagnostics")
        exit_with(error.exit_status)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it shows a `LaunchError` in the format that was asked for and exits with its status."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        with reporting_errors(form=options.get("form", Format.FULL), verbose=options.get("verbose", False)):
            command(*arguments, **options)

    return run


def write_file(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file that the user named; where that fails, what was there stays, and no part of the new one.

    Raises:
        LaunchError: It exists and `force` is not set, or it cannot be written.
    """
    unfinished = (
        path if not force or (path.exists() and not path.is_file()) else path.with_name(f".{path.name}.unfinished")
    )
    try:
        file = open(unfinished, "wb" if force else "xb", opener=_open_at_once)  # noqa: SIM115 - closed below
    except FileExistsError as error:
        raise file_exists(path) from error
    except OSError as error:
        raise file_error(path, error) from error
    try:
        with file:
            file.write(content)
        unfinished.replace(path)
    except OSError as error:
        if unfinished.is_file():  # and no device
            unfinished.unlink()
        raise file_error(path, error) from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a named pipe that nobody reads is an error, for which others would wait without end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def file_exists(path: Path) -> LaunchError:
    """Return the error for a file that only `--force` overwrites, or for a folder, which nothing does."""
    if path.is_dir():
        return usage_error(f"{shown(path)} is a folder", "name a file")
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
        os.dup2(nothing, stream.fileno())  # a later flush of the buffer must not fail again
        os.close(nothing)
        if error.errno != errno.EPIPE and stream is not sys.stderr:
            reason = system_reason(error)
            text = f"stdout cannot be written: {reason}; the run continues, and its folder keeps all output"
            print_lines([text], to=sys.stderr)


def check_picture(path: Path) -> None:
    """Refuse a name that promises another kind of picture than SVG, before the work that the picture shows.

    Raises:
        LaunchError: It does.
    """
    if path.suffix.lower() in _NO_SVG:
        raise LaunchError(
            [
                usage_mistake(
                    f"`--out {shown(path)}`: pictures are SVG, not {path.suffix[1:].upper()}", "end it in `.svg`"
                )
            ],
            status=STATUS_USAGE,
        )


def write_picture(path: Path, svg: str) -> None:
    """Write a picture that a user has named.

    Raises:
        LaunchError: The name promises another kind of picture than SVG, or the file cannot be written.
    """
    check_picture(path)
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise file_error(path, error) from error


def print_json(content: Mapping[str, Any], *, schema: str) -> None:
    """Print an object to stdout, with the name and version of its schema, which is a key of `JSON_SCHEMAS`."""
    with _naming(sys.stdout):
        sys.stdout.write(json.dumps(with_schema(content, schema), indent=2) + "\n")


def with_schema(content: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Return an object of JSON with the name and version of its schema before its other keys."""
    return {"schema": f"ttlaunch.{schema}/{JSON_SCHEMAS[schema]}", **content}


def print_lines(lines: Iterable[str], *, to: TextIO | None = None) -> None:
    """Write lines and flush, so that they appear before later output on the other stream.

    Control characters are made visible, also those that would begin another line; only tabs are written unchanged.

    Args:
        lines: The lines, without line breaks.
        to: The stream; None for stdout.
    """
    stream = to or sys.stdout
    with _naming(stream):
        stream.writelines("\t".join(map(clean, line.split("\t"))) + "\n" for line in lines)
        stream.flush()


@contextmanager
def _naming(stream: TextIO) -> Iterator[None]:
    """Name standard output in an error that would not say which file cannot be written."""
    try:
        yield
    except OSError as error:
        if stream is sys.stdout:
            error.filename = STANDARD_OUTPUT
        raise


def print_piece(text: str) -> None:
    """Write a piece of a text to stdout and flush; control characters but line breaks are made visible."""
    with _naming(sys.stdout):
        sys.stdout.write("\n".join(map(clean, text.split("\n"))))
        sys.stdout.flush()


def print_text(text: str) -> None:
    """Write a text of several lines to stdout, such as a file; control characters are made visible."""
    print_lines(text.removesuffix("\n").split("\n"))


def tabbed(values: Iterable[object]) -> str:
    """Join values to a line with a tab between them; a tab within a value is made visible, so that it separates nothing."""
    return "\t".join("" if value is None else clean(str(value)) for value in values)


def print_progress(text: str) -> None:
    """Replace the text on the last line of the terminal; do nothing if stderr shows no pictures that change."""
    if can_redraw(sys.stderr):
        width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        sys.stderr.write("\r" + clean(text)[:width].ljust(min(width, 40)) + "\r")
        sys.stderr.flush()


def print_output(lines: Iterable[bytes], *, to: TextIO, raw: bool = False) -> None:
    """Write lines that ranks printed: byte for byte to a file or a pipe, and without control sequences to a terminal.

    Args:
        lines: The lines, without line breaks.
        to: The stream.
        raw: Whether to write the lines byte for byte to a terminal too.
    """
    if to.isatty() and not raw:
        colour = use_colour(to)
        lines = (clean_output(line, colour=colour) for line in lines)
    with _naming(to):
        to.buffer.writelines(line + b"\n" for line in lines)
        to.flush()


def rich_console(stream: TextIO) -> "Console":
    """Return a console that draws tables and bars on a stream, and removes control sequences from their texts.

    Text in square brackets is not interpreted: rich would read it as colours and links.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class CleanConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text = segment.text
                yield segment if segment.control else segment._replace(text="\n".join(map(clean, text.split("\n"))))

    # Without a colour system rich writes no bold or underlined text either; `no_color` alone would leave these.
    system: Literal["auto"] | None = "auto" if use_colour(stream) else None
    return CleanConsole(file=stream, highlight=False, markup=False, emoji=False, color_system=system)


def exit_with(status: int) -> NoReturn:
    """End the command with an exit status."""
    import typer

    raise typer.Exit(status)


def use_colour(stream: Any) -> bool:
    """Return whether to colour a stream: it is a terminal that is not dumb, and `NO_COLOR` is not set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_redraw(stream: Any) -> bool:
    """Return whether pictures that change can be drawn on a stream, in place of lines that follow each other.

    Neither a dumb terminal nor the log of a CI system, which sets `CI`, can replace what it has shown.
    """
    is_ci = os.environ.get("CI", "").lower() not in {"", "0", "false"}
    return bool(stream.isatty()) and not is_ci and os.environ.get("TERM") not in {"dumb", "unknown"}


@contextmanager
def keeping_whole(stream: TextIO) -> Iterator[None]:
    """Keep what is typed from tearing a picture that is redrawn on a terminal, and give the terminal back while Ctrl-Z stops this process.

    Typed characters would move the cursor, so the terminal does not echo them. At Ctrl-C it would drop output that it has not
    shown yet, such as the rest of a redraw; it keeps this output instead.
    """
    try:
        before = termios.tcgetattr(stream)
        during = [*before]
        during[_LOCAL_MODES] = before[_LOCAL_MODES] & ~termios.ECHO | termios.NOFLSH
        _set_modes(stream, during)
    except (termios.error, OSError):  # no terminal, or not this process's own
        yield
        return

    def pause(number: int) -> None:
        with suppress(termios.error, OSError):
            _set_modes(stream, before, cursor=_SHOW_CURSOR)
        with handled_as_usual(number):
            os.kill(os.getpid(), number)  # this process stops here until the shell resumes it
        with suppress(termios.error, OSError):
            _set_modes(stream, during, cursor=_HIDE_CURSOR)

    try:
        with handled({signal.SIGTSTP: pause}):
            yield
    finally:
        with suppress(termios.error, OSError):
            _set_modes(stream, before)


_NO_SVG = frozenset({".png", ".pdf", ".jpg", ".jpeg", ".gif", ".webp"})
_LOCAL_MODES = 3
"""The index of the local modes in what `tcgetattr` returns."""
_SHOW_CURSOR, _HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"


def _set_modes(stream: TextIO, modes: list[Any], *, cursor: bytes = b"") -> None:
    """Set a terminal's modes and its cursor, unless this process is in the background, where the attempt would stop it."""
    if os.tcgetpgrp(stream.fileno()) == os.getpgrp():
        termios.tcsetattr(stream, termios.TCSANOW, modes)
        os.write(stream.fileno(), cursor)  # not through the stream, which may be in the middle of a write
