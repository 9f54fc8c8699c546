"""What can go wrong in the world, as one tree of exceptions; mistakes in files are diagnostics, not exceptions."""

from ttlaunch import contract


class TtlaunchError(Exception):
    """Anything ttlaunch can say about a failure that is not a bug of its own.

    Attributes:
        exit_status: What the command exits with when nobody handles the error.
    """

    exit_status = contract.STATUS_RANK_FAILED


class HostNotReadyError(TtlaunchError):
    """A host lacks something the run needs; nothing was started."""

    exit_status = contract.STATUS_HOST


class RunFolderError(HostNotReadyError):
    """The run folder cannot be made or written on the launching machine."""
