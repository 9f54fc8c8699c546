"""Before a run resumes from an elastic run that has lost its coordinator: collect what workers saved from memory on other hosts.

    host 1: last_states/step-37/  --record-->  choose the newest step     --shard-->  runs/ID/last_states/step-37/
    host 2: last_states/step-36/  --record-->                                         runs/ID/checkpoints/step-37/

On this machine the states lie in the run's folder already. Of a state that no worker has as a whole, hosts have slots, one of each owner
is collected. After a state has become a checkpoint, hosts remove theirs.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.reach import connect_all, open_transports
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Diagnostic, Severity, counted, listed, shown
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.local import is_this_machine
from ttlaunch.hosts.transport.pushed import start_script
from ttlaunch.hosts.transport.transport import CONNECT_S, Transport
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.endings import ShardRecord
from ttlaunch.records.host_scripts import SavedState, SavedStates, Unreadable
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.running.checkpoints.complete import newest_step
from ttlaunch.running.checkpoints.last_states import records_in, take_in_last_state, whole_steps
from ttlaunch.running.runs.facts import LATEST, find_run, run_folders
from ttlaunch.running.runs.files import read_object, read_object_if_any
from ttlaunch.running.runs.launcher import read_launcher
from ttlaunch.spec.topology.model import Topology
from ttlaunch.system_reason import system_reason

_WAIT_S = contract.LEASE_S + contract.AFTER_LEASE_S + contract.SAVE_S  # until workers that nobody supervises have ended
_ANSWER_S = 10.0
_SLOWEST_BYTES_PER_S = 1e6
_MOST_FRAMES = 1100
_LONGEST = 300


@dataclass(frozen=True)
class _Offer:
    """A state on a host, or a slot of one, by its record; `number` is that of its worker, or of the slot's owner."""

    transport: Transport
    step: int
    number: int
    record: ShardRecord
    text: bytes


def collect_states(spec: RunSpec, dialogue: Dialogue, *, working_folder: Path | None = None) -> None:
    """Make a checkpoint of the newest state that a lost run's workers saved on their hosts, if `--resume` names such a run.

    Call it before `prepare`, in the process that the user started. Nothing is connected unless the run was elastic, had workers on
    other hosts, and neither lives nor has ended as it should.

    Args:
        spec: The specification of the run to start; its hosts and logins are used.
        dialogue: Is told what cannot be collected, and what is waited for.
        working_folder: The folder to which relative paths are relative; None for the current folder.
    """
    working_folder = working_folder or Path.cwd()
    run = _lost_run(spec, working_folder) if spec.resume is not None else None
    if run is None:
        return
    rows = read_object(run / contract.PLAN_FILE)["ranks"]
    away = {row["host"] for row in rows if not is_this_machine(row["host"])}
    topology = resolve(replace(spec, resume=None), working_folder=working_folder, dialogue=dialogue).topology
    if not away or topology is None:
        return  # what is wrong with the specification is said when it is prepared
    hosts = tuple(host for host in topology.hosts if host.name in away)
    troubles = dict.fromkeys(away - {str(host.name) for host in hosts}, "it is none of the hosts of this run")
    numbers = {host: {row["rank"] for row in rows if row["host"] == host} for host in away}
    with _reached(replace(topology, hosts=hosts), dialogue, troubles) as transports:
        dialogue.waiting(f"asking {counted(len(transports), 'host')} for states that workers of {run.name} saved")
        _Collection(run, topology, transports, numbers, troubles, world_size=len(rows)).collect()
    if troubles:
        dialogue.warn([_not_collected(run, troubles)])


def _lost_run(spec: RunSpec, working_folder: Path) -> Path | None:
    """Return the folder of the run to resume from if it was elastic and has lost its supervisor, or all of its hosts."""
    from ttlaunch.app.named_run import name_run

    runs = working_folder / spec.runs_dir
    if spec.resume == LATEST:
        for run in reversed(run_folders(runs)):
            if _is_lost(run):
                return run
            if newest_step(run) is not None:
                return None
        return None
    path: Path | Diagnostic | None = find_run(str(spec.resume), runs_folder=runs, working_folder=working_folder)
    path = path or name_run(str(spec.resume), runs_dir=spec.runs_dir, working_folder=working_folder)
    return path if isinstance(path, Path) and _is_lost(path) else None


def _is_lost(run: Path) -> bool:
    try:
        plan, report = read_object(run / contract.PLAN_FILE), read_object_if_any(run / contract.REPORT_FILE)
        launcher = read_launcher(run)
    except (OSError, ValueError, TypeError, KeyError):
        return False
    is_over = bool(report) and report.get("failure") is None
    return plan.get("elastic") is not None and not is_over and not (launcher and launcher.is_alive)


@contextmanager
def _reached(topology: Topology, dialogue: Dialogue, troubles: dict[str, str]) -> Iterator[list[Transport]]:
    """Connect to the hosts that answer, and note why others do not."""
    transports, keys = open_transports(topology)
    try:
        with dialogue.connecting([transport.host for transport in transports]) as advance:
            reached = connect_all(transports, keys, dialogue, answered=advance)
        troubles.update({host: error.evidence for host, error in reached.errors.items()})
        yield reached.transports
    finally:
        for transport in transports:
            transport.close()


class _Collection:
    """The states that some hosts have of one run."""

    def __init__(  # noqa: PLR0917 - only this module makes one
        self,
        run: Path,
        topology: Topology,
        transports: Sequence[Transport],
        numbers: dict[str, set[int]],
        troubles: dict[str, str],
        *,
        world_size: int,
    ) -> None:
        self._run, self._transports, self._troubles = run, transports, troubles
        self._numbers, self._world_size = numbers, world_size
        self._pythons = [topology.cluster.python] if topology.cluster.python else []
        self._question: dict[str, Any] = {"remote_folder": topology.cluster.remote_folder, "run_id": run.name}

    def collect(self) -> None:
        offers = [offer for found in self._ask(self._list, timeout_s=_WAIT_S + _ANSWER_S) for offer in found]
        newest = max(newest_step(self._run) or 0, max(whole_steps(self._run), default=0))
        for step in sorted({offer.step for offer in offers if offer.step > newest}, reverse=True):
            if self._take([offer for offer in offers if offer.step == step]):
                take_in_last_state(self._run)
                if newest_step(self._run) == step:
                    self._ask(self._remove, timeout_s=_ANSWER_S)
                    return

    def _take(self, offers: Sequence[_Offer]) -> bool:
        """Get what makes a state of a step whole; returns whether it has come."""
        alone = [offer for offer in offers if len(offer.record.owners) == 1]
        if alone:
            return self._take_copy(alone)
        return any(
            self._take_slots([offer for offer in offers if offer.record.owners == owners])
            for owners in sorted({offer.record.owners for offer in offers})
        )

    def _take_slots(self, offers: Sequence[_Offer]) -> bool:
        """Get those slots of a state that this machine does not have; returns whether all are there."""
        step, owners = offers[0].step, offers[0].record.owners
        folder = self._run / contract.last_state_dir(step)
        here = {number for number, record in records_in(folder).items() if record.owners == owners}
        by_number = {number: [offer for offer in offers if offer.number == number] for number in owners}
        if any(not by_number[number] for number in owners if number not in here):
            return False
        for number, same in by_number.items():
            if len({one.record.sha256 for one in same}) > 1:
                names = listed([one.transport.host for one in same], last="and", quote="")
                for one in same:
                    self._troubles[one.transport.host] = f"{names} have saved different bits of step {step}"
                return False
            if number in here:
                continue
            try:
                contract.make_private_folder(folder.parent)
                contract.make_private_folder(folder)
                source = next((offer for offer in same if self._has_come(offer, folder)), None)
                if source is None:
                    return False
                _write(folder / contract.shard_record(number), [source.text])
            except OSError as error:
                self._no_room(same[0], error)
                return False
        return True

    def _take_copy(self, offers: Sequence[_Offer]) -> bool:
        """Get one shard and all records of a step; returns whether a whole one has come."""
        folder = self._run / contract.last_state_dir(offers[0].step)
        unfinished = folder.with_name(folder.name + contract.UNFINISHED_SUFFIX)
        try:
            contract.make_private_folder(folder.parent)
            shutil.rmtree(unfinished, ignore_errors=True)
            contract.make_private_folder(unfinished)
            if not any(self._has_come(offer, unfinished) for offer in offers):
                shutil.rmtree(unfinished, ignore_errors=True)
                return False
            for offer in offers:
                _write(unfinished / contract.shard_record(offer.number), [offer.text])
            unfinished.rename(folder)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            self._no_room(offers[0], error)
            return False
        return True

    def _no_room(self, offer: _Offer, error: OSError) -> None:
        reason = f"{error.filename or self._run}: {system_reason(error)}"
        self._troubles[offer.transport.host] = f"the state of step {offer.step} has no room here: {reason}"

    def _has_come(self, offer: _Offer, folder: Path) -> bool:
        """Copy a shard from its host; note why if it is not what its record says.

        Raises:
            OSError: It cannot be written here.
        """
        host, digest = offer.transport.host, hashlib.sha256()
        timeout_s = _ANSWER_S + offer.record.size / _SLOWEST_BYTES_PER_S

        def pieces() -> Iterator[bytes]:
            stream = self._start(offer.transport, ask="send", step=offer.step, number=offer.number)
            size = 0
            while True:
                header, body = stream.expect(timeout_s=timeout_s)
                if header.get("kind") != "piece":
                    break
                size += len(body)
                if size > offer.record.size:
                    raise HostError(host, Trouble.SCRIPT, "its shard is longer than its record says")
                digest.update(body)
                yield body
            if header.get("kind") == "unreadable":
                raise HostError(host, Trouble.SCRIPT, stream.checked(Unreadable, header).reason)
            if header.get("kind") != "sent" or digest.hexdigest() != offer.record.sha256:
                raise HostError(
                    host, Trouble.SCRIPT, "its shard was changed: its SHA-256 differs from that of its record"
                )

        try:
            _write(folder / contract.shard_file(offer.number), pieces())
        except HostError as error:
            self._troubles[host] = f"the state of step {offer.step} cannot be used: {error.evidence}"
            (folder / contract.shard_file(offer.number)).unlink(missing_ok=True)
            return False
        return True

    def _ask(self, work: "Callable[[Transport], list[_Offer]]", *, timeout_s: float) -> "list[list[_Offer]]":
        found = []
        for transport, answer in on_each(self._transports, work, timeout_s=timeout_s + CONNECT_S):
            if isinstance(answer, HostError):
                self._troubles[transport.host] = answer.evidence
            else:
                found.append(answer)
        return found

    def _list(self, transport: Transport) -> list[_Offer]:
        stream = self._start(transport, ask="list", wait_s=_WAIT_S)
        offers = []
        for _ in range(_MOST_FRAMES):
            header, body = stream.expect(timeout_s=_WAIT_S + _ANSWER_S)
            if header.get("kind") != "state":
                break
            state, record = stream.checked(SavedState, header), read(ShardRecord, body)
            if isinstance(record, BadRecord) or not self._can_have(transport.host, state.number, record):
                reason = record.reason if isinstance(record, BadRecord) else "it has no such worker"
                self._troubles[transport.host] = f"the state of step {state.step} cannot be used: {reason}"
            else:
                offers.append(_Offer(transport, state.step, state.number, record, body))
        if header.get("kind") == "unreadable":
            raise HostError(transport.host, Trouble.SCRIPT, stream.checked(Unreadable, header).reason)
        states = stream.checked(SavedStates, header)
        if states.is_running:
            self._troubles[transport.host] = "processes of this run are still alive there"
        elif states.unfinished and max(states.unfinished) > max((offer.step for offer in offers), default=0):
            self._troubles[transport.host] = f"the state of step {max(states.unfinished)} was not finished"
        return offers

    def _can_have(self, host: str, number: int, record: ShardRecord) -> bool:
        """Whether a worker of this host can have saved this: its own state, or a slot of which it is owner or shadow."""
        if len(record.owners) == 1:
            return number in self._numbers[host]
        return number in record.owners and all(owner < self._world_size for owner in record.owners)

    def _remove(self, transport: Transport) -> list[_Offer]:
        self._start(transport, ask="remove").expect(timeout_s=_ANSWER_S)
        return []

    def _start(self, transport: Transport, **asked: Any) -> FrameStream:
        return start_script(
            transport,
            "last_states",
            beside=("run_processes",),
            arguments={**self._question, **asked},
            pythons=self._pythons,
            timeout_s=_ANSWER_S,
        )


def _write(path: Path, pieces: "Iterator[bytes] | Sequence[bytes]") -> None:
    with open(path, "wb", opener=contract.open_private) as file:
        file.writelines(pieces)


def _not_collected(run: Path, troubles: dict[str, str]) -> Diagnostic:
    names = listed(sorted(troubles), last="and", quote="")
    message = f"a newer state of {run.name} may be on {names}, and cannot be collected"
    notes = tuple(f"{host}: {shown(reason, longest=_LONGEST)}" for host, reason in sorted(troubles.items()))
    hints = (
        "once this is repaired, the same command takes it; steps since the newest checkpoint are otherwise done again",
    )
    return Diagnostic("P085", message, notes=notes, hints=hints, severity=Severity.WARNING)
