"""Take in the states that workers of an elastic run saved from memory when the run had lost its coordinator.

    last_states/step-37/   rank-2.safetensors   rank-2.json         what a worker wrote, see `runtime/checkpoint/last_state.py`
                           rank-5.json                              what another host said of the same step
    last_states/step-37/   rank-0.safetensors   rank-0.json         or, where no worker has all: the slot that worker 0 owns
                           rank-1.safetensors   rank-1.json         and so on, for each of the owners that all these records name
    checkpoints/step-37/   rank-2.safetensors   manifest.json       the checkpoint that this becomes

Workers may have been killed while they wrote, and hosts may send anything, so nothing is used that is not whole: the record is parsed,
the SHA-256 is compared, and records of several hosts must agree.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import listed
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.records.endings import ShardRecord
from ttlaunch.records.parser import LONGEST_RECORD, BadRecord, read
from ttlaunch.records.regular_files import open_regular, read_regular
from ttlaunch.running.checkpoints.complete import complete_saved, newest_step
from ttlaunch.running.checkpoints.tensor_file import TensorFileError, parse_header
from ttlaunch.running.runs.files import read_object
from ttlaunch.system_reason import system_reason

_STEP = quick_pattern(r"step-([1-9][0-9]{0,17})")
_RECORD = quick_pattern(r"rank-(0|[1-9][0-9]{0,8})\.json")
_MOST_RECORDS, _MOST_NAMES = 4096, 4


@dataclass(frozen=True)
class Refused:
    """A saved state that cannot be used, and the reason as a clause."""

    path: Path
    reason: str


@dataclass(frozen=True)
class _Saved:
    """A state whose files are whole.

    Attributes:
        records: By the number of the worker that has it, or of the one that owns a slot of it.
    """

    folder: Path
    step: int
    records: Mapping[int, ShardRecord]


def take_in_last_state(run: Path) -> list[Refused]:
    """Make a checkpoint of the newest state that workers of a run have saved from memory, if it is newer than all checkpoints.

    Args:
        run: The folder of a run that has ended, on this machine.

    Returns:
        The states that are newer and cannot be used.
    """
    refused = []
    newest = newest_step(run) or 0
    for step, folder in sorted(saved_steps(run).items(), reverse=True):
        if step <= newest:
            break
        try:
            plan = read_object(run / contract.PLAN_FILE)
            found = _checked(folder, step, plan)
            if not isinstance(found, str):
                _make_checkpoint(run, plan, found)
                break
        except (OSError, TensorFileError) as error:
            found = system_reason(error)
            if isinstance(error, OSError):
                found = f"{Path(error.filename or folder).name}: {found}"
        except (ValueError, KeyError, TypeError, AttributeError):
            found = f"{contract.PLAN_FILE} of its run is no plan"
        refused.append(Refused(folder, found))
    return refused


def saved_steps(run: Path) -> dict[int, Path]:
    """Return the folders of the states that lie in a run's folder, by step, also of those that are not whole."""
    try:
        entries = list((run / contract.LAST_STATES_DIR).iterdir())
    except OSError:
        return {}
    # One that a killed worker has left counts only where no whole one has the same step.
    found: dict[int, Path] = {}
    for path in sorted(entries, key=lambda path: path.suffix != contract.UNFINISHED_SUFFIX):
        match = _STEP.fullmatch(path.name.removesuffix(contract.UNFINISHED_SUFFIX))
        if match and path.is_dir() and not path.is_symlink():
            found[int(match[1])] = path
    return found


def whole_steps(run: Path) -> list[int]:
    """Return the steps of the states in a run's folder that have all their records; the shards are not looked at."""
    found = {step: records_in(folder) for step, folder in saved_steps(run).items() if not folder.suffix}
    return [step for step, records in found.items() if any(not missing for missing in _missing(records).values())]


def records_in(folder: Path) -> Mapping[int, ShardRecord]:
    """Return the records of a saved state, by number; nothing if one of them, or the folder, cannot be read."""
    try:
        records = _records(folder)
    except OSError:
        return {}
    return {} if isinstance(records, str) else records


def _missing(records: Mapping[int, ShardRecord]) -> dict[tuple[int, ...], list[int]]:
    """Return the owners whose shards are missing, for all owners that some record names."""
    found = {}
    for owners in {one.owners for one in records.values()}:
        has = {number for number, one in records.items() if one.owners == owners}
        found[owners] = [number for number in owners if number not in has]
    return found


def _checked(folder: Path, step: int, plan: Mapping[str, Any]) -> _Saved | str:
    """Check all that a folder has, and return a whole state, or the one with the lowest number; or what is wrong, as a clause.

    Raises:
        OSError: A file cannot be read.
        TensorFileError: The shard is no safetensors file.
    """
    if folder.name.endswith(contract.UNFINISHED_SUFFIX):
        return "it was not finished: its worker was killed while it wrote"
    records = _records(folder)
    if isinstance(records, str):
        return records
    if (most := max(records)) >= plan["world_size"]:
        return f"{contract.worker_name(most)} is none of the run's {plan['world_size']} workers"
    alone = {number: one for number, one in records.items() if len(one.owners) == 1}
    return _checked_slots(folder, step, records) if not alone else _checked_copies(folder, step, alone)


def _checked_slots(folder: Path, step: int, records: Mapping[int, ShardRecord]) -> _Saved | str:
    """Return the slots of a saved state, checked, or why they cannot be used; of two cuts of the state, the one that is whole."""
    missing = _missing(records)
    owners = min(missing, key=lambda owners: len(missing[owners]))
    if missing[owners]:
        names = listed([contract.worker_name(number) for number in missing[owners][:_MOST_NAMES]], last="and", quote="")
        return f"what {names} owned of the state is missing"
    slots = {number: records[number] for number in owners}
    states = [one.state for one in slots.values()]
    if any(state != states[0] for state in states):
        return "its workers have saved different states of training"
    for number, record in slots.items():
        if not (path := folder / contract.shard_file(number)).exists():
            return f"{path.name} is missing"
        _check_shard(path, record)
    return _Saved(folder, step, slots)


def _checked_copies(folder: Path, step: int, records: Mapping[int, ShardRecord]) -> _Saved | str:
    """Return one of the copies of a saved state, checked, or why none can be used."""
    first = min(records)
    for number, record in records.items():
        if (record.sha256, record.state) != (records[first].sha256, records[first].state):
            names = " and ".join(map(contract.worker_name, (first, number)))
            return f"{names} have saved different bits of the same step"
    whole = next((number for number in sorted(records) if (folder / contract.shard_file(number)).exists()), None)
    if whole is None:
        return f"{contract.shard_file(first)} is missing"
    _check_shard(folder / contract.shard_file(whole), records[whole])
    return _Saved(folder, step, {whole: records[whole]})


def _records(folder: Path) -> dict[int, ShardRecord] | str:
    """Return the records in a folder, at least one, by the number of the worker; or what is wrong with one, as a clause.

    Raises:
        OSError: A file cannot be read.
    """
    records: dict[int, ShardRecord] = {}
    for path in sorted(folder.iterdir())[:_MOST_RECORDS]:
        match = _RECORD.fullmatch(path.name)
        if match is None:
            continue
        record = read(ShardRecord, read_regular(path, most=LONGEST_RECORD + 1))
        if isinstance(record, BadRecord):
            return f"{path.name} cannot be used: {record.reason}"
        if int(match[1]) not in record.owners or len(set(record.owners)) < len(record.owners):
            return f"{path.name} names other owners of the state than its own worker"
        records[int(match[1])] = record
    return records or "it has no record"


def _check_shard(path: Path, record: ShardRecord) -> None:
    """Compare a shard with its record.

    Raises:
        OSError: The shard cannot be read.
        TensorFileError: It is no safetensors file, or another one than that of the record.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.size:
            raise TensorFileError(f"{path.name} has {size} bytes, its record has {record.size}")
        if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
            raise TensorFileError(f"{path.name} was changed: its SHA-256 differs")
        file.seek(0)
        try:
            parse_header(file, path)
        except TensorFileError as error:
            raise TensorFileError(f"{path.name}: {error}") from error


def _make_checkpoint(run: Path, plan: Mapping[str, Any], saved: _Saved) -> None:
    kept = {name for number in saved.records for name in (contract.shard_file(number), contract.shard_record(number))}
    for path in saved.folder.iterdir():
        if path.name not in kept:
            path.unlink()
    first = min(saved.records)
    where = f"{contract.worker_name(first)} on {plan['ranks'][first]['host']}"
    if len(saved.records) > 1:  # a shadow may have saved what another worker owned
        where = "the run's workers"
    contract.make_private_folder(run / contract.CHECKPOINTS_DIR)
    complete_saved(run, saved.folder, plan, step=saved.step, records=saved.records, saved_by=where)
