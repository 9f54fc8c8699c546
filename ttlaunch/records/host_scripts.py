"""The answers of the scripts that run on hosts before and after a run.

They report whether hosts reach each other, the progress of code and environments, and what remains of a run.

The facts that a probe finds are in `hosts/doctor/facts.py`, which is checked by the same parser. Python 3.9 and the standard
library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Amount, Count, FilePath, Flag, Json, Pid, Seconds, Size, Text, Time, Word, record

_NO_NAMES: tuple[str, ...] = ()

# Of `agent/probe.py`


@record
class HostClock:
    """The host's time, sent before the script examines anything."""

    time: Time


@record
class HostAnswer:
    """Everything that the script found; `facts.py` checks the facts themselves."""

    facts: dict[str, Json]


# Of `agent/pairs.py`


@record
class Listening:
    """The port on which the script waits for others, or why there is none."""

    port: Count | None
    problem: Text | None


@record
class Reached:
    """The attempts to connect to other hosts: for each its name, seconds until it accepted, or the problem."""

    results: tuple[tuple[Word, Seconds | None, Text | None], ...]


@record
class Measured:
    """Latency and bandwidth of the network to one other host."""

    latency_s: Seconds | None = None
    bytes_per_s: Amount | None = None
    problem: Text | None = None


# Of `agent/receive.py`


@record
class SyncMessage:
    """A message of the host; `want` asks for the contents of a number of files and bytes.

    Attributes:
        id: The id of the folder on the host; hosts that share a folder report the same id.
    """

    kind: Word
    id: Text = ""
    files: Count = 0
    bytes: Size = 0


@record
class SyncEnd:
    """The last message of a host, which has the release or, in a dry run, reports what would be done.

    Attributes:
        folder: The remote folder, absolute.
        there: Whether the host already had the whole release, undamaged.
        files, bytes: How many files and bytes the host lacks; only in a dry run.
        data: The absolute path of each text and checkpoint, by SHA-256.
    """

    kind: Word
    folder: FilePath
    there: Flag
    repaired: tuple[Word, ...]
    pruned: tuple[Word, ...]
    differing: tuple[Word, ...]
    files: Count = 0
    bytes: Size = 0
    data: dict[str, FilePath] | None = None


@record
class SyncRefusal:
    """Why a host cannot receive the code: `why` is the kind of reason, and the other fields belong to it."""

    why: Word
    reason: Text = ""
    path: Text = ""
    needed: Size = 0
    free: Size = 0
    names: tuple[Text, ...] = _NO_NAMES


# Of `agent/base_python.py` and `agent/install.py`


@record
class FoundPython:
    """A Python on a host; `why_not` is the reason why no environment can be built on it."""

    path: Word
    version: Word | None = None
    why_not: Text | None = None
    machine: Word = ""
    libc: Word = ""


@record
class FoundPythons:
    """The Python that is chosen, and all that were examined."""

    base: FoundPython | None
    found: tuple[FoundPython, ...]


@record
class InstallMessage:
    """The progress of an installation on the host.

    Attributes:
        holder: The process that holds the folder's lock, in a message `waiting`.
        phase, done, total: The present step, and how many of its bytes are done, in a message `progress`.
        wheels: By SHA-256, how many bytes of each incomplete wheel are present, in a message `need`.
    """

    kind: Word
    holder: Text | None = None
    phase: Word = ""
    done: Size = 0
    total: Size | None = None
    wheels: dict[str, Size] | None = None


@record
class EnvironmentAnswer:
    """The result of an installation: the environment is `ready`, `missing` (if only asked for), or `failed` at `what`.

    Attributes:
        made: Whether this installation has made the environment.
        why: Why the environment is missing.
        needed, free: Bytes or inodes of a disk that are needed, None if unknown, and that are free.
        words: Why the folder cannot be written.
        lines: The last lines that pip printed.
        problems: What does not work in the new environment.
    """

    kind: Word
    made: Flag = False
    from_index: Flag = False
    environment: Word | None = None
    python: Word | None = None
    mpi: Word | None = None
    why: Text = ""
    what: Word | None = None
    needed: Size | None = None
    free: Size = 0
    words: Text = ""
    lines: tuple[Text, ...] = _NO_NAMES
    problems: tuple[Text, ...] = _NO_NAMES


# Of `agent/leftovers.py`


@record
class LeftProcess:
    """A process that still carries the run's id."""

    pid: Pid
    name: Text


@record
class LeftOver:
    """What is left of a run on a host; `clean_after_s` is the time until nothing was left, None if something still is."""

    processes: tuple[LeftProcess, ...]
    folders: tuple[Text, ...]
    clean_after_s: Seconds | None


# Of `agent/last_states.py`


@record
class SavedState:
    """A state that a worker has saved on this host; the frame's body is its record."""

    step: Count
    number: Count


@record
class SavedStates:
    """The end of the list: steps whose state was not finished, and whether processes of the run are still alive."""

    unfinished: tuple[Count, ...]
    is_running: Flag


@record
class Unreadable:
    """Why a file cannot be read."""

    reason: Text
