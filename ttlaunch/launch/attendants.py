"""One attendant on each host of a run: started over the launcher's connection, it sends home what the ranks write there.

What comes is written into the run's folder on this machine byte for byte, so that whoever reads a run's records need
not know where its ranks ran. An attendant that falls silent, or whose connection ends, means that the host is lost.
"""

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch.errors import HostError, Trouble
from ttlaunch.launch.attendant_frames import AttendantEnded, FilePiece, Looked, ShimLost, parse_attendant_frame
from ttlaunch.launch.crew import Look, Losses, LostHost
from ttlaunch.launch.relay import Relay
from ttlaunch.launch.run_folder import RunFolder
from ttlaunch.launch.watch import RankState
from ttlaunch.remote.fleet import on_each
from ttlaunch.remote.frames import FrameStream
from ttlaunch.remote.pushed import explain_end, start_script
from ttlaunch.remote.transport import Transport

_START_S = 10.0
_SILENCE_S = 10.0  # an attendant says something every second
_END_S = 8.0
_TICK_S = 0.1


@dataclass
class Attendant:
    """An attendant at work.

    Attributes:
        clock_offset_s: How much later it is on the host than here, to within the time a message takes.
        last_heard: When something came from it, seconds since the epoch.
        killed: How many processes it had to kill; None until it has ended.
        is_cut: Whether we are to do as if its cable were cut.
        asked: The number of the last question how its ranks' processes are.
        looked: The last answer.
    """

    host: str
    stream: FrameStream
    clock_offset_s: float
    last_heard: float = field(default_factory=time.time)
    killed: int | None = None
    is_cut: bool = False
    asked: int | None = None
    looked: Looked | None = None
    lost_shims: dict[int, float] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)


def start_attendants(
    transports: Sequence[Transport], arguments: Mapping[str, Mapping[str, Any]], *, pythons: Sequence[str]
) -> dict[str, Attendant | HostError]:
    """Start one on every host at once.

    Args:
        transports: The hosts.
        arguments: By host: what `agent/attend.py` is to know.
        pythons: Interpreters to try first on a host.
    """

    def start(transport: Transport) -> Attendant:
        stream = start_script(
            transport,
            "attend",
            beside=("run_processes", "last_word", "spy"),
            arguments=arguments[transport.host],
            pythons=pythons,
            timeout_s=_START_S,
        )
        frame = stream.receive(timeout_s=_START_S)
        if frame is None:
            raise explain_end(stream, timeout_s=1.0) or HostError(transport.host, Trouble.LOST, "no attendant starts")
        header, _ = frame
        if header["kind"] == "refused":
            raise HostError(transport.host, Trouble.DISK, f"the run's folder cannot be made: {header['reason']}")
        return Attendant(transport.host, stream, float(header["time"]) - time.time())

    return {transport.host: answer for transport, answer in on_each(transports, start, timeout_s=2 * _START_S)}


class HostsCrew:
    """Attendants on all hosts of a run, and the relay that lets mpirun reach them."""

    looks_at_once = False

    def __init__(self, attendants: Sequence[Attendant], relay: Relay, folder: RunFolder) -> None:
        self.boxes = folder.path
        self._attendants = attendants
        self._relay = relay
        self._folder = folder
        self._lost: dict[str, LostHost] = {}
        self._unwritable: OSError | None = None
        for one in attendants:
            threading.Thread(target=self._listen, args=(one,), daemon=True).start()

    def settings(self, engine_name: str) -> Mapping[str, str]:
        return self._relay.settings(engine_name)

    def losses(self, ranks: Sequence[RankState]) -> Losses:  # noqa: ARG002 - attendants know by themselves
        unwritable, self._unwritable = self._unwritable, None
        if unwritable is not None:
            raise unwritable
        shims = {rank: when for one in self._attendants for rank, when in one.lost_shims.items()}
        return Losses(shims, dict(self._lost))

    def signal_ranks(
        self,
        ranks: Sequence[RankState],
        number: int,
        *,
        word: Mapping[str, Any] | None = None,
    ) -> None:
        for one in self._attendants:
            here = [state.row.rank for state in ranks if state.row.host == one.host and state.exit is None]
            if here and not one.is_cut:
                with contextlib.suppress(HostError):
                    one.stream.send({"kind": "signal", "ranks": here, "number": number, "word": word}, timeout_s=1.0)

    def cut(self, host: str) -> None:
        for one in self._attendants:
            if one.host == host:
                one.is_cut = True
                return
        raise ValueError(f"no rank of this run is on a host {host}")

    def look(self, ranks: Sequence[RankState], *, since: float) -> Look | None:
        hosts = {state.row.host for state in ranks if state.exit is None}
        number = int(since * 1000)
        answering = [one for one in self._attendants if one.host in hosts and one.host not in self._lost]
        for one in answering:
            if one.asked != number and not one.is_cut:
                one.asked = number
                with contextlib.suppress(HostError):
                    one.stream.send({"kind": "look", "number": number}, timeout_s=1.0)
        answers = [one.looked for one in answering if one.looked is not None and one.looked.number == number]
        if len(answers) < len(answering):
            return None
        stopped = frozenset(rank for answer in answers for rank in answer.stopped)
        return Look(stopped, {rank: count for answer in answers for rank, count in answer.faults.items()})

    def spy_on(self, ranks: Sequence[RankState]) -> None:
        """Returns at once."""
        for one in self._attendants:
            here = [state.row.rank for state in ranks if state.row.host == one.host and state.exit is None]
            if here and not one.is_cut:
                with contextlib.suppress(HostError):
                    one.stream.send({"kind": "spy", "ranks": here}, timeout_s=1.0)

    def end(self) -> int:
        """Tell every attendant to finish, at once, and wait until the last one has or is given up."""
        for one in [one for one in self._attendants if not one.is_cut]:
            with contextlib.suppress(HostError):
                one.stream.send({"kind": "end"}, timeout_s=1.0)
        ordered = time.time()
        for one in self._attendants:
            while not one.ended.wait(_TICK_S):
                if time.time() - max(ordered, one.last_heard) > _END_S:  # a large checkpoint may be on its way home
                    silent = f"it has not finished within {_END_S:g} s"
                    self._note_lost(one, HostError(one.host, Trouble.TIMED_OUT, silent))
                    break
            one.stream.process.kill()
        self._relay.close()
        return sum(one.killed or 0 for one in self._attendants)

    def _listen(self, one: Attendant) -> None:
        """Take in what an attendant sends until it has ended or is lost."""
        try:
            while one.killed is None:
                self._take(one, *one.stream.expect(timeout_s=_SILENCE_S))
        except HostError as error:
            self._note_lost(one, error)
        except ValueError as error:
            self._note_lost(one, HostError(one.host, Trouble.SCRIPT, f"what came from it is {error}"))
        except OSError as error:
            self._unwritable = error
        finally:
            one.ended.set()

    def _note_lost(self, one: Attendant, error: HostError) -> None:
        self._lost.setdefault(one.host, LostHost(error, one.last_heard))

    def _take(self, one: Attendant, header: dict[str, Any], body: bytes) -> None:
        if one.is_cut:
            if time.time() - one.last_heard > _SILENCE_S:
                raise HostError(one.host, Trouble.TIMED_OUT, f"no answer from it within {_SILENCE_S:g} s")
            return
        one.last_heard = time.time()
        match parse_attendant_frame(header):
            case FilePiece() as piece:
                write_piece(self._folder.file(piece.name), piece, body)
            case ShimLost(rank, seen):
                one.lost_shims.setdefault(rank, seen - one.clock_offset_s)
            case Looked() as looked:
                one.looked = looked
            case AttendantEnded(killed):
                one.killed = killed


def write_piece(path: Path, piece: FilePiece, body: bytes) -> None:
    """Write a piece of a host's file to its place here; records that appear whole there appear whole here.

    Raises:
        OSError: The disk here is full, or the like.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if piece.whole:
        unfinished = path.with_name(f"{path.name}.tmp")
        unfinished.write_bytes(body)
        unfinished.replace(path)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, body, piece.offset)
    finally:
        os.close(descriptor)
