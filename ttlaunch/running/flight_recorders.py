"""Read the ranks' flight recorders while ranks live, and keep them in the run folder if a run ends badly.

`last_operation` describes what a rank did last, for the report of a failure.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics.count import render_size
from ttlaunch.flight_recorder import (
    DONE,
    HEADER_BYTES,
    NO_BUCKET,
    SIZE,
    SKIPPED,
    VERBS,
    WORLD,
    Operation,
    Recording,
    is_header,
    read_recorder,
)
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.regular_files import read_regular
from ttlaunch.running.watch import RankState


@dataclass(frozen=True)
class LastOperation:
    """The last operation of a rank, as its flight recorder has it.

    Attributes:
        text: The whole description, such as `recv of 13.2 MB from rank 2 (aggregator), tag 3, …`.
        operation: The operation's name, such as `gradients`.
        verb: The kind of call, such as `recv`; empty for a collective operation of a group.
        peer: The other rank; -1 for all ranks of a group; -2 for any of several ranks.
        bucket: The number of the bucket; None for an operation without one.
        step: The step; 0 before the first.
        place: `file:line` of the recipe, None if it is not known.
        began_s: Seconds from the begin of the operation to the end of the run or the failure.
        ended_s: Seconds from the end of the operation to the same moment; None if the operation did not end.
    """

    text: str
    operation: str
    verb: str
    peer: int
    tag: int
    bytes: int
    bucket: int | None
    step: int
    place: str | None
    began_s: float
    ended_s: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_recorders(folder: Path, *, ranks: Iterable[int]) -> dict[int, Recording]:
    """Read the recordings of ranks below a folder, by rank; those without a usable recording are left out."""
    recordings = {}
    for rank in ranks:
        with contextlib.suppress(OSError):
            recording = read_recorder(read_regular(folder / contract.recorder_file(rank), most=SIZE + 1))
            if recording is not None:
                recordings[rank] = recording
    return recordings


class FollowedRecorders:
    """The flight recorders of ranks that live, looked at a few times a second.

    Cost: a look reads the header of each, 128 bytes. A recorder is parsed, which takes a hundred times as long, when somebody asks what is
    in it, and only once as long as it does not change.
    """

    def __init__(self, folder: Path) -> None:
        """Follow the recorders below a folder; none has been looked at."""
        self._folder = folder
        self._paths: dict[int, str] = {}
        self._headers: dict[int, bytes] = {}
        self._parsed: dict[int, tuple[bytes, Recording]] = {}

    def look(self, ranks: Iterable[int]) -> Mapping[int, bytes]:
        """Return the header of each usable recorder of these ranks, by rank: it is another one once the rank has entered anything."""
        self._headers = {}
        for rank in ranks:
            path = self._paths.get(rank) or self._paths.setdefault(
                rank, str(self._folder / contract.recorder_file(rank))
            )
            with contextlib.suppress(OSError):
                header = read_regular(path, most=HEADER_BYTES)
                if is_header(header):
                    self._headers[rank] = header
        return self._headers

    def recordings(self, ranks: Iterable[int] | None = None) -> dict[int, Recording]:
        """Return what is in the recorders that the last look found: of these ranks, or of all."""
        asked = self._headers.keys() if ranks is None else self._headers.keys() & set(ranks)
        changed = [rank for rank in asked if self._parsed.get(rank, (b"",))[0] != self._headers[rank]]
        for rank, recording in read_recorders(self._folder, ranks=changed).items():
            self._parsed[rank] = self._headers[rank], recording
        return {rank: self._parsed[rank][1] for rank in sorted(asked) if rank in self._parsed}


def keep_recorders(source: Path, run_folder: Path, *, world_size: int) -> None:
    """Copy the recordings of ranks that have ended into the run's folder, or as many of them as the disk can hold."""
    if source == run_folder:
        return
    for rank in range(world_size):
        with contextlib.suppress(OSError):
            data = read_regular(source / contract.recorder_file(rank), most=SIZE + 1)
            if len(data) == SIZE:
                (run_folder / contract.FLIGHT_RECORDER_DIR).mkdir(exist_ok=True)
                (run_folder / contract.recorder_file(rank)).write_bytes(data)


def drop_evidence(run_folder: Path, *, is_done: bool) -> None:
    """Remove empty files of stacks, and if the run is done, its recordings."""
    if is_done:
        shutil.rmtree(run_folder / contract.FLIGHT_RECORDER_DIR, ignore_errors=True)
    with contextlib.suppress(OSError):
        for path in (run_folder / contract.STACKS_DIR).iterdir():
            if not path.stat().st_size:
                path.unlink()
        (run_folder / contract.STACKS_DIR).rmdir()


def last_operations(run_folder: Path, ranks: Sequence[RankState], *, end: float | None) -> dict[int, LastOperation]:
    """Describe what each rank did last, from the recordings in a run's folder.

    Args:
        run_folder: The folder of a run that has ended.
        ranks: All ranks of the run.
        end: When the run failed or ended, seconds since the epoch; None for now.
    """
    roles = [state.row.role for state in ranks]
    offsets = {state.row.rank: state.clock_offset_s for state in ranks}
    found = {}
    for rank, recording in read_recorders(run_folder, ranks=range(len(ranks))).items():
        last = last_operation(recording, roles=roles, end=(time.time() if end is None else end) + offsets[rank])
        if last is not None:
            found[rank] = last
    return found


def last_operation(recording: Recording, *, roles: Sequence[str], end: float) -> LastOperation | None:
    """Describe the last operation of a rank; None if it has begun none, or if its role had returned.

    Args:
        recording: The rank's recording.
        roles: The roles of all ranks.
        end: When the run failed or ended, seconds since the epoch by the clock of the rank's host.
    """
    if not recording.operations or recording.phase == DONE:
        return None
    last = recording.operations[-1]
    if last.is_collective and last.tag == WORLD and not last.is_open and not last.place:
        return None  # the rank has joined the others, and begun nothing since
    began = max(0.0, end - recording.seconds(last.begun))
    ended = None if last.is_open else max(0.0, end - recording.seconds(last.ended))
    done = "" if ended is None else f" and done {ended:.1f} s"
    when = f"begun {began:.1f} s{done} before the end"
    return LastOperation(
        text=", ".join([describe_operation(last, roles=roles), when])
        + (f", at {short_place(last.place)}" if last.place else ""),
        operation=last.name,
        verb=VERBS[last.verb],
        peer=last.peer,
        tag=last.tag,
        bytes=last.nbytes,
        bucket=None if last.bucket == NO_BUCKET else last.bucket,
        step=last.step,
        place=last.place or None,
        began_s=round(began, 3),
        ended_s=None if ended is None else round(ended, 3),
    )


def describe_operation(operation: Operation, *, roles: Sequence[str]) -> str:
    """Describe an operation, such as `recv of 13.2 MB from rank 2 (aggregator), gradients, tag 3, bucket 1, step 7`."""
    if operation.is_collective:
        return describe_collective(operation)
    if operation.verb == SKIPPED:
        return f"{operation.name} skipped"
    way = "to" if operation.is_send else "from"
    role = f" ({roles[operation.peer]})" if 0 <= operation.peer < len(roles) else ""
    verb = VERBS[operation.verb] if operation.verb < len(VERBS) else VERBS[0]
    whom = "several ranks" if operation.is_for_any else f"rank {operation.peer}{role}"
    parts = [f"{verb} of {render_size(operation.nbytes)} {way} {whom}", operation.name]
    parts.append(f"tag {operation.tag}")
    parts += [f"bucket {operation.bucket}"] if operation.bucket != NO_BUCKET else []
    parts += [f"step {operation.step}"] if operation.step else []
    return ", ".join(parts)


def describe_collective(operation: Operation) -> str:
    """Describe a collective operation of a group, such as `torch's all_reduce of 13.2 MB, bucket 1, step 7`."""
    parts = [f"{operation.name} of {render_size(operation.nbytes)}" if operation.nbytes else operation.name]
    parts += [f"bucket {operation.bucket}"] if operation.bucket != NO_BUCKET else []
    parts += [f"step {operation.step}"] if operation.step else []
    return ", ".join(parts)


def short_place(place: str) -> str:
    """Shorten `/path/to/trainer.py:41` to `trainer.py:41`."""
    return place.rpartition("/")[2]
