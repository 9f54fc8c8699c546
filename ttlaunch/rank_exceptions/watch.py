"""Watch a rank for the exception that will end it, and write it down while the rank still cleans up.

A thread looks 25 times a second which exception the main thread is handling. One that will end the process is *pending*: it is
written to the rank's file, and taken back if the process goes on after all. So a rank whose clean-up takes seconds, or that is
ended meanwhile, is still known as the one that failed first.

Python 3.9 and the standard library only; Python 3.9 itself cannot tell the exception of another thread, so its ranks are known
only by the exception that ends them. This file is imported at the start of every rank of a program, so it imports only what
Python has loaded by then; the rest follows with the first exception.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time

from ttlaunch.rank_exceptions.outline import causes_of, chain_of, place_of, raised_elsewhere

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

LOOK_S = 0.04
_FATE = "ttlaunch.rank_exceptions.fate"
_MOST_RECORDS = 64
_LONGEST_OUTLINE = 500
_LONGEST_MESSAGE = 16 * 1024
_LONGEST_TRACEBACK = 32 * 1024


class ExceptionWatch:
    """Watches the thread that makes it, which is a rank's main thread, and writes the exceptions that end it to the rank's file."""

    def __init__(
        self,
        path: str,
        *,
        opener: Callable[[str, int], int] | None = None,
        last: str = "",
        folder: str | None = None,
    ) -> None:
        """Begin without a thread.

        Args:
            path: The file to write, see `contract.exceptions_file`.
            opener: Opens the file, as for `open`; None if the file exists, as it does for a program.
            last: See `fate.will_end`.
            folder: The folder of the user's code, whose lines are named rather than those of a framework elsewhere.
        """
        self._path = path
        self._opener = opener
        self._last = last
        self._folder = folder
        self._main = _thread.get_ident()
        self._pid = os.getpid()
        self._seen: dict[int, float] = {}
        self._pending: BaseException | None = None
        self._passed: tuple[object, object] = None, None
        self._left = _MOST_RECORDS
        self._is_told = False  # whether the last line is about an exception
        self._end = '"error": null'  # how the program ends, as the fields of a line
        self._status: int | None = None  # which `sys.exit` was asked for, if the main thread has done nothing since
        self._uncaught = (
            False  # once it is set, under the lock, the thread writes no more: libraries that end handle exceptions too
        )
        self._lock = _thread.RLock()

    def start(self) -> None:
        """Start the thread that looks, where Python can tell the exception of another thread."""
        if hasattr(sys, "_current_exceptions"):
            _thread.start_new_thread(self._watch, ())

    def take_hooks(self) -> None:
        """Have Python call `ends_by` with the exception that ends this process, and note when the program has come to its end."""
        atexit.register(self._leave)
        previous, leave = sys.excepthook, sys.exit

        def exit_with(status: str | int | None = None, /) -> None:
            # Nothing else knows the status until libraries have ended, which may take longer than anybody waits.
            if _thread.get_ident() == self._main:
                self._status = _status_of(status)
            leave(status)

        exit_with.__name__, exit_with.__doc__ = "exit", leave.__doc__
        sys.exit = exit_with  # type: ignore[assignment]

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if _is_called_by_python():
                self.ends_by(error)
            previous(kind, error, trace)

        sys.excepthook = hook

    def ends_by(self, error: BaseException) -> None:
        """Write the exception by which this process ends."""
        self.note(error)
        if os.getpid() != self._pid:
            return
        try:
            self._write(error, uncaught=True)
        except Exception:  # noqa: BLE001 - a `json.py` beside the program, say: what `note` has written stands
            return

    def note(self, error: BaseException) -> None:
        """Write at once what there is no time to lose for, because other ranks may be about to end this one; the rest follows."""
        if os.getpid() != self._pid:  # a process that the rank has forked
            return
        self._silence_thread()
        self._seen.setdefault(
            id(error), time.time()
        )  # what follows takes time, in which other ranks may fail because of this one
        self._end = self._outline(error, '"uncaught": true')[1:-1]

    def _leave(self) -> None:
        """Note that the program's own code has all run: Python calls last what was registered first."""
        if os.getpid() != self._pid:
            return
        printed = getattr(sys, "last_value", None)  # Python sets it before it calls a hook that has replaced ours
        if not self._uncaught and isinstance(printed, BaseException):
            self.ends_by(printed)
        self._silence_thread()
        self._note_status(None)
        status = "" if self._status is None or self._end != '"error": null' else f', "status": {self._status}'
        self._append(f'{{{self._end}, "left": {time.time()!r}{status}}}')

    def _silence_thread(self) -> None:
        with self._lock:
            self._uncaught = True

    def first_seen(self, error: BaseException) -> float | None:
        """Return when an exception, or the first of those that led to it, was seen in flight; None if it was not."""
        return min((self._seen[id(one)] for one in chain_of(error) if id(one) in self._seen), default=None)

    def _watch(self) -> None:
        try:
            while not self._uncaught:
                time.sleep(LOOK_S)
                if not self._uncaught:
                    self._look()
        except Exception:  # noqa: BLE001 - the rank's work is worth more than what is known about its exceptions
            return

    def _look(self) -> None:
        current = sys._current_exceptions().get(self._main)  # type: ignore[attr-defined, unused-ignore] # noqa: SLF001
        error = current[1] if isinstance(current, tuple) else current  # a tuple until Python 3.11
        frame = sys._current_frames().get(self._main)  # noqa: SLF001
        if error is None or frame is None or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            self._passed = None, None
            if frame is not None:  # else the exception has left the last frame, and ends the process now
                self._note_status(frame)
                self._take_back()
            return
        # An exception that one clause keeps is looked at again only when it has left this clause.
        at = error, error.__traceback__
        if (
            error is self._pending
            or _is_handled_by_python(error)
            or (at[0] is self._passed[0] and at[1] is self._passed[1])
        ):
            return
        self._seen = {known: seen for known, seen in self._seen.items() if known in map(id, chain_of(error))}
        self._seen.setdefault(id(error), time.time())
        self._pending = error  # kept alive, as it keeps its chain, so that no other exception gets one of these ids
        # To tell its fate, files are imported and parsed the first time; meanwhile the process may be ended already.
        if _FATE not in sys.modules:
            self._outline(error, '"is_certain": false', while_it_runs=True)
        from ttlaunch.rank_exceptions.fate import will_end

        if will_end(error, frame, last=self._last):
            self._write(error, uncaught=False)
        else:
            self._passed = at
            self._take_back()

    def _note_status(self, frame: FrameType | None) -> None:
        """Note the status of a pending `SystemExit`, or forget it if the program goes on: Python calls what it registered by itself.

        Args:
            frame: The innermost frame of the main thread, which handles no exception; None if the program has come to its end.
        """
        if frame is not None and _outermost(frame).f_code.co_name == "<module>":
            self._status = None
        elif isinstance(self._pending, SystemExit):
            self._status = _status_of(self._pending.code)

    def _take_back(self) -> None:
        """Note that the process has gone on after the exception that was pending."""
        self._pending = None
        self._seen.clear()
        if self._is_told:
            self._append('{"error": null}', while_it_runs=True)

    def _write(self, error: BaseException, *, uncaught: bool) -> None:
        import json

        from ttlaunch.rank_exceptions.describe import describe

        if self._left <= 0 and not uncaught:
            return
        self._left -= 1
        fields = describe(error, folder=self._folder)
        origin = raised_elsewhere(error.__traceback__, (fields["file"], fields["line"]))
        fields["notes"] += [origin] if origin else []
        fields["message"] = fields["message"][:_LONGEST_MESSAGE]
        fields["traceback"] = fields["traceback"][-_LONGEST_TRACEBACK:]
        line = json.dumps({"error": {**fields, "seen": self.first_seen(error)}, "uncaught": uncaught})
        self._append(line, while_it_runs=not uncaught)
        if uncaught:
            self._end = line[1:-1]

    def _outline(self, error: BaseException, how: str, *, while_it_runs: bool = False) -> str:
        """Write what can be written without importing anything, and return the line."""
        now, (file, line) = time.time(), place_of(error.__traceback__, self._folder)
        links = [tuple(_quoted(text[:_LONGEST_OUTLINE]) for text in link) for link in causes_of(error)]
        causes = ", ".join(f'{{"type": {name}, "message": {text}, "origin": {origin}}}' for name, text, origin in links)
        place = f'"file": {_quoted(file)}, "line": {line}, ' if file is not None else ""
        known = f'"type": {links[0][0]}, "message": {links[0][1]}, "causes": [{causes}], {place}"time": {now!r}'
        seen = self.first_seen(error)
        outline = f'{{"error": {{{known}, "seen": {"null" if seen is None else repr(seen)}}}, {how}}}'
        self._append(outline, while_it_runs=while_it_runs)
        return outline

    def _append(self, line: str, *, while_it_runs: bool = False) -> None:
        """Append a line by a single write, so that a reader never sees two lines mixed.

        Args:
            line: The line.
            while_it_runs: Whether the line, one of the thread's, is worth nothing once it is known how the program ends.
        """
        if while_it_runs:
            with self._lock:
                if not self._uncaught:
                    self._append(line)
            return
        try:
            self._is_told = '"type"' in line
            with open(self._path, "ab", buffering=0, opener=self._opener) as file:
                file.write(line.encode() + b"\n")
        except OSError:  # the log says the same
            return


def _is_handled_by_python(error: BaseException) -> bool:
    """Whether the code that handles an exception has no source, as Python's own import, which tries and goes on."""
    trace = error.__traceback__
    return trace is None or trace.tb_frame.f_code.co_filename.startswith("<")


def _status_of(code: object) -> int:
    """Return the exit status of a process that ends by `SystemExit(code)`."""
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def _quoted(text: str) -> str:
    """Return a text as JSON has it, without the module that would have to be imported for that."""
    safe = (letter if " " <= letter <= "~" and letter not in '\\"' else "?" for letter in text)
    return '"' + "".join(safe) + '"'


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_called_by_python() -> bool:
    """Whether no code of the program called the hook, such as code that prints an exception and goes on."""
    frame = _outermost(sys._getframe(1))  # noqa: SLF001
    return frame.f_code.co_name != "<module>" and not frame.f_code.co_filename.startswith("<frozen ")
