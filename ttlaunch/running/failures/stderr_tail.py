"""Read the end of a rank's log: its last lines, the exception that ended it, or where it crashed.

A rank of a recipe records its exception itself. For any other program, and after a crash in compiled code, the standard
error is the only evidence.
"""

from collections.abc import Callable
from pathlib import Path

from ttlaunch import contract
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.rank_exceptions.outline import is_own_file
from ttlaunch.records.regular_files import read_tail
from ttlaunch.running.runs.run_folder import RunFolder

_TAIL_BYTES = 65536
_MOST_LINES = 10
_LONGEST_LINE = 200
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = quick_pattern(r'\s+File "(?P<file>[^"\n]+)", line (?P<line>\d{1,9})(?!\d)')
_EXCEPTION = quick_pattern(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_FATAL = quick_pattern(r"Fatal Python error: (.+)")
_THREAD = quick_pattern(
    r"(?P<thread>(?:Current thread|Thread) 0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])?.* \(most recent call first\):"
)
_IN_THREAD = quick_pattern(r"Exception (?:ignored )?in thread (?:started by: )?(?P<name>.*?):?$")
_NATIVE_FRAME = quick_pattern(r"\[[^\]]+:\d+\] (?:\[ ?\d+\]|\*\*\* End of error)|Extension modules: ")


@dataclass(frozen=True)
class Raised:
    """An exception, as a traceback shows it.

    Attributes:
        type: The name of the exception's type, without its module.
        file, line: The innermost line of the user's own code, or of any code if there is none; None without frames.
        chain: `type: message` of the exceptions that it was raised from, or during whose handling it was raised.
    """

    type: str
    message: str
    file: str | None
    line: int | None
    chain: tuple[str, ...] = ()


@dataclass(frozen=True)
class ThreadError:
    """An exception that ended a thread while the process went on, as `threading` prints it."""

    thread: str
    raised: Raised


@dataclass(frozen=True)
class Crash:
    """Where a process crashed, as faulthandler prints it.

    Attributes:
        reason: The fatal error, such as `Segmentation fault`.
        thread: The name of the thread that crashed, or `current thread`.
        file, line: The innermost line of the user's own code, or of any code if there is none; None without frames.
    """

    reason: str
    thread: str
    file: str | None
    line: int | None


@dataclass(frozen=True)
class StderrTail:
    """The end of a rank's standard error.

    Attributes:
        lines: The last lines, without empty lines and frames of compiled code.
        raised: The exception whose traceback ends the log; None if there is none.
        crash: Where the process crashed; None if it did not.
        text: The whole end of the log.
    """

    lines: tuple[str, ...] = ()
    raised: Raised | None = None
    crash: Crash | None = None
    text: str = ""


def read_stderr_tail(log: Path) -> StderrTail:
    """Read the end of a log; the result is empty if it cannot be read."""
    try:
        return parse_stderr_tail(read_tail(log, most=_TAIL_BYTES).decode("utf-8", "replace"))
    except OSError:
        return StderrTail()


def stderr_tails(folder: RunFolder) -> Callable[[int], StderrTail]:
    """Return what reads the end of the log of one rank of a run."""
    return lambda rank: read_stderr_tail(folder.file(contract.stderr_file(rank)))


def read_thread_error(log: Path) -> ThreadError | None:
    """Find the last exception near the end of a log that ended a thread of the process and not the process."""
    try:
        return parse_thread_error(read_tail(log, most=_TAIL_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None


def parse_stderr_tail(text: str) -> StderrTail:
    """Find the last lines, the exception and the crash in the end of a log."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    kept = [line[:_LONGEST_LINE] for line in lines if not _NATIVE_FRAME.match(line)]
    return StderrTail(tuple(kept[-_MOST_LINES:]), parse_raised(lines), parse_crash(lines), text)


def parse_raised(lines: list[str]) -> Raised | None:
    """Find the exception whose traceback is the last thing in the log."""
    if _TRACEBACK not in lines:
        return None
    start = len(lines) - 1 - lines[::-1].index(_TRACEBACK)
    below = [line for line in lines[start + 1 :] if not line.startswith(" ")]
    found = _EXCEPTION.match(below[0]) if below else None
    if found is None:
        return None
    frames = _frames(lines[start + 1 : lines.index(below[0], start)])
    file, line = _own_frame(frames[::-1])
    return Raised(found["type"].rpartition(".")[2], found["message"] or "", file, line, chained(lines[:start]))


def parse_thread_error(text: str) -> ThreadError | None:
    """Find the last exception in a log that ended a thread of the process and not the process."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    headers = [(index, found) for index, line in enumerate(lines) if (found := _IN_THREAD.match(line))]
    if not headers:
        return None
    start, header = headers[-1]
    # The traceback ends at its first line that is not indented: later lines are other output of the process.
    end = next((at for at in range(start + 2, len(lines)) if not lines[at].startswith(" ")), len(lines))
    raised = parse_raised(lines[start + 1 : end + 1])
    return None if raised is None else ThreadError(header["name"], raised)


def chained(lines: list[str]) -> tuple[str, ...]:
    """Return `type: message` of each exception that a traceback in the log names as the cause or context of the next one."""
    notices = ("The above exception was the direct cause", "During handling of the above exception")
    return tuple(lines[index - 1] for index, line in enumerate(lines) if index and line.startswith(notices))


def parse_crash(lines: list[str]) -> Crash | None:
    """Find where faulthandler saw the process crash."""
    fatal, reason = next(
        ((index, found[1]) for index, line in enumerate(lines) if (found := _FATAL.match(line))), (0, "")
    )
    if not reason:
        return None
    threads = [(index, found) for index in range(fatal, len(lines)) if (found := _THREAD.match(lines[index]))]
    current = next((pair for pair in threads if pair[1]["thread"].startswith("Current")), None)
    if current is None:
        return Crash(reason, "a thread without Python", None, None)
    index, thread = current
    end = next((other for other, _ in threads if other > index), len(lines))
    file, line = _own_frame(_frames(lines[index + 1 : end]))
    return Crash(reason, thread["name"] or "current thread", file, line)


def _frames(lines: list[str]) -> list[tuple[str, int]]:
    found = [_FRAME.match(line) for line in lines]
    return [(one["file"], int(one["line"])) for one in found if one]


def _own_frame(innermost_first: list[tuple[str, int]]) -> tuple[str | None, int | None]:
    """Return the innermost frame of the user's own code, or the innermost of all frames if there is none."""
    own = [frame for frame in innermost_first if is_own_file(frame[0])]
    return next(iter(own or innermost_first), (None, None))
