"""Looks after one run on one host, beside its ranks, for as long as the launching machine holds the connection.

It makes the run's folder, keeps the code from being pruned, sends home what shims and ranks write there as it grows,
and in the end kills whatever still carries the run's id. When the connection ends, for whatever reason, so does the run
on this host: nobody would be left to tell the user what it does.

Frames to it: `signal` (send `number` to `ranks`, after leaving `word` if there is one), `end` (finish, sweep, leave). Frames from it: `ready`, `file` (a piece of a file), `lost_shim`, `alive`
(once a second), `ended`. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import sys
import time

from ttlaunch import contract
from ttlaunch.agent.last_word import leave_word
from ttlaunch.agent.run_processes import (
    is_gone,
    is_stopped,
    kill_run_processes,
    page_faults,
    processes_of_runs,
    signal_process,
)
from ttlaunch.agent.spy import find_py_spy, spy_on

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any

_TICK_S = 0.05
_ALIVE_S = 1.0
_BOXES_S = 5.0
_MOMENT_S = 0.5  # ranks that mpirun has just told to end get so long before they are killed
_PIECE = 1024 * 1024
_KEPT_RUNS = 20
_CLAIM = "attended"


def main(arguments: dict[str, Any]) -> int:
    """Attend the run that the arguments describe until an `end` frame or the end of the connection.

    Args:
        arguments: `run_id`; `folder`: the run's folder, absolute; `files`: name to text; `scratch`: a folder for
            sockets and shared memory, absolute; `lock`: a file to lock, shared, while the run lives; `others`: whether
            other runs' folders may be tidied up; `plan_hash`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        held = _prepare(arguments)
    except OSError as error:
        _send({"kind": "refused", "reason": f"{error.filename or arguments['folder']}: {error.strerror or error}"})
        return 1
    run = _Run(arguments["run_id"], arguments["folder"], arguments["scratch"])
    _send({"kind": "ready", "time": time.time(), "pid": os.getpid()})
    try:
        ordered = _attend(run)
        killed = run.sweep()
        run.send_new()
        run.send_boxes()
        if ordered:
            _send({"kind": "ended", "killed": len(killed)})
            run.remove_collected()
    except OSError:  # the launching machine no longer listens
        run.sweep()
    finally:
        shutil.rmtree(arguments["scratch"], ignore_errors=True)
        for descriptor in held:
            os.close(descriptor)
    return 0


def _prepare(arguments: dict[str, Any]) -> list[int]:
    """Make the folders and files of the run; the descriptors returned keep its code locked."""
    folder = arguments["folder"]
    held = []
    if arguments.get("lock"):
        held.append(os.open(arguments["lock"], os.O_RDWR | os.O_CREAT, 0o644))
        fcntl.flock(held[0], fcntl.LOCK_SH)
    _prune(os.path.dirname(folder))
    for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    os.chmod(folder, 0o700)
    for name, text in arguments["files"].items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    held.append(_claim(arguments["scratch"]))
    return held


def _claim(scratch: str) -> int:
    """Make the run's folder in shared memory, and remove those of runs whose attendant was killed.

    The descriptor holds a lock for as long as we live, by which others see that the folder is in use.
    """
    for path in glob.glob(os.path.join(os.path.dirname(scratch), "ttl-*", _CLAIM)):
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        except OSError:  # in use, somebody else's, or gone meanwhile
            continue
    os.makedirs(scratch, mode=0o700, exist_ok=True)
    descriptor = os.open(os.path.join(scratch, _CLAIM), os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # somebody else attends in the same folder and keeps it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _prune(runs: str) -> None:
    """Remove the oldest folders of runs that are over; their content has long been sent home."""
    if not os.path.isdir(runs):
        return
    ids = sorted(name for name in os.listdir(runs) if os.path.isdir(os.path.join(runs, name)))
    old = ids[:-_KEPT_RUNS]
    alive = {run_id for _, run_id in processes_of_runs()} if old else set()
    for run_id in old:
        if run_id not in alive:
            shutil.rmtree(os.path.join(runs, run_id), ignore_errors=True)


def _attend(run: _Run) -> bool:
    """Send what is new until told to end (True) or until nobody listens any more (False)."""
    stdin = sys.stdin.buffer
    last_alive = last_boxes = time.monotonic()
    while True:
        ready, _, _ = select.select([stdin], [], [], _TICK_S)
        if ready:
            try:
                frame = contract.read_frame(lambda size: os.read(stdin.fileno(), size))
            except (EOFError, ValueError):
                return False
            if frame is None or frame[0].get("kind") == "end":
                return frame is not None
            _obey(run, frame[0])
        run.send_new()
        for rank in run.lost_shims():
            _send({"kind": "lost_shim", "rank": rank, "time": time.time()})
        if time.monotonic() - last_alive >= _ALIVE_S:
            last_alive = time.monotonic()
            _send({"kind": "alive", "time": time.time()})
        if time.monotonic() - last_boxes >= _BOXES_S:
            last_boxes = time.monotonic()
            run.send_boxes()


def _obey(run: _Run, header: dict[str, Any]) -> None:
    kind = header.get("kind")
    if kind == "signal":
        run.signal_ranks(header.get("ranks"), header.get("number"), word=header.get("word"))
    elif kind == "look":
        run.look(header.get("number"))
    elif kind == "spy":
        run.spy_on(header.get("ranks"))


def _send(header: dict[str, Any], body: bytes = b"") -> None:
    data = memoryview(contract.pack_frame(header, body))
    while data:
        data = data[os.write(1, data) :]


class _Run:
    """The run on this host: its files and its processes."""

    def __init__(self, run_id: str, folder: str, scratch: str) -> None:
        self._id = run_id
        self._folder = folder
        self._scratch = scratch
        self._boxes: dict[str, bytes] = {}  # as they were sent
        self._sent: dict[str, int] = {}
        self._shims: dict[int, int] = {}  # rank to the process id of its shim
        self._ranks: dict[int, int] = {}  # rank to its own process id

    def send_new(self) -> None:
        """Send what has been added to logs and progress, and records and shards that have appeared."""
        for directory in (contract.LOGS_DIR, contract.RECORDS_DIR, contract.STACKS_DIR):
            try:
                names = sorted(os.listdir(os.path.join(self._folder, directory)))
            except OSError:
                continue
            for name in names:
                if not name.endswith((".tmp", ".unfinished")):
                    self._send_file(f"{directory}/{name}")
        self._send_shards()

    def send_boxes(self) -> None:
        """Send the ranks' black boxes that have changed since."""
        for path in sorted(glob.glob(os.path.join(self._scratch, contract.BLACKBOX_DIR, "rank-*.box"))):
            name = os.path.relpath(path, self._scratch)
            with open(path, "rb") as file:
                box = file.read()
            if self._boxes.get(name) != box:
                self._boxes[name] = box
                _send({"kind": "file", "name": name, "offset": 0, "whole": True}, box)

    def _send_shards(self) -> None:
        """Send each shard of a checkpoint that is whole, then its record, and remove both: they are safe at home.

        A shard without a record is still being written; one whose record has not arrived counts as never written.
        """
        for record in sorted(glob.glob(os.path.join(self._folder, contract.CHECKPOINTS_DIR, "step-*", "rank-*.json"))):
            shard = record[: -len(".json")] + ".safetensors"
            for path in (shard, record):
                self._send_file(os.path.relpath(path, self._folder))
            for path in (record, shard):
                os.unlink(path)

    def _send_file(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        whole = name.endswith(".json")
        offset = self._sent.get(name, 0)
        try:
            if os.stat(path).st_size <= offset:
                return
            with open(path, "rb") as file:
                file.seek(offset)
                while True:
                    piece = file.read(-1 if whole else _PIECE)
                    if not piece:
                        break
                    _send({"kind": "file", "name": name, "offset": offset, "whole": whole}, piece)
                    self._note_pids(name, piece)
                    offset += len(piece)
        except FileNotFoundError:
            return
        self._sent[name] = offset

    def _note_pids(self, name: str, piece: bytes) -> None:
        """Learn the process ids of a rank and its shim from the first line of the rank's progress."""
        if not name.endswith(".progress.jsonl") or self._sent.get(name):
            return
        try:
            rank = int(name.rpartition("rank-")[2].partition(".")[0])
            started = json.loads(piece.split(b"\n", 1)[0])
            self._shims[rank], self._ranks[rank] = (int(started[name]) for name in ("shim_pid", "pid"))
        except (ValueError, KeyError, TypeError):
            return

    def lost_shims(self) -> list[int]:
        """Ranks whose shim is gone without having written how its rank ended, each reported once."""
        lost = [rank for rank, pid in self._shims.items() if is_gone(pid)]
        for rank in lost:
            del self._shims[rank]
        return [rank for rank in lost if not os.path.exists(os.path.join(self._folder, contract.exit_file(rank)))]

    def sweep(self) -> list[int]:
        """Kill what still carries the run's id, and say which processes."""
        return kill_run_processes(self._id, moment_s=_MOMENT_S)

    def signal_ranks(self, ranks: Any, number: Any, *, word: Any = None) -> None:
        """Send a signal to those of the ranks that have been started here, and to nothing else.

        A `word` for the ranks, an object, is first left in the run's folder. What is no signal is ignored.
        """
        if not isinstance(ranks, list) or not isinstance(number, int) or number not in set(signal.Signals):
            return
        if isinstance(word, dict):
            leave_word(self._folder, word)
        for rank, pid in self._ranks.items():
            if rank in ranks:
                signal_process(pid, number, run_id=self._id)

    def look(self, number: Any) -> None:
        """Send what is new, black boxes included, and then how the ranks' processes are; the answer carries the number."""
        self.send_new()
        self.send_boxes()
        stopped = [rank for rank, pid in self._ranks.items() if is_stopped(pid)]
        faults = [[rank, page_faults(pid)] for rank, pid in self._ranks.items()]
        _send({"kind": "looked", "number": number, "stopped": stopped, "faults": faults})

    def spy_on(self, ranks: Any) -> None:
        """Have the stacks of ranks read from outside, where that can be done; takes a few seconds at most."""
        try:
            with open(os.path.join(self._folder, contract.PLAN_FILE), encoding="utf-8") as file:
                py_spy = find_py_spy(json.load(file)["rank_command"][0])
        except (OSError, ValueError, LookupError):
            return
        asked = {rank: pid for rank, pid in self._ranks.items() if isinstance(ranks, list) and rank in ranks}
        if py_spy is not None:
            spy_on(asked, run_id=self._id, run_folder=self._folder, py_spy=py_spy)

    def remove_collected(self) -> None:
        """Remove logs and records: the launching machine has them."""
        for directory in (contract.LOGS_DIR, contract.RECORDS_DIR, contract.STACKS_DIR, contract.CHECKPOINTS_DIR):
            shutil.rmtree(os.path.join(self._folder, directory), ignore_errors=True)
