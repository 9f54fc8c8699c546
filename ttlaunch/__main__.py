"""`ttlaunch`, and `python -m ttlaunch`: Ctrl-C is understood from here on, before the command line has been imported."""

import gc
import signal
import sys

_OBJECTS = 100_000
"""New objects before Python looks for cycles: with its usual 700 an eighth of a short command is spent on looking."""


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, _leave)
    gc.set_threshold(_OBJECTS)
    from ttlaunch.cli.main import main as command_line  # noqa: PLC0415 - takes longer than a quick Ctrl-C

    command_line()


def _leave(_number: int, _frame: object) -> None:
    sys.stderr.write("\ninterrupted\n")
    sys.exit(130)


if __name__ == "__main__":
    main()
