"""Find the checkpoint to resume from: the newest complete one, and why newer ones cannot be used.

Somebody else may have made a checkpoint, so its manifest is parsed like a record, and only files that are named like shards
are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.parser import (
    LONGEST_RECORD,
    BadRecord,
    Count,
    Json,
    Number,
    Size,
    Step,
    Tag,
    Text,
    Word,
    load,
    parse,
    record,
    shown,
)
from ttlaunch.records.regular_files import open_regular, read_regular
from ttlaunch.running.checkpoints.complete import (
    complete_checkpoints,
    manifest_digest,
    mark_later_checkpoints,
    missing_shards,
)
from ttlaunch.running.checkpoints.last_states import take_in_last_state
from ttlaunch.running.checkpoints.suspect import last_clean, suspicion
from ttlaunch.running.checkpoints.tensor_file import TensorFileError, parse_header
from ttlaunch.running.runs.facts import RunFacts
from ttlaunch.running.runs.files import read_object
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch
from ttlaunch.system_reason import system_reason

LATEST = "latest"
_SHARD = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.safetensors")


@record
class _File:
    """The entry of a manifest about a shard."""

    size: Size
    sha256: Word
    tensors: tuple[Word, ...] = ()


@record
class _EarlyStop:
    best: Number | None
    misses: Count
    step: Tag


@record
class _LossScaler:
    """The state of a loss scaler, or instead the open steps of an asynchronous server, which has no loss scaler."""

    scale: Number | None = None
    good_steps: Count | None = None
    skipped: Count | None = None
    open_steps: tuple[Step, ...] | None = None


@record
class _State:
    """The state of training besides the tensors."""

    data: dict[str, Json]
    early_stop: _EarlyStop | None = None
    loss_scaler: _LossScaler | None = None


@record
class _Manifest:
    """`manifest.json` of a checkpoint, as `complete.py` writes it."""

    format: Count
    step: Step
    recipe: Word = ""
    config: dict[str, Json]
    text_sha256: Word | None = None
    began_from: Text | None = None
    saved_by: Text | None = None
    state: _State
    files: dict[str, _File]
    sha256: Word


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files all agree with its manifest."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that cannot be used, and the reason as a clause."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Doubt:
    """An audit whose result the launcher of a run did not live to act upon.

    Attributes:
        step: The audited step.
        clean: The last step before it whose audit was clean; None: there was none.
        has_failed: Whether two ranks disagreed; if not, it is not known whether they did.
    """

    step: int
    clean: int | None
    has_failed: bool = False

    def __str__(self) -> str:
        what = "found a rank that computes wrong" if self.has_failed else "was under way when the launcher was killed"
        return f"the audit of step {self.step} {what}, and {last_clean(self.clean)}"


@dataclass
class Search:
    """The result of a search for a checkpoint.

    Attributes:
        checkpoint: The newest usable checkpoint; None if there is none.
        passed_over: Newer checkpoints that cannot be used.
        runs: The run folders that were searched.
    """

    checkpoint: Checkpoint | None = None
    passed_over: list[PassedOver] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)


def find_checkpoint(where: str, *, runs_folder: Path, working_folder: Path) -> Search:
    """Verify the checkpoints that `--resume` names, newest first, until one is usable.

    Args:
        where: `latest` for the newest of all runs; a run's id; or the path of a run's folder, of its folder of checkpoints, or
            of one checkpoint, which may be a copy with any name.
        runs_folder: The folder that contains the runs.
        working_folder: The folder to which relative paths are relative.
    """
    search = Search()
    if where == LATEST:
        search.runs = sorted(_subfolders(runs_folder), reverse=True)
    else:
        places = [path for path in (runs_folder / where, working_folder / where) if path.is_dir()]
        place = places[0].resolve() if places else None
        if place is not None and (
            place.parent.name == contract.CHECKPOINTS_DIR or os.path.lexists(place / contract.CHECKPOINT_MANIFEST)
        ):
            doubt = _doubt_about(place.parent.parent) if place.parent.name == contract.CHECKPOINTS_DIR else None
            _try(search, places[0], doubt=doubt)
            return search
        search.runs = [place.parent] if place and place.name == contract.CHECKPOINTS_DIR else places[:1]
    for run in search.runs:
        doubt = _doubt_about(run)
        for path in _newest_first(run, search):
            _try(search, path, step=_step(path), doubt=doubt)
            if search.checkpoint is not None:
                return search
    return search


def verify(path: Path) -> Checkpoint | str:
    """Verify the checkpoint at a path by reading every file; return what is wrong with it if it cannot be used."""
    if path.name.endswith(contract.UNFINISHED_SUFFIX):
        ranks = ", ".join(str(rank) for rank in missing_shards(path))
        return f"it was not finished: no shard of rank {ranks}" if ranks else "it was not finished"
    if (why := suspicion(path)) is not None:
        return why
    try:
        manifest = _read_manifest(path)
        if isinstance(manifest, BadRecord):
            return manifest.reason
        # All headers first: they are short, and hashing the shards may take minutes.
        for name, expected in manifest["files"].items():
            _check_shard(path / name, size=expected["size"])
        for name, expected in manifest["files"].items():
            with open_regular(path / name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{name} was changed: its SHA-256 differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename}: {system_reason(error)}"
    except TensorFileError as error:
        return str(error)
    return Checkpoint(path, manifest)


def _read_manifest(folder: Path) -> dict[str, Any] | BadRecord:
    """Read and check the manifest of a checkpoint; return its JSON object, or what is wrong with it.

    Raises:
        OSError: The manifest cannot be read.
    """
    name = contract.CHECKPOINT_MANIFEST
    content = load(read_regular(folder / name, most=LONGEST_RECORD + 1))
    other = content.get("format") if isinstance(content, dict) else None
    if type(other) is int and other != contract.CHECKPOINT_FORMAT:
        return BadRecord(f"its format is {shown(other)}, this version reads {contract.CHECKPOINT_FORMAT}")
    manifest = content if isinstance(content, BadRecord) else parse(_Manifest, content)
    if isinstance(manifest, BadRecord):
        return BadRecord(f"{name} cannot be read as a manifest: {manifest.reason}")
    scaler = manifest.state.loss_scaler
    if scaler is not None and scaler.open_steps is None and None in {scaler.scale, scaler.good_steps, scaler.skipped}:
        return BadRecord(f"{name} cannot be read as a manifest: `state.loss_scaler` lacks a value")
    if manifest.sha256 != manifest_digest(content):
        return BadRecord(f"{name} was changed: its SHA-256 differs")
    stranger = next((file for file in manifest.files if not _SHARD.fullmatch(file)), None)
    if stranger is not None or not manifest.files:
        return BadRecord(
            f"{name} names {shown(stranger) if manifest.files else 'no file'}, expected names such as `rank-0.safetensors`"
        )
    found: dict[str, Any] = content
    return found


def _check_shard(path: Path, *, size: int) -> None:
    """Check that a shard is a safetensors file with the size in the manifest.

    Raises:
        OSError: The shard cannot be read, or is no regular file.
        TensorFileError: The shard is no safetensors file, or has another size.
    """
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise TensorFileError(f"{path.name} has {found} bytes, the manifest has {size}")
        try:
            parse_header(file, path)
        except TensorFileError as error:
            raise TensorFileError(f"{path.name}: {error}") from error


def _try(search: Search, path: Path, *, step: int | None = None, doubt: Doubt | None = None) -> None:
    """Verify a checkpoint and add the result to the search; if `step` is given, the manifest must have this step."""
    answer = verify(path)
    if isinstance(answer, Checkpoint) and doubt is not None and answer.step > (doubt.clean or 0):
        answer = f"it is in doubt: {doubt}"
    if isinstance(answer, Checkpoint) and step not in {None, answer.step}:
        answer = f"its {contract.CHECKPOINT_MANIFEST} is that of step {answer.step}"
    if isinstance(answer, Checkpoint):
        search.checkpoint = answer
    else:
        search.passed_over.append(PassedOver(path, answer))


def _newest_first(run: Path, search: Search) -> list[Path]:
    """List the checkpoints of a run, newest first, after completing those whose shards or whose saved state is whole."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if any(path.name.endswith(contract.UNFINISHED_SUFFIX) for path in _subfolders(run / contract.CHECKPOINTS_DIR)):
            _complete_abandoned(run)
    search.passed_over += [PassedOver(one.path, one.reason) for one in take_in_last_state(run)]
    found = {path: _step(path) for path in _subfolders(run / contract.CHECKPOINTS_DIR)}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: -(found[path] or 0))


def _complete_abandoned(run: Path) -> None:
    """Complete the checkpoints whose shards have all arrived, in a run whose launcher was killed or that had none.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: The folder is not that of a run.
    """
    plan = read_object(run / contract.PLAN_FILE)
    watch = _read_records(run, plan)
    watch.replicas.settle({})
    complete_checkpoints(run, plan, run_id=run.name, replicas=watch.replicas)


def _doubt_about(run: Path) -> Doubt | None:
    """Return why checkpoints of a run may be wrong that nobody has marked, because its launcher was killed; None if they are not.

    If the records have an audit that failed, later checkpoints get their marks now.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if os.path.lexists(run / contract.REPORT_FILE):
            return None  # the launcher has marked them before it wrote this
        plan = read_object(run / contract.PLAN_FILE)
        interval = plan["config"]["training_config"]["audit_interval"]
        if not isinstance(interval, int) or interval < 1:
            return None
        watch = _read_records(run, plan)
        audits, done = watch.audits, max((state.step for state in watch.ranks), default=0)
        if audits.disputed is not None:
            with contextlib.suppress(OSError):  # where no mark can be written, the doubt is enough
                mark_later_checkpoints(RunFolder(run.name, run), audits)
            return Doubt(audits.disputed.step, audits.clean, has_failed=True)
        # All ranks compare before any of them ends the step, so a step that one has ended had a clean audit.
        if audits.unsettled is not None and audits.unsettled > done:
            return Doubt(audits.unsettled, audits.clean)
        is_over = done >= max((state.total_steps or 0 for state in watch.ranks), default=0)
        if (done + 1) % interval == 0 and not is_over and (audits.clean or 0) <= done:
            return Doubt(done + 1, audits.clean)
    return None


def _read_records(run: Path, plan: Mapping[str, Any]) -> Watch:
    rows = tuple(RankRow(rank, "", rank, "") for rank in range(plan["world_size"]))  # nothing here needs more of them
    watch = Watch(RunFacts(run.name, "", rows, is_recipe=True), RunFolder(run.name, run))
    watch.read_all()
    return watch


def _step(path: Path) -> int | None:
    number = path.name.removesuffix(contract.UNFINISHED_SUFFIX).removeprefix("step-")
    return int(number) if number.isdecimal() else None


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
