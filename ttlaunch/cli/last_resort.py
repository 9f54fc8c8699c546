"""Turn every exception of a command into one line and an exit status; users never see a traceback."""

import os
import sys
from collections.abc import Callable

from ttlaunch import contract
from ttlaunch.cli.console import print_lines


def status_of(work: Callable[[], int]) -> int:
    """Run a command and return its exit status, whatever exception it raises."""
    from ttlaunch.errors import TtlaunchError

    try:
        return work()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except KeyboardInterrupt:
        return contract.STATUS_INTERRUPTED
    except TtlaunchError as error:
        print_lines([f"error: {error}"], to=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        # The reader of the output has ended; keep Python from reporting this once more while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        print_lines([f"error: {(error.strerror or str(error)).lower()}{place}"], to=sys.stderr)
        return contract.STATUS_HOST
    except Exception as error:  # noqa: BLE001 - a bug of ours is said in one line, and kept whole for the report
        code = getattr(error, "exit_code", None)  # typer ends a command by an exception with this attribute
        if isinstance(code, int):
            return code
        print_lines([f"error: this is a bug in ttlaunch: {type(error).__name__}: {error}", _keep(error)], to=sys.stderr)
        return contract.STATUS_RANK_FAILED


def _keep(error: Exception) -> str:
    """Write the traceback of a bug to a file that can be sent along with a report."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="ttlaunch-bug-", suffix=".txt", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return f"what led to it: {file.name}"
