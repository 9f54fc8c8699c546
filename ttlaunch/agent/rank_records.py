"""What the shim records about its rank for the launcher: its start, as a line of progress, and how it ended.

The record of the end is written completely or not at all, also if the disk has filled up meanwhile. Python 3.9 and the
standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from ttlaunch import contract
from ttlaunch.agent.memory import memory_limit, oom_kills
from ttlaunch.records.endings import RankExit
from ttlaunch.records.ranks import Done, Started, read_progress

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from resource import struct_rusage
    from typing import Any

    Record = dict[str, Any]

_RESERVED = 4096
_TAIL = 65536  # bytes at the end of a rank's progress file, among which its `done` record is looked for


class RankRecords:
    """The records of one rank."""

    def __init__(self, run_folder: str, plan: Record, rank: int) -> None:
        self._folder = run_folder
        self._rank = rank
        self._is_recipe = plan["recipe"] is not None
        self._started = time.time()
        self._oom_kills = oom_kills()

    def started(self, pid: int, *, why_cold: str = "") -> None:
        """Record that the rank's process was started, and reserve room on the disk for the record of its end.

        Args:
            pid: The rank's process.
            why_cold: Why it was not forked from a process with torch although the user asked for it; empty if it was, or nobody asked.
        """
        progress, reserved_path = (
            self._path(contract.progress_file(self._rank)),
            self._path(contract.exit_file(self._rank)) + ".tmp",
        )
        record = Started(time=self._started, pid=pid, shim_pid=os.getpid(), host=os.uname().nodename)
        try:
            with open(progress, "a", encoding="utf-8", opener=contract.open_private) as file:
                file.write(json.dumps({"kind": contract.KIND_STARTED, **vars(record)}) + "\n")
                if why_cold:
                    text = f"`--warm`: {why_cold}"
                    file.write(contract.record_line({"kind": contract.KIND_NOTE, "time": time.time(), "text": text}))
            with open(reserved_path, "wb", opener=contract.open_private) as reserved:
                reserved.write(b" " * _RESERVED)
            if not self._is_recipe:  # a program appends to them, and does not know the rights that they must have
                contract.make_private_folder(self._path(contract.STACKS_DIR))
                for name in (contract.exceptions_file, contract.stacks_file):
                    path = self._path(name(self._rank))
                    os.close(contract.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        except OSError as error:
            print(f"ttlaunch shim: records cannot be written: {error.strerror}", file=sys.stderr)

    def not_started(self, reason: str) -> None:
        """Record that the rank's process could not be started."""
        self._write(RankExit(rank=self._rank, time=time.time(), start_error=reason))

    def uses_mpi(self, library: str) -> None:
        """Record as the rank's error that it has loaded a library of MPI although it runs without MPI."""
        message = f"it has loaded {library}, and would be alone in a world of its own"
        error = {"type": "NoMpiError", "message": message, "time": time.time()}
        path = self._path(contract.error_file(self._rank))
        try:
            with open(path + ".tmp", "w", encoding="utf-8", opener=contract.open_private) as file:
                json.dump(error, file)
            os.replace(path + ".tmp", path)
        except OSError as failure:
            print(f"ttlaunch shim: {path} cannot be written: {failure.strerror}", file=sys.stderr)

    def ending(self, pid: int, wait_status: int, usage: struct_rusage) -> RankExit:
        """Return how the rank ended, as of now.

        Of a rank that failed, the record also has `oom_kills`, the processes that the kernel killed since the rank's start
        because memory ran out, and if there may have been one, `memory_limit_bytes`.
        """
        ended = time.time()
        code = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else 0
        status = os.WEXITSTATUS(wait_status)
        kills = self._kills_since() if status or code else None
        return RankExit(
            rank=self._rank,
            pid=pid,
            started=self._started,
            time=ended,
            status=None if code else status,
            signal=code or None,
            left_early=status == 0 and not code and self._is_recipe and not self._is_done(),
            peak_memory_bytes=usage.ru_maxrss * 1024,
            oom_kills=kills,
            memory_limit_bytes=memory_limit() if kills or code == signal.SIGKILL else None,
        )

    def ended(self, ending: RankExit, *, left_behind: int, unkept: tuple[dict[str, int], str | None]) -> None:
        """Write the record of the rank's end; the launcher finds it complete or not at all.

        Args:
            ending: What was known when the rank had just ended.
            left_behind: The number of processes that the rank left behind and the shim killed.
            unkept: The number of bytes of its output that could not be written, by stream, and why; None if all was.
        """
        unkept_output, reason = unkept
        self._write(
            RankExit(
                **{**vars(ending), "left_behind": left_behind, "unkept_output": unkept_output, "unkept_reason": reason}
            )
        )

    def _kills_since(self) -> int | None:
        """Return how many processes the kernel has killed for memory since the rank's start; None if it does not say."""
        now = oom_kills()
        return None if now is None or self._oom_kills is None else now - self._oom_kills

    def _is_done(self) -> bool:
        """Whether the rank's role returned: the last thing a healthy rank writes is its `done` record."""
        try:
            with open(self._path(contract.progress_file(self._rank)), "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                lines = file.read().splitlines()
        except OSError:
            return False
        return any(isinstance(read_progress(line), Done) for line in lines[-3:])

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _write(self, record: RankExit) -> None:
        path = self._path(contract.exit_file(self._rank))
        text = json.dumps(vars(record)).encode().ljust(_RESERVED)  # JSON ignores the spaces at the end
        try:
            with open(contract.open_private(path + ".tmp", os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.write(text)
            os.replace(path + ".tmp", path)
        except OSError as error:
            print(f"ttlaunch shim: {path} cannot be written: {error.strerror}", file=sys.stderr)
