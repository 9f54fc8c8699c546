"""Find the checkpoint to resume from: the newest one that is whole, and why newer ones were passed over."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints, manifest_digest, missing_shards

LATEST = "latest"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint every file of which is as its manifest says."""

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


@dataclass
class Search:
    """The result of a search for a checkpoint.

    Attributes:
        checkpoint: None if there is none that is whole.
        runs: Run folders that were looked into.
    """

    checkpoint: Checkpoint | None = None
    passed_over: list[PassedOver] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)


def find_checkpoint(where: str, *, runs_folder: Path, working_folder: Path) -> Search:
    """Look for what `--resume` names, newest first, until one is whole.

    Args:
        where: `latest`: of all runs; a run's id; or the path of a run's folder, of its folder of checkpoints, or of one
            checkpoint, which may have been copied there under any name.
        runs_folder: The folder that contains the runs.
        working_folder: The folder that relative paths start from.
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
            _try(search, places[0])
            return search
        search.runs = [place.parent] if place and place.name == contract.CHECKPOINTS_DIR else places[:1]
    for run in search.runs:
        for path in _newest_first(run):
            _try(search, path, step=_step(path))
            if search.checkpoint is not None:
                return search
    return search


def verify(path: Path) -> Checkpoint | str:
    """Verify the checkpoint at a path by reading every file; return what is wrong with it if it is not whole."""
    if path.name.endswith(contract.UNFINISHED_SUFFIX):
        ranks = ", ".join(str(rank) for rank in missing_shards(path))
        return f"it was not finished: no shard of rank {ranks}" if ranks else "it was not finished"
    try:
        manifest = json.loads((path / contract.CHECKPOINT_MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != contract.CHECKPOINT_FORMAT:
            return f"its format is {manifest['format']}, this version reads {contract.CHECKPOINT_FORMAT}"
        if manifest["sha256"] != manifest_digest(manifest):
            return f"{contract.CHECKPOINT_MANIFEST} was changed: its SHA-256 differs"
        for name, expected in manifest["files"].items():
            reason = _compare(path / name, expected)
            if reason is not None:
                return reason
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{contract.CHECKPOINT_MANIFEST} cannot be read as a manifest"
    return Checkpoint(path, manifest)


def _compare(path: Path, expected: Mapping[str, Any]) -> str | None:
    size = path.stat().st_size
    if size != expected["size"]:
        return f"{path.name} has {size} bytes, the manifest has {expected['size']}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == expected["sha256"] else f"{path.name} was changed: its SHA-256 differs"


def _try(search: Search, path: Path, *, step: int | None = None) -> None:
    """Verify a checkpoint and add it to the search; it must be of `step` if that is given."""
    answer = verify(path)
    if isinstance(answer, Checkpoint) and step not in {None, answer.step}:
        answer = f"its {contract.CHECKPOINT_MANIFEST} is that of step {answer.step}"
    if isinstance(answer, Checkpoint):
        search.checkpoint = answer
    else:
        search.passed_over.append(PassedOver(path, answer))


def _newest_first(run: Path) -> list[Path]:
    """List the checkpoints of a run, newest first, after completing those whose shards have all arrived."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        plan = json.loads((run / contract.PLAN_FILE).read_text(encoding="utf-8"))
        complete_checkpoints(run, plan, run_id=run.name)
    found = {path: _step(path) for path in _subfolders(run / contract.CHECKPOINTS_DIR)}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: -(found[path] or 0))


def _step(path: Path) -> int | None:
    number = path.name.removesuffix(contract.UNFINISHED_SUFFIX).removeprefix("step-")
    return int(number) if number.isdecimal() else None


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
