"""Exceptions for what can go wrong outside of the program; mistakes in files are diagnostics, not exceptions."""

from enum import StrEnum

from ttlaunch import contract


class TtlaunchError(Exception):
    """A failure that is no bug of ttlaunch; the base of its exceptions.

    Attributes:
        exit_status: What the command exits with when nobody handles the error.
    """

    exit_status = contract.STATUS_RANK_FAILED


class HostNotReadyError(TtlaunchError):
    """A host lacks something the run needs; nothing was started."""

    exit_status = contract.STATUS_HOST


class RunFolderError(HostNotReadyError):
    """The run folder cannot be made or written on the launching machine."""


class Trouble(StrEnum):
    """Why a host cannot be used, in the order in which a connection meets the reasons."""

    UNKNOWN_NAME = "unknown name"  # no address is known for its name
    UNREACHABLE = "unreachable"  # refused, no route, or no answer at all
    SILENT = "silent"  # it accepts the connection and never speaks SSH
    UNKNOWN_KEY = "unknown host key"
    CHANGED_KEY = "changed host key"
    LOGIN = "login refused"
    SETTINGS = "settings"  # the ssh configuration or a key file on the launching machine cannot be used
    STEP = "no step"  # a host of a Slurm job starts no step
    ENDED = "job ended"  # the Slurm job that the host belongs to has ended, and with it all that ran there
    STOPPED = "stopped"  # a signal has stopped the agent of a run there
    LOST = "connection lost"  # it broke after the login
    TIMED_OUT = "timed out"  # a command did not end within its deadline
    NO_PYTHON = "no Python"  # nothing there can run our scripts
    DISK = "disk"  # its disk is full or cannot be written
    VERSION = "another version"  # an agent and this launcher do not understand each other
    SCRIPT = "script failed"  # one of our scripts failed, or something else answered in its place


class HostError(HostNotReadyError):
    """A host could not be reached or used.

    Attributes:
        host: Its name as in the hostfile.
        trouble: Why it cannot be used.
        evidence: One clause with the wrong value in it, such as `connection refused on port 22`.
        notes: Further facts, a line each.
        hints: What to type or change, a line each.
    """

    def __init__(
        self,
        host: str,
        trouble: Trouble,
        evidence: str,
        *,
        notes: tuple[str, ...] = (),
        hints: tuple[str, ...] = (),
    ) -> None:
        super().__init__(f"{host}: {evidence}")
        self.host = host
        self.trouble = trouble
        self.evidence = evidence
        self.notes = notes
        self.hints = hints


class SyncError(HostError):
    """A host could be reached, but the code could not be stored there; the code that it had before is untouched.

    Attributes:
        code: The diagnostic's code, `S…`.
    """

    exit_status = contract.STATUS_SYNC

    def __init__(
        self, host: str, *, code: str, evidence: str, notes: tuple[str, ...] = (), hints: tuple[str, ...] = ()
    ) -> None:
        super().__init__(host, Trouble.SCRIPT, evidence, notes=notes, hints=hints)
        self.code = code
