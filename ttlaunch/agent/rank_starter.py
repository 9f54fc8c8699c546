"""Start the ranks of one host without an engine's program: one forked shim per rank. `start_ranks.py` is its script.

It reads the plan once, forks a shim for each rank, waits for them, and exits when all have ended: with 0, or with the status of
the first shim that ended with another. One rank's end ends no other; on SIGTERM it ends all, within about a second. Where PARENT,
the launcher's process or the agent's, is given, it ends with that process; workers of an elastic run first save their state. With `ordered`, it waits for a line of JSON on standard input,
which names the ranks to start (`ranks`; all if it is absent), their further variables (`variables`), and ranks that may be started later
(`later`). If there are such ranks, further lines name those to start (`ranks`), and it does not exit before standard input has ended.
If standard input ends before that line, it starts nothing and exits.
Its shims end with it, and ranks with their shims.
For `--warm`, it replaces itself by a process that has imported torch, see `warm_start.py`.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import sys
import time

from ttlaunch import contract
from ttlaunch.agent import shim
from ttlaunch.agent.parent_death import end_with_parent

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Record = dict[str, Any]

NAME, SHIM_NAME = "start_ranks", "ttlaunch-shim"
"""What the kernel calls this process and its shims, at most 15 characters."""
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_KILL_S = 1.0  # after SIGTERM
_PIECE = 65536
_LONGEST_WAIT_S = 3600.0
_INTERRUPTED = 128 + signal.SIGTERM


def main() -> int:
    """Start the ranks of a plan and wait for their end."""
    take_name(NAME)
    for number in _ENDS:
        signal.signal(number, signal.SIG_DFL)  # an agent ignores them
    parent = int(sys.argv[2]) if len(sys.argv) > 2 else 0  # noqa: PLR2004 - the second argument
    if parent:
        end_with_parent(shim.PARENT_ENDED)
        if os.getppid() != parent:  # it ended before the kernel took the order, so no signal will come
            return _INTERRUPTED
    plan_path = os.path.abspath(sys.argv[1])
    orders, later = None, []
    try:
        with open(plan_path, encoding="utf-8") as file:
            plan = json.load(file)
        shim.check_format(plan)
        rows = plan["ranks"]
        if "ordered" in sys.argv[3:]:
            orders = Orders(_taken_from_stdin())
            order = orders.wait_for_first() or {"ranks": [], "variables": {}}  # the agent has ended
            rows = [plan["ranks"][rank] for rank in order.get("ranks", range(len(plan["ranks"])))]
            later = [plan["ranks"][rank] for rank in order.get("later", ())]
            os.environ.update(order["variables"])
    except (OSError, ValueError, KeyError, LookupError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return shim.SHIM_FAILED
    if not parent and len({row["host"] for row in rows}) > 1:
        print(f"{NAME}: the plan has ranks on several hosts, which only `ttlaunch run` starts", file=sys.stderr)
        return shim.SHIM_FAILED
    cold = {}
    if plan.get("warm") and (rows or later):
        from ttlaunch.agent.warm_start import replace_by_warm  # noqa: PLC0415 - other ranks do not pay for it

        pipe = None if orders is None else (orders.descriptor, orders.unread)
        reason = replace_by_warm(plan, plan_path, rows, later=later, orders=pipe)
        cold = {[*rows, *later][0]["rank"]: f"each rank starts by itself, because {reason}"}
    return RankStarter(plan, plan_path, cold=cold).run(rows, orders if later else None)


class IsRank(BaseException):
    """Raised in a process that `forked_rank.py` has forked as a rank: it leaves the code of shims, and Python starts the program."""


def _taken_from_stdin() -> int:
    """Return standard input under another number, which no rank inherits, and put an empty one in its place."""
    taken, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return taken


class Orders:
    """The lines of JSON that order this process to start ranks."""

    def __init__(self, descriptor: int, unread: bytes = b"") -> None:
        """Read from a pipe; `unread` has been read from it already."""
        self.descriptor = descriptor
        self.unread = unread
        self.is_over = False

    def wait_for_first(self) -> Record | None:
        """Return the first order, after waiting for it; None if the pipe ends before."""
        while not self.is_over and b"\n" not in self.unread:
            self._read()
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line) if line else None

    def announce(self) -> None:
        """Have the kernel send SIGIO to this process, which must block it, whenever there is something to take."""
        fcntl.fcntl(self.descriptor, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK | os.O_ASYNC)

    def take(self) -> list[int]:
        """Return the ranks that the orders name which have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            while not self.is_over:
                self._read()
        *lines, self.unread = self.unread.split(b"\n")
        return [rank for line in lines for rank in json.loads(line)["ranks"]]

    def _read(self) -> None:
        piece = os.read(self.descriptor, _PIECE)
        self.unread += piece
        self.is_over = not piece


class RankStarter:
    """The parent of the shims of one host."""

    def __init__(
        self, plan: Record, plan_path: str, *, fork: shim.Fork | None = None, cold: Mapping[int, str] | None = None
    ) -> None:
        """Begin without a rank.

        Args:
            plan: The content of the plan.
            plan_path: Its file.
            fork: Forks a rank from this process, which has imported torch; None to start each rank by itself.
            cold: Ranks that are to start by themselves although the user asked for `--warm`, each with the reason.
        """
        self._fork = fork
        self._cold = cold or {}
        self._plan = plan
        self._plan_path = plan_path
        self._ranks: dict[int, int] = {}  # by the process of the shim
        self._status = 0
        self._saving: frozenset[int] = frozenset()  # workers that have been ordered to save their state
        self._saved_by = math.inf  # when they are ended all the same
        self._kill_at: float | None = None  # once the ranks are to end
        self._has_orphans = False  # a shim was killed, so processes of its rank may have become children of this one
        self._orders: Orders | None = None

    def run(self, rows: list[Record], orders: Orders | None = None) -> int:
        """Start the ranks of these rows and those that are ordered, and return the status to exit with when all have ended."""
        # Signals wait here until this process asks for them, so none arrives between a look and a wait.
        awaited = {*_ENDS, signal.SIGCHLD, signal.SIGIO, shim.PARENT_ENDED}
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        shim.adopt_orphans()  # of shims that are killed
        self._orders = orders
        if orders is not None:
            orders.announce()
        self._start_all(rows)
        while True:
            # Look before the first wait too: what came before `announce` has sent no signal.
            if orders is not None and self._takes_orders():
                self._start_all([self._plan["ranks"][rank] for rank in orders.take()])
            if not self._ranks and not self._takes_orders():
                break
            next_at = self._saved_by if self._kill_at is None else self._kill_at
            came = signal.sigtimedwait(awaited, min(max(0.0, next_at - time.monotonic()), _LONGEST_WAIT_S))
            if came is not None and came.si_signo == shim.PARENT_ENDED and self._saved_by == math.inf:
                self._let_save()  # the signal comes again for each thread that the parent had
            self._reap()
            is_ordered = came is not None and came.si_signo in _ENDS
            if self._kill_at is None and (is_ordered or self._has_saved()):
                self._status = self._status or _INTERRUPTED
                self._end()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                # Shims go with their ranks: a record of this signal would look like one that came from outside.
                self._signal_all(signal.SIGKILL)
                self._kill_at = math.inf
        shim.kill_descendants()
        return self._status

    def _takes_orders(self) -> bool:
        return self._orders is not None and not self._orders.is_over and self._kill_at is None

    def _start_all(self, rows: list[Record]) -> None:
        for row in rows:
            try:
                self._start(row)
            except OSError as error:
                _write(2, f"rank {row['rank']} cannot be started: {error.strerror}")
                self._status = self._status or shim.SHIM_FAILED
                self._end()
                break

    def _start(self, row: Record) -> None:
        why_cold = self._cold.get(row["rank"]) or (shim.why_not_forked() if self._fork else "")
        parent, pid = os.getpid(), os.fork()
        if pid:
            self._ranks[pid] = row["rank"]
            return
        status = shim.SHIM_FAILED
        try:
            os.setpgid(0, 0)  # a signal to the group reaches the rank and its children, and the shim ignores it
            if self._orders is not None:
                os.close(self._orders.descriptor)
            shim.begin()
            if os.getppid() == parent:
                take_name(SHIM_NAME)
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                fork = None if why_cold else self._fork
                status = shim.run_rank(self._plan, row, self._plan_path, fork=fork, why_cold=why_cold)
        except IsRank:
            raise
        except BaseException as error:  # noqa: BLE001 - it must not get into the parent's code
            _write(2, f"shim of rank {row['rank']}: {type(error).__name__}: {error}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _reap(self) -> None:
        """Take note of the shims that have ended, and kill what a killed one left. Each line to standard output wakes the launcher."""
        self._note_ends()
        for pid in shim.child_processes() if self._has_orphans else ():
            if pid not in self._ranks:  # its own orphans come to this process in turn, with SIGCHLD
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _note_ends(self) -> None:
        while self._ranks:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            rank = self._ranks.pop(pid, None)
            if rank is None:
                continue
            killed = os.WIFSIGNALED(wait_status)
            status = 128 + os.WTERMSIG(wait_status) if killed else os.WEXITSTATUS(wait_status)
            self._has_orphans = self._has_orphans or killed
            if killed and self._kill_at is None:
                _write(2, f"shim of rank {rank} was killed by signal {os.WTERMSIG(wait_status)}")
            if contract.ENV_SCRATCH in os.environ:  # a launcher reads it
                _write(1, f"shim of rank {rank} ended with status {status}")
            self._status = self._status or status

    def _let_save(self) -> None:
        """Have workers of an elastic run save their state, since the launcher or the agent is gone."""
        from ttlaunch.agent.worker_orders import order_to_save  # noqa: PLC0415 - it has to import `socket`

        scratch = os.environ.get(contract.ENV_SCRATCH)
        self._saving = frozenset(order_to_save(scratch) if scratch else ())
        self._saved_by = time.monotonic() + contract.SAVE_S

    def _has_saved(self) -> bool:
        """Whether the parent is gone and there is nothing to wait for any more, so that all ranks have to end."""
        if self._saved_by == math.inf:
            return False
        return time.monotonic() >= self._saved_by or self._saving.isdisjoint(self._ranks.values())

    def _end(self) -> None:
        """Ask all ranks to end, and set the time for killing them."""
        self._signal_all(signal.SIGCONT)
        self._signal_all(signal.SIGTERM)
        self._kill_at = time.monotonic() + _KILL_S

    def _signal_all(self, number: int) -> None:
        for pid in self._ranks:
            try:
                os.killpg(pid, number)
            except OSError:  # it has not made its group yet; a child that was not waited for keeps its id
                with contextlib.suppress(OSError):
                    os.kill(pid, number)


def take_name(name: str) -> None:
    """Have the kernel call this process by a name of at most 15 characters."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def _write(descriptor: int, line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(descriptor, f"{line}\n".encode())
