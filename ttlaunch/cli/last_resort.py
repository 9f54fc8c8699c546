"""Turn every exception of a command into one line and an exit status; users never see a traceback."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

from ttlaunch import contract
from ttlaunch.cli.console import STANDARD_OUTPUT, print_lines, show_diagnostics
from ttlaunch.diagnostics import Format, LaunchError, file_error, usage_error
from ttlaunch.errors import TtlaunchError
from ttlaunch.system_reason import system_reason


class OutputError(Exception):
    """What a command prints could not be written; the cause is the `OSError`."""


def status_of(work: Callable[[], int]) -> int:
    """Run a command and return its exit status, whatever exception it raises, also while the rest of its output is written."""
    try:
        status = _status_of(work)
        sys.stdout.flush()
    except OSError as error:
        return _without_output(error)
    return status


def _status_of(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except KeyboardInterrupt:
        return contract.STATUS_INTERRUPTED
    except OutputError as error:
        return _without_output(error.__cause__)
    except TtlaunchError as error:
        print_lines([f"error: {error}"], to=sys.stderr)
        return error.exit_status
    except OSError as error:
        if _has_lost_folder():
            return _say(usage_error("the current folder is not there any more", "`cd` to one that is"))
        place = f": {error.filename}" if error.filename else ""
        print_lines([f"error: {system_reason(error)}{place}"], to=sys.stderr)
        return contract.STATUS_HOST
    except Exception as error:  # noqa: BLE001 - a bug of ours is said in one line, and kept whole for the report
        code = getattr(error, "exit_code", None)  # typer ends a command by an exception with this attribute
        if isinstance(code, int):
            return code
        print_lines([f"error: this is a bug in ttlaunch: {type(error).__name__}: {error}", _keep(error)], to=sys.stderr)
        return contract.STATUS_RANK_FAILED


def _has_lost_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - imports nothing
    except OSError:
        return True
    return False


def telling_output_apart(act: Callable[[], Any], *, only_prints: bool = False) -> Any:
    """Return what a command returns; typer and rich would end it with status 1, as that of a difference, when a pipe is closed.

    Raises:
        OutputError: What it prints could not be written.
    """
    try:
        return act()
    except OSError as error:
        if error.errno == errno.EPIPE or error.filename == STANDARD_OUTPUT or (only_prints and error.filename is None):
            raise OutputError from error
        raise
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):
            raise OutputError from left.__context__
        raise


def _without_output(error: BaseException | None) -> int:
    """Say why output was lost, unless its reader has ended, and keep Python from failing once more while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, OSError) or error.errno == errno.EPIPE:
        return contract.STATUS_CLOSED_PIPE
    return _say(file_error(STANDARD_OUTPUT, error))


def _say(error: LaunchError) -> int:
    show_diagnostics(error.diagnostics, form=Format.FULL)
    return error.exit_status


def _keep(error: Exception) -> str:
    """Write the traceback of a bug to a file that can be sent along with a report."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="ttlaunch-bug-", suffix=".txt", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return f"what led to it: {file.name}"
