"""A run on one host as its agent sees it: the files that its ranks write, cut into pieces, and its processes.

A piece is safe once the launcher has confirmed it; after a lost connection, all pieces that are not safe are sent again.
Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import time

from ttlaunch import contract
from ttlaunch.agent.process_facts import look_at_processes
from ttlaunch.agent.run_processes import is_gone, kill_run_processes, signal_process
from ttlaunch.agent.stack_dump import dump_stacks, find_py_spy
from ttlaunch.agent.stop_marker import leave_farewell, leave_stop_marker
from ttlaunch.agent.worker_orders import order_to_save, pass_order

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

PIECE = 128 * 1024
_GRACE_S = 0.5  # for ranks that the engine has just asked to end, before they are killed
_STACKS_S = 0.3
_LOOK_AGAIN_S = 0.02
_COLLECTED = (contract.LOGS_DIR, contract.RECORDS_DIR, contract.STACKS_DIR)


class HostedRun:
    """The files and processes of one run on this host."""

    def __init__(
        self,
        run_id: str,
        folder: str,
        scratch: str,
        *,
        own_ranks: Collection[int],
        daemons: Collection[str] = (),
        needed: Mapping[str, str] | None = None,
    ) -> None:
        """Begin with a run whose ranks have not been started.

        Args:
            run_id: The run's id.
            folder: The run's folder.
            scratch: The run's folder in shared memory.
            own_ranks: The ranks of this host.
            daemons: The names of the engine's processes.
            needed: What each folder that the run needs here is for, with its path; a folder comes before those inside it.
        """
        self.lost_shims: dict[int, float] = {}  # rank to when it was seen, seconds since the epoch
        self._id = run_id
        # Hosts may share the run's folder, and then see files of each other's ranks, whose processes run elsewhere.
        self._own = frozenset(f"rank-{rank}" for rank in own_ranks)
        self._daemons = daemons
        self._needed = needed or {}
        self._folder = folder
        self._scratch = scratch
        self._boxes: dict[str, bytes] = {}  # flight recorders as they were last sent, by name
        self._sent: dict[str, int] = {}  # how much of each file was sent
        self._safe: dict[str, int] = {}  # how much of each file the launcher has confirmed
        self._shims: dict[int, int] = {}  # rank to the process id of its shim
        self._ranks: dict[int, int] = {}  # rank to its own process id

    def pieces(self, *, with_boxes: bool) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield what the ranks wrote since the last scan: additions to logs, new records and shards, flight recorders."""
        for directory in _COLLECTED:
            for name in self._names(directory):
                if not name.endswith((".tmp", ".unfinished")):
                    yield from self._pieces_of(f"{directory}/{name}")
        yield from self._shards()
        if with_boxes:
            yield from self._changed_boxes()

    def confirm(self, name: str, end: int) -> None:
        """Note that the launcher has a file up to `end`.

        A checkpoint's record is sent after its shard, so once the launcher has the record, both are removed here.
        """
        self._safe[name] = max(end, self._safe.get(name, 0))
        if name.startswith(f"{contract.CHECKPOINTS_DIR}/") and name.endswith(".json"):
            record = os.path.join(self._folder, name)
            for path in (record, record[: -len(".json")] + ".safetensors"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def rewind(self) -> None:
        """Send again, from the next scan on, what the launcher has not confirmed."""
        self._sent = dict(self._safe)
        self._boxes = {}

    def look(self) -> None:
        """Find the processes of new ranks, and shims that have ended without a record of their rank's end."""
        for name in self._names(contract.RECORDS_DIR):
            if name.endswith(".progress.jsonl"):
                self._note_pids(name)
        for rank in [rank for rank, pid in self._shims.items() if is_gone(pid)]:
            del self._shims[rank]
            if not os.path.exists(os.path.join(self._folder, contract.exit_file(rank))):
                self.lost_shims[rank] = time.time()

    def lost_folder(self) -> dict[str, Any] | None:
        """Return the first folder that the run needs and that no longer exists; None while all are there."""
        for what, path in self._needed.items():
            try:
                os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return {"what": what, "path": path, "time": time.time()}
            except OSError:  # a network that does not answer has removed nothing
                continue
        return None

    def processes(self) -> dict[str, Any]:
        """Return what the ranks' processes do, and which processes of the run are stopped."""
        return look_at_processes(self._id, ranks=self._ranks, shims=self._shims, closely=True)

    def dump_stacks(self, ranks: list[int]) -> None:
        """Read the stacks of ranks with py-spy, if this host has it; takes a few seconds at most."""
        try:
            with open(os.path.join(self._folder, contract.PLAN_FILE), encoding="utf-8") as file:
                py_spy = find_py_spy(json.load(file)["rank_command"][0])
        except (OSError, ValueError, LookupError, TypeError):
            return
        asked = {rank: pid for rank, pid in self._ranks.items() if rank in ranks}
        if py_spy is not None:
            dump_stacks(asked, run_id=self._id, run_folder=self._folder, py_spy=py_spy)

    def signal_ranks(self, ranks: list[int], number: int, *, marker: dict[str, Any] | None = None) -> None:
        """Send a signal to those of `ranks` whose processes run on this host.

        If there is a `marker`, it is written to the run's folder first, where ranks and shims find it.
        """
        if marker is not None:
            leave_stop_marker(self._folder, marker)
        for rank, pid in self._ranks.items():
            if rank in ranks:
                signal_process(pid, number, run_id=self._id)

    def tell(self, rank: int, message: bytes) -> None:
        """Pass an order of the coordinator to a worker of an elastic run, if it is one of this host's and takes it now."""
        if self.own([rank]):
            pass_order(self._scratch, rank, message)

    def own(self, ranks: list[int]) -> list[int]:
        """Return those of `ranks` that are this host's."""
        return [rank for rank in ranks if f"rank-{rank}" in self._own]

    def sweep(self) -> int:
        """Kill every process that still carries the run's id; returns how many there were."""
        return len(kill_run_processes(self._id, grace_s=_GRACE_S, daemons=self._daemons))

    def fence(self, reason: str) -> None:
        """Have every rank write its stacks, then kill every process of the run; its files stay on this host.

        Another host may already have started these ranks again, so no time is left for a graceful end. Only workers of an
        elastic run save their state first: they no longer take part in anything, and nobody has their numbers again.
        """
        self.signal_ranks(list(self._ranks), signal.SIGUSR2)
        time.sleep(_STACKS_S if self._ranks else 0.0)
        saving = [self._ranks[number] for number in order_to_save(self._scratch) if number in self._ranks]
        deadline = time.monotonic() + contract.SAVE_S
        while not all(map(is_gone, saving)) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        kill_run_processes(self._id, grace_s=0.0, daemons=self._daemons)
        with contextlib.suppress(OSError):
            for path in glob.glob(os.path.join(self._scratch, contract.FLIGHT_RECORDER_DIR, "rank-*.box")):
                os.makedirs(os.path.join(self._folder, contract.FLIGHT_RECORDER_DIR), exist_ok=True)
                shutil.copy(path, os.path.join(self._folder, contract.FLIGHT_RECORDER_DIR))
        leave_farewell(self._folder, reason)

    def remove_collected(self) -> None:
        """Remove the files of this host's ranks, all of which the launching machine has, and folders that are then empty."""
        shutil.rmtree(os.path.join(self._folder, contract.LAST_STATES_DIR), ignore_errors=True)
        for directory in (*_COLLECTED, contract.CHECKPOINTS_DIR, contract.FLIGHT_RECORDER_DIR):
            for base, _, names in os.walk(os.path.join(self._folder, directory), topdown=False):
                with contextlib.suppress(OSError):
                    for name in filter(self._is_own, names):
                        os.unlink(os.path.join(base, name))
                    os.rmdir(base)

    def _is_own(self, path: str) -> bool:
        return os.path.basename(path).partition(".")[0] in self._own

    def _names(self, directory: str) -> list[str]:
        try:
            return sorted(filter(self._is_own, os.listdir(os.path.join(self._folder, directory))))
        except OSError:
            return []

    def _pieces_of(self, name: str) -> Iterator[tuple[dict[str, Any], bytes]]:
        path = os.path.join(self._folder, name)
        whole = name.endswith(".json")
        try:
            if os.stat(path).st_size <= self._sent.get(name, 0):
                return
            with open(path, "rb") as file:
                file.seek(self._sent.get(name, 0))
                while piece := file.read(-1 if whole else PIECE):
                    offset = self._sent.get(name, 0)
                    self._sent[name] = offset + len(piece)
                    yield {"kind": "file", "name": name, "offset": offset, "whole": whole}, piece
        except FileNotFoundError:
            return

    def _shards(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield each complete shard of a checkpoint, then its record.

        A shard without a record is still being written. The launcher counts a shard only once it has the shard's record.
        """
        records = glob.glob(os.path.join(self._folder, contract.CHECKPOINTS_DIR, "step-*", "rank-*.json"))
        for record in sorted(filter(self._is_own, records)):
            for path in (record[: -len(".json")] + ".safetensors", record):
                yield from self._pieces_of(os.path.relpath(path, self._folder))

    def _changed_boxes(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        for base in (self._folder, self._scratch):  # the run's folder has the recorders of a run that was fenced
            boxes = glob.glob(os.path.join(base, contract.FLIGHT_RECORDER_DIR, "rank-*.box"))
            for path in sorted(filter(self._is_own, boxes)):
                name = os.path.relpath(path, base)
                with open(path, "rb") as file:
                    box = file.read()
                if self._boxes.get(name) != box:
                    self._boxes[name] = box
                    yield {"kind": "file", "name": name, "offset": 0, "whole": True}, box

    def _note_pids(self, name: str) -> None:
        """Learn the process ids of a rank and its shim from the first line of the rank's progress."""
        try:
            rank = int(name.rpartition("rank-")[2].partition(".")[0])
            if rank in self._ranks:
                return
            with open(os.path.join(self._folder, contract.RECORDS_DIR, name), "rb") as file:
                started = json.loads(file.readline())
            self._shims[rank], self._ranks[rank] = int(started["shim_pid"]), int(started["pid"])
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
        ):  # a rank can write anything into this file
            return
