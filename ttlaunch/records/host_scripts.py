"""The answers of the scripts that run on hosts before and after a run.

They report whether hosts reach each other, how far code and environments are, and what is left of a run.

The facts that a probe finds are in `hosts/doctor/facts.py`, which is checked by the same parser. Python 3.9 and the standard
library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Count, FilePath, Flag, Json, Number, Pid, Seconds, Size, Text, Time, Word, record

_NO_NAMES: tuple[str, ...] = ()

# Of `agent/probe.py`


@record
class HostClock:
    """The host's time before it looks at anything else."""

    time: Time


@record
class HostAnswer:
    """All that it found; what of it is a fact, `facts.py` checks."""

    facts: dict[str, Json]


# Of `agent/pairs.py`


@record
class Listening:
    """The port on which the script waits for others, or why there is none."""

    port: Count | None
    problem: Text | None


@record
class Reached:
    """For each other host: its name, seconds until it accepted, and what went wrong."""

    results: tuple[tuple[Word, Seconds | None, Text | None], ...]


@record
class Measured:
    """The way to one other host."""

    latency_s: Seconds | None = None
    bytes_per_s: Number | None = None
    problem: Text | None = None


# Of `agent/receive.py`


@record
class SyncMessage:
    """What kind of thing the host says, and what it asks for: contents of so many files and bytes.

    Attributes:
        id: Of the folder on the host; hosts that see one folder say the same.
    """

    kind: Word
    id: Text = ""
    files: Count = 0
    bytes: Size = 0


@record
class SyncEnd:
    """The last word of a host that has the release, or that says what would be done.

    Attributes:
        folder: The remote folder, absolute.
        there: Whether nothing was missing and nothing damaged.
        files, bytes: What it lacks; only said where nothing is done.
        data: Absolute path of each text, by SHA-256.
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
    """Why a host cannot take the code in: `why` is a word for the kind of reason, the rest goes with it."""

    why: Word
    reason: Text = ""
    path: Text = ""
    needed: Size = 0
    free: Size = 0
    names: tuple[Text, ...] = _NO_NAMES


# Of `agent/base_python.py` and `agent/install.py`


@record
class FoundPython:
    """A Python of a host; `why_not` says why no environment can be built on it."""

    path: Word
    version: Word | None = None
    why_not: Text | None = None
    machine: Word = ""
    libc: Word = ""


@record
class FoundPythons:
    """The Python that is taken, and all that were looked at."""

    base: FoundPython | None
    found: tuple[FoundPython, ...]


@record
class InstallMessage:
    """How far the host is.

    Attributes:
        holder: Who else works in the same folder; for `waiting`.
        phase, done, total: What it does, and how many bytes of it are done; for `progress`.
        wheels: By SHA-256, how many bytes of each wheel are there that is not whole; for `need`.
    """

    kind: Word
    holder: Text | None = None
    phase: Word = ""
    done: Size = 0
    total: Size | None = None
    wheels: dict[str, Size] | None = None


@record
class EnvironmentAnswer:
    """How it ended: the environment is `ready`, `missing` (when only asked), or `failed` for `what`.

    Attributes:
        made: Whether it was made now.
        why: Why it is missing.
        needed, free: Of a disk or its inodes; None: it is not known how much is needed.
        words: Why the folder cannot be written.
        lines: What pip said last.
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
    """What is left of a run; `clean_after_s` says after how long nothing was, None if something is."""

    processes: tuple[LeftProcess, ...]
    folders: tuple[Text, ...]
    clean_after_s: Seconds | None
