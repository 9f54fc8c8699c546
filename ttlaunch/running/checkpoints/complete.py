"""Complete the checkpoints of a run as their shards arrive, and remove those that are no longer kept.

Ranks write shards where they run, and hosts send theirs to the launching machine. Only the launcher knows when all have
arrived, so it makes `step-N/` of `step-N.tmp/`: it flushes every file to the disk, then the manifest, and then renames the
folder. If the launcher is killed at any moment, a folder without `.tmp` is complete. A run without a launcher leaves folders
that are completed when a later run resumes from it.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ttlaunch import contract
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.records.endings import ShardRecord
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.running.audits import AuditWatch
from ttlaunch.running.bad_records import BadLine, Complain, pass_over
from ttlaunch.running.checkpoints.suspect import is_suspect, mark_suspect
from ttlaunch.running.logs.output import View
from ttlaunch.running.replicas import ReplicaWatch
from ttlaunch.running.runs.files import open_unlinked, read_file
from ttlaunch.running.runs.provenance import provenance_of_next
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import RankState
from ttlaunch.system_reason import system_reason

_TICK_S = 0.2
_STEP = quick_pattern(r"step-([0-9]+)\Z")
_REMOVED_SUFFIX = ".removed"
_SHARD = quick_pattern(r"rank-([0-9]{1,9})\.json\Z")


class CheckpointKeeper:
    """Completes and removes checkpoints of one run, in a thread of its own; a context manager starts and ends the thread.

    Attributes:
        lost: By step, why a checkpoint whose shards had all arrived could not be completed. Only filled if the configuration
            lets training continue without it.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        *,
        ranks: Sequence[RankState] = (),
        replicas: ReplicaWatch | None = None,
        audits: AuditWatch | None = None,
        complain: Complain = pass_over,
    ) -> None:
        """Prepare the thread, which starts when this object is entered.

        Args:
            plan: The run's plan.
            folder: The run's folder.
            ranks: The states of the ranks, which `Watch` keeps up to date.
            replicas: Has the digests of the ranks, which `Watch` keeps up to date, too.
            audits: Knows the last clean audit; None: there are none.
            complain: Called with each shard's record that cannot be used.
        """
        self._folder, self._complain, self._ranks = folder, complain, ranks
        self._audits = audits
        self._plan = plan.as_json()
        # Ranks that cannot have the same tensors report no digests.
        self._replicas = replicas if self._plan["world_size"] > 1 else None
        self._config = (self._plan["config"] or {}).get("checkpoint_config")  # None: ranks write no checkpoints
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="checkpoints", daemon=True)
        self._error: OSError | None = None
        self.lost: dict[int, str] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def check(self) -> None:
        """Raise the error that ended the thread, if one did.

        Raises:
            OSError: A file could not be written, for example because the disk is full.
        """
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Complete all checkpoints that have arrived; call it when no rank and no host sends any more."""
        self._over.set()
        self._thread.join()
        self.check()
        self._sweep()
        # A folder whose shards have arrived and that is still unfinished has replicas that differ, or a step that the ranks
        # of other hosts have not reached. Remove it, so that no later run completes it.
        for step, folder in sorted(_folders(self._folder.path, contract.UNFINISHED_SUFFIX)):
            shards = _arrived(folder, world_size=self._plan["world_size"], complain=pass_over)
            if shards and self._replicas is not None and not self._replicas.has_agreed(step, shards):
                append_event(self._folder, "checkpoint_differs", step=step)
                remove_unfinished(self._folder.path, steps=[step])
            elif shards and not is_reached(step, shards, ranks=self._ranks):
                name = f"{contract.CHECKPOINTS_DIR}/{folder.name}/{contract.shard_record(min(shards))}"
                self._complain(BadLine(min(shards), name, None, f"no rank on another host has come to step {step}"))
                remove_unfinished(self._folder.path, steps=[step])

    def _watch(self) -> None:
        try:
            while not self._over.wait(_TICK_S):
                self._sweep()
        except OSError as error:
            self._error = error

    def _sweep(self) -> None:
        if self._config is None:
            return
        may_continue = self._config["on_error"] == "continue"
        lose = self.lost.setdefault if may_continue else None
        run_id, path = self._folder.run_id, self._folder.path
        for step in complete_checkpoints(
            path,
            self._plan,
            run_id=run_id,
            lose=lose,
            complain=self._complain,
            ranks=self._ranks,
            replicas=self._replicas,
        ):
            append_event(self._folder, "checkpoint", step=step)
            proven = self._audits.clean if self._audits is not None else None
            keep, keep_every = self._config["keep"], self._config["keep_every"]
            remove_old(self._folder.path, keep=keep, keep_every=keep_every, proven=proven)


def complete_checkpoints(
    run_folder: Path,
    plan: Mapping[str, Any],
    *,
    run_id: str,
    lose: Callable[[int, str], object] | None = None,
    complain: Complain = pass_over,
    ranks: Sequence[RankState] = (),
    replicas: ReplicaWatch | None = None,
) -> list[int]:
    """Make a checkpoint of every folder whose shards have all arrived.

    Args:
        run_folder: The run's folder on this machine.
        plan: The content of the run's `plan.json`.
        run_id: The run's name.
        lose: Called with the step of each checkpoint that cannot be completed, and the reason; its folder is removed.
        complain: Called with each shard's record that cannot be used; its checkpoint is not completed.
        ranks: The states of the ranks, or nothing if they are not known. A step that they have not reached is not completed.
        replicas: What is known of the digests of the ranks; a step is completed only after they agreed. None: they are not
            compared.

    Returns:
        The steps of the new checkpoints, in order.

    Raises:
        OSError: A file cannot be written, and `lose` is None.
    """
    done = []
    for step, folder in sorted(_folders(run_folder, contract.UNFINISHED_SUFFIX)):
        shards = _arrived(folder, world_size=plan["world_size"], complain=complain)
        if shards is None or not is_reached(step, shards, ranks=ranks):
            continue
        if replicas is not None and not replicas.has_agreed(step, shards):
            continue
        if (
            run_folder / contract.checkpoint_dir(step)
        ).exists():  # two workers have saved it, the second in place of the first
            remove_unfinished(run_folder, steps=[step])
            continue
        try:
            _complete(run_folder, folder, {"run": run_id, "step": step, **_joined(shards)}, plan=plan)
        except OSError as error:
            if lose is None or not folder.exists():
                raise
            lose(step, f"{error.filename or folder}: {system_reason(error)}")
            remove_unfinished(run_folder, steps=[step])
        else:
            done.append(step)
    return done


def complete_saved(
    run_folder: Path,
    folder: Path,
    plan: Mapping[str, Any],
    *,
    step: int,
    records: Mapping[int, ShardRecord],
    saved_by: str,
) -> None:
    """Make a checkpoint of a folder with shards that together have everything; the caller has checked the files.

    Args:
        run_folder: The run's folder on this machine, which has a folder of checkpoints.
        folder: The shards' folder, on the same file system; its name becomes that of the checkpoint.
        plan: The content of the run's `plan.json`.
        step: The steps in the state.
        records: The record of each shard, by the rank whose it is.
        saved_by: Where the state comes from, for the reports of runs that begin from it.

    Raises:
        OSError: A file cannot be written.
    """
    about = {"run": run_folder.name, "step": step, "saved_by": saved_by}
    _complete(run_folder, folder, {**about, **_joined(records)}, plan=plan)


def is_reached(step: int, owners: Collection[int], *, ranks: Sequence[RankState]) -> bool:
    """Whether the run can have come to the step of a checkpoint that these owners have written.

    A record names all owners, so one host could make up a checkpoint of its own. If all shards come from one host of several,
    the reports of ranks on the others decide, once there are any. An asynchronous server is ahead of its workers' reports by
    up to one step a worker.
    """
    hosts = {state.row.host for state in ranks if state.row.rank in owners}
    others = [state.step for state in ranks if state.row.host not in hosts]
    if len(hosts) > 1 or not others:
        return True
    return (max(others) or max(state.step for state in ranks)) >= step - len(ranks)


def newest_step(run_folder: Path) -> int | None:
    """Return the step of the newest checkpoint of a run that is not suspect; None if it has none."""
    return max((step for step, folder in _folders(run_folder, "") if not is_suspect(folder)), default=None)


def mark_later_checkpoints(folder: RunFolder, audits: AuditWatch) -> None:
    """Mark the checkpoints after the last clean audit as suspect, if an audit has failed.

    Raises:
        OSError: A mark cannot be written.
    """
    if audits.disputed is None:
        return
    both = [*_folders(folder.path, ""), *_folders(folder.path, contract.UNFINISHED_SUFFIX)]
    steps = mark_suspect(both, failed=audits.disputed.step, clean=audits.clean, run_id=folder.run_id)
    append_event(folder, "checkpoints_suspect", steps=list(steps), clean=audits.clean)


def remove_unfinished(run_folder: Path, *, steps: Collection[int]) -> None:
    """Remove the unfinished folders of checkpoints that cannot become complete; call it when no rank writes to them any more."""
    for step, folder in _folders(run_folder, contract.UNFINISHED_SUFFIX):
        if step in steps:
            shutil.rmtree(folder, ignore_errors=True)


def remove_old(run_folder: Path, *, keep: int, keep_every: int | None, proven: int | None = None) -> None:
    """Remove all checkpoints but the newest `keep`, and those whose step `keep_every` divides.

    `proven` is the step of the last clean audit: the newest checkpoint up to it stays, too, because a run whose next audit fails goes
    back to it.
    """
    steps = sorted(step for step, _ in _folders(run_folder, ""))
    spared = max((step for step in steps if proven is not None and step <= proven), default=None)
    for step in steps[:-keep]:
        if step != spared and (keep_every is None or step % keep_every):
            folder = run_folder / contract.checkpoint_dir(step)
            # Renamed first, so that a half-removed folder is never taken for a checkpoint.
            folder.rename(folder.with_name(folder.name + _REMOVED_SUFFIX))
    for _, folder in _folders(run_folder, _REMOVED_SUFFIX):
        shutil.rmtree(folder, ignore_errors=True)


def manifest_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content without the field that contains this digest."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def missing_shards(folder: Path) -> list[int]:
    """Return the ranks whose shard of an unfinished checkpoint is missing or incomplete; every record names all owners."""
    return _missing(folder, _records(folder, world_size=None, complain=pass_over))


def _missing(folder: Path, records: Mapping[int, ShardRecord]) -> list[int]:
    owners = {rank for record in records.values() for rank in record.owners}
    return sorted(rank for rank in owners if rank not in records or not _is_whole(folder, rank, records[rank]))


def _arrived(folder: Path, *, world_size: int, complain: Complain) -> dict[int, ShardRecord] | None:
    records = _records(folder, world_size=world_size, complain=complain)
    whole = [rank for rank, record in records.items() if record.owners == (rank,) and _is_whole(folder, rank, record)]
    if whole:  # of an elastic run, in which another worker may have saved the step, too, or ended while it did
        return {min(whole): records[min(whole)]}
    return records if records and not _missing(folder, records) else None


def _records(folder: Path, *, world_size: int | None, complain: Complain) -> dict[int, ShardRecord]:
    """Return the usable records of shards, by rank; `world_size` is None if the number of ranks is not known."""
    found = {}
    for path in sorted(folder.glob("rank-*.json")):
        named = _SHARD.match(path.name)
        rank = int(named[1]) if named else -1
        data = read_file(path) if rank >= 0 and (world_size is None or rank < world_size) else None
        if data is None:
            continue
        record = _checked(read(ShardRecord, data), world_size)
        if isinstance(record, BadRecord):
            name = f"{contract.CHECKPOINTS_DIR}/{folder.name}/{path.name}"
            complain(BadLine(rank, name, None, record.reason))
        else:
            found[rank] = record
    return found


def _checked(record: ShardRecord | BadRecord, world_size: int | None) -> ShardRecord | BadRecord:
    """Return the record if it names only ranks of the run, else what is wrong."""
    if isinstance(record, BadRecord) or world_size is None or all(rank < world_size for rank in record.owners):
        return record
    return BadRecord(f"`owners` names rank {max(record.owners)} of {world_size}")


def _is_whole(folder: Path, rank: int, record: ShardRecord) -> bool:
    try:
        return (folder / contract.shard_file(rank)).stat().st_size == record.size
    except OSError:
        return False


def _about(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a manifest that comes from the plan; a run that resumes must agree with some of these values."""
    data = plan.get("data") or {}
    return {
        "format": contract.CHECKPOINT_FORMAT,
        "plan": plan["hash"],
        "recipe": plan["recipe"]["name"],
        "layout": plan["layout"],
        "world_size": plan["world_size"],
        "config": plan["config"],
        "text_sha256": data.get("sha256"),
        "began_from": (plan.get("start") or {}).get("origin"),
    }


def _joined(records: Mapping[int, ShardRecord]) -> dict[str, Any]:
    files = {
        contract.shard_file(rank): {"size": one.size, "sha256": one.sha256, "tensors": list(one.tensors)}
        for rank, one in sorted(records.items())
    }
    return {"state": records[_first_with_weights(records)].state, "files": files}


def _provenance(run_folder: Path, plan: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chain of the checkpoints from which one was computed, as its manifest has it."""
    before = max(((step, path) for step, path in _folders(run_folder, "") if step < content["step"]), default=None)
    return provenance_of_next(run_folder, plan, content, before=before and before[1])


def _first_with_weights(records: Mapping[int, ShardRecord]) -> int:
    """Return the lowest rank whose shard has weights: a rank with only optimizer state may not know the training's state."""
    prefix = contract.OPTIMIZER_PREFIX
    owners = [rank for rank, record in records.items() if not all(name.startswith(prefix) for name in record.tensors)]
    return min(owners or records)


def _complete(run_folder: Path, folder: Path, content: dict[str, Any], *, plan: Mapping[str, Any]) -> None:
    content |= _about(plan)
    content |= _provenance(run_folder, plan, content)
    # The order matters: after a power failure a manifest must never name a file whose bytes are not on the disk, and the
    # name without `.tmp` must never appear before the manifest.
    for name in content["files"]:
        _flush(folder / name)
    content["sha256"] = manifest_digest(content)
    manifest = folder / contract.CHECKPOINT_MANIFEST
    with open(manifest, "w", encoding="utf-8", opener=open_unlinked) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    _flush(manifest)
    _flush(folder)
    whole = folder.rename(run_folder / contract.checkpoint_dir(content["step"]))
    _flush(run_folder / contract.CHECKPOINTS_DIR)
    # Remove the records only now: if the launcher is killed before the rename, a later run completes the folder from them. Other
    # files are those of a worker that ended while it wrote.
    for path in whole.glob("rank-*"):
        if path.name not in content["files"]:
            path.unlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(run_folder: Path, suffix: str) -> Iterator[tuple[int, Path]]:
    """Yield step and path of each checkpoint folder whose name ends with a suffix."""
    try:
        entries = list((run_folder / contract.CHECKPOINTS_DIR).iterdir())
    except FileNotFoundError:
        return
    for path in entries:
        match = _STEP.match(path.name.removesuffix(suffix)) if path.name.endswith(suffix) else None
        if match and not path.is_symlink():  # never complete or remove a folder through somebody else's link
            yield int(match[1]), path


class LostCheckpoints:
    """Reports the checkpoints that a run has lost, if the configuration lets it continue without them.

    Attributes:
        reasons: By step, which file could not be written, and why.
    """

    def __init__(self, view: View) -> None:
        self.reasons: dict[int, str] = {}
        self._view = view

    def notice(self, ranks: Iterable[RankState], uncompleted: Mapping[int, str]) -> None:
        """Report checkpoints that were lost since the last call.

        Args:
            ranks: The ranks, which report shards that they could not write; several of one checkpoint count as one loss.
            uncompleted: By step, why a checkpoint could not be completed although its shards had arrived.
        """
        for losses in (*(state.lost_checkpoints for state in ranks if state.lost_checkpoints), uncompleted):
            for step, reason in dict(losses).items():
                if step not in self.reasons:
                    self.reasons[step] = reason
                    line = f"warning[R032]: step {step} has no checkpoint: {reason}"
                    self._view.output("stderr", clean(line).encode())

    def clean_up(self, run_folder: Path) -> dict[int, str]:
        """Remove the unfinished folders of lost checkpoints, and return the reasons in the order of steps."""
        remove_unfinished(run_folder, steps=self.reasons)
        return dict(sorted(self.reasons.items()))
