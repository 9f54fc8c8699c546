"""Compute a checkpoint again, from the one before it or from where its training began, and compare every byte of its tensors."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.find_start import search_checkpoint
from ttlaunch.app.named_run import name_run
from ttlaunch.diagnostics import Diagnostic, LaunchError, counted, shown
from ttlaunch.lab.replay import Replay, mismatch_diagnostics, nearest_checkpoint, prepare_replay, replay_steps
from ttlaunch.lab.repro import read_origin_of
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.replay import ReplayOrder
from ttlaunch.running.checkpoints.resume import Checkpoint, verify
from ttlaunch.running.checkpoints.tensor_difference import read_tensors
from ttlaunch.running.checkpoints.tensor_values import have_same_bytes
from ttlaunch.running.runs.files import read_object_if_any
from ttlaunch.running.runs.provenance import (
    KEY,
    Conditions,
    Provenance,
    conditions_of,
    contradictions,
    read_provenance,
    state_of,
)
from ttlaunch.running.runs.record_inputs import cpu_class

CODE = "R092"
EQUAL, DIFFERENT, TAMPERED, FAILED, UNKNOWN = "equal", "different", "tampered", "failed", "unknown"
WHOLE, ABSENT = "whole", "absent"
_LONGEST = 300
_MOST_NAMED = 3
_MOST_RUNS = 1000
_NAMES_OF_CONDITIONS = {
    "code": "code of the recipe",
    "ttlaunch": "ttlaunch itself",
    "configuration": "configuration",
    "data": "training text",
    "libraries": "libraries",
    "cpu": "class of the processor",
    "start": "checkpoint that it began from",
}


@dataclass(frozen=True)
class Interval:
    """Steps of one run, computed again up to a checkpoint.

    Attributes:
        run: The run.
        began: The steps that were done where the computation began.
        checkpoint: The checkpoint where it began; None for the beginning of a training.
        step: The step of the checkpoint that was computed.
        compared: The number of its tensors that were computed again; 0 if only digests were compared.
        others: Those with other bits.
        state_differs: Whether what else training goes on from, such as the position in the data, is another.
        replay: The digests and numbers that were compared on the way.
    """

    run: str
    began: int
    checkpoint: str | None
    step: int
    compared: int
    others: tuple[str, ...]
    state_differs: bool
    replay: Replay

    @property
    def verdict(self) -> str:
        """What the interval proves of the checkpoint: `equal`, `different`, `failed` or `unknown`."""
        if self.replay.fell_short:
            return FAILED
        if self.others or self.state_differs or self.replay.agreement.mismatches:
            return DIFFERENT
        return EQUAL if self.compared or self.replay.verdict == EQUAL else UNKNOWN


@dataclass(frozen=True)
class Verified:
    """What is known of a checkpoint after it was computed again.

    Attributes:
        path: The checkpoint.
        step: Its step.
        run: The run that has made it; None if nothing says so.
        chain: Its chain; None if it has none or a wrong one.
        chain_state: `whole`; `absent`, if an older ttlaunch has made it; `tampered`.
        problems: What contradicts its provenance, as clauses.
        notes: What else there is to know, as clauses: predecessors that are gone, conditions that are others here.
        intervals: What was computed again, oldest first; empty if nothing could be.
    """

    path: Path
    step: int
    run: str | None
    chain: Provenance | None
    chain_state: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    intervals: tuple[Interval, ...]

    @property
    def verdict(self) -> str:
        """`equal`, `different`, `tampered`, `failed` or `unknown`, if nothing could be computed again."""
        found = [one.verdict for one in self.intervals]
        for verdict in (DIFFERENT, FAILED):
            if verdict in found:
                return verdict
        if self.problems:
            return TAMPERED
        return UNKNOWN if UNKNOWN in found or not found else EQUAL

    @property
    def began(self) -> int | None:
        """The step from which on all was computed again; None if nothing was."""
        return self.intervals[0].began if self.intervals else None


def verify_checkpoint(
    where: str,
    dialogue: Dialogue,
    *,
    runs_dir: Path,
    working_folder: Path,
    run: str | None = None,
    from_start: bool = False,
    env: Sequence[str] = (),
) -> Verified:
    """Check the chain of a checkpoint, and compute it again from the one before it, or from where its training began.

    Args:
        where: `latest`, a run, or the path of a checkpoint.
        dialogue: Gets warnings, for example of code that has changed.
        runs_dir: The folder of runs.
        working_folder: The folder to which relative paths are relative.
        run: The run that has made the checkpoint, if its folder is elsewhere.
        from_start: Whether everything is computed again, in all runs of the chain that are here.
        env: Variables for the ranks, as `--env` has them.

    Raises:
        LaunchError: There is no such checkpoint, its files are damaged, or its run cannot be replayed.

    Cost: the steps that are computed, in one process, and on the disk for temporary files a second copy of the checkpoint.
    """
    checkpoint, found = search_checkpoint(where, runs_dir=working_folder / runs_dir, working_folder=working_folder)
    if checkpoint is None:
        raise LaunchError(found)
    dialogue.warn(found)
    folder = _folder_of_run(checkpoint, run, runs_dir=runs_dir, working_folder=working_folder)
    known, problems = check_chain(checkpoint, folder)
    notes = list(_other_conditions(known.own_conditions)) if known is not None else []
    intervals, more = _compute_all(checkpoint, folder, dialogue, from_start=from_start, env=env)
    notes += [*more, *_about_beginning(checkpoint, intervals, known, from_start=from_start)]
    return Verified(
        path=checkpoint.path,
        step=checkpoint.step,
        run=folder.name if folder is not None else None,
        chain=known,
        chain_state=TAMPERED if problems else WHOLE if known else ABSENT,
        problems=problems,
        notes=tuple(notes),
        intervals=tuple(intervals),
    )


def _compute_all(
    checkpoint: Checkpoint, folder: Path | None, dialogue: Dialogue, *, from_start: bool, env: Sequence[str]
) -> tuple[list[Interval], list[str]]:
    """Compute a checkpoint again, with all that led to it if `from_start`; also return notes on what cannot be computed.

    Raises:
        LaunchError: A run cannot be replayed.
    """
    if folder is None:
        name = shown(checkpoint.manifest.get("run"))
        return [], [f"the run {name} that has made it is not here, so nothing was computed again: `--run RUN` names it"]
    intervals = []
    parts, notes = _parts(checkpoint, folder, from_start=from_start)
    for path, one in parts:
        interval = _compute_again(path, one, dialogue, from_start=from_start, env=env)
        intervals += [interval] if interval is not None else []
        if interval is None:
            notes.append(
                f"step {one.step} was not computed again: the checkpoint from which its run began is no longer there"
            )
    return intervals, notes


def check_chain(checkpoint: Checkpoint, folder: Path | None) -> tuple[Provenance | None, tuple[str, ...]]:
    """Read the chain of a checkpoint, and compare it with the checkpoint, with those beside it and with the folder of its run.

    Returns:
        The chain, None if there is none or if it cannot be read, and what contradicts it, as clauses.
    """
    chain = read_provenance(checkpoint.manifest)
    if not isinstance(chain, Provenance):
        return None, () if chain is None else (chain.reason,)
    problems = [*contradictions(checkpoint.manifest, chain), *_contradicted_by_neighbours(checkpoint, chain)]
    problems += _contradicted_by_run(folder, chain) if folder is not None else []
    return chain, tuple(dict.fromkeys(problems))


def _folder_of_run(checkpoint: Checkpoint, run: str | None, *, runs_dir: Path, working_folder: Path) -> Path | None:
    """Find the folder of the run that has made a checkpoint; None if it is not here.

    Raises:
        LaunchError: `run` names no run, or another one than the checkpoint.
    """
    made_by = checkpoint.manifest.get("run")
    beside = checkpoint.path.resolve().parent.parent
    if run is None and (beside / contract.PLAN_FILE).is_file():
        return beside
    named = run if run is not None else made_by
    if not isinstance(named, str) or not named:
        return None
    found = name_run(named, runs_dir=runs_dir, working_folder=working_folder)
    if isinstance(found, Diagnostic):
        if run is not None:
            raise LaunchError([found])
        return None
    if run is not None and found.name != made_by:
        message = f"`--run {shown(run)}` names {found.name}, and the checkpoint was made by {shown(made_by)}"
        raise LaunchError([Diagnostic("P086", message)])
    return found if found.name == made_by else None


def _contradicted_by_neighbours(checkpoint: Checkpoint, chain: Provenance) -> Iterator[str]:
    """Yield which predecessors beside the checkpoint have another link than its chain has of them."""
    folder = checkpoint.path.resolve().parent
    for link in chain.links[:-1]:
        if link.run != chain.own.run:
            continue
        manifest = read_object_if_any(folder / f"step-{link.step}" / contract.CHECKPOINT_MANIFEST)
        if not manifest:
            continue
        its = read_provenance(manifest)
        if not isinstance(its, Provenance) or vars(its.own) != vars(link):
            yield f"the checkpoint of step {link.step} beside it is not the predecessor that its chain names"


def _contradicted_by_run(folder: Path, chain: Provenance) -> Iterator[str]:
    """Yield what the run's folder says otherwise than the provenance."""
    plan = read_object_if_any(folder / contract.PLAN_FILE)
    try:
        now = conditions_of(folder, plan)
    except (KeyError, TypeError, AttributeError):
        now = None
    if now is None:
        yield f"the folder of {folder.name} no longer says what computed it"
        return
    recorded = chain.own_conditions
    for name, words in _NAMES_OF_CONDITIONS.items():
        if getattr(recorded, name) != getattr(now, name):
            yield f"the folder of {folder.name} has another {words} than the provenance"


def _other_conditions(recorded: Conditions) -> Iterator[str]:
    here = cpu_class()
    if recorded.cpu is not None and recorded.cpu != here:
        yield (
            f"it was computed with vector instructions of class {shown(recorded.cpu)}, and this machine has {here}: other bits here "
            "would prove nothing"
        )


def _parts(
    checkpoint: Checkpoint, folder: Path, *, from_start: bool
) -> tuple[list[tuple[Path, Checkpoint]], list[str]]:
    """Return the checkpoints to compute, each with its run's folder, oldest first, and notes on what cannot be computed.

    Each run of the chain is computed up to the checkpoint from which the next one began.
    """
    parts = [(folder, checkpoint)]
    while from_start:
        start = read_object_if_any(parts[0][0] / contract.PLAN_FILE).get("start")
        if not isinstance(start, dict) or not start.get("step"):
            return parts, []
        origin = Path(str(start.get("origin")))
        earlier = verify(origin) if origin.is_dir() else "it is no longer there"
        its_run = origin.parent.parent
        if isinstance(earlier, str) or not (its_run / contract.PLAN_FILE).is_file() or len(parts) > _MOST_RUNS:
            reason = earlier if isinstance(earlier, str) else "its run is no longer there"
            where = shown(origin, longest=_LONGEST)
            return parts, [f"the steps up to {start['step']} were not computed again: {where}: {reason}"]
        parts.insert(0, (its_run, earlier))
    return parts, []


def _compute_again(
    folder: Path, checkpoint: Checkpoint, dialogue: Dialogue, *, from_start: bool, env: Sequence[str]
) -> Interval | None:
    """Compute a checkpoint again, from the one before it or from where its run began; None if neither is there any more.

    Raises:
        LaunchError: The run cannot be replayed.
    """
    prepared = prepare_replay(read_origin_of(folder), dialogue, env=env)
    not_after, start = checkpoint.step - 1, prepared.origin.resume
    has_start = start is None or Path(start).is_dir()
    if from_start:
        # Without the checkpoint that the run began from, its own first one is the earliest that there is.
        own = [
            int(name) for path in checkpoint.path.resolve().parent.glob("step-*") if (name := path.name[5:]).isdecimal()
        ]
        not_after = 0 if has_start else min(own, default=0)
    if not has_start and nearest_checkpoint(prepared, min(not_after, checkpoint.step - 1)) is None:
        return None
    order = ReplayOrder(step=checkpoint.step, shown=False, digests=False)
    with tempfile.TemporaryDirectory(prefix="ttl-verify-") as path:
        keep = Path(path) / "replay"
        replay = replay_steps(prepared, order=order, keep=keep, not_after=not_after, saves=True)
        compared, others, state_differs = _compare(checkpoint, keep / contract.checkpoint_dir(checkpoint.step))
    return Interval(
        run=folder.name,
        began=replay.began,
        checkpoint=replay.checkpoint or start,
        step=checkpoint.step,
        compared=compared,
        others=others,
        state_differs=state_differs,
        replay=replay,
    )


def _compare(checkpoint: Checkpoint, again: Path) -> tuple[int, tuple[str, ...], bool]:
    """Compare a checkpoint with the same one computed again.

    Its files are the same if the ranks were; else tensors are found by their names, whatever the layout.

    Returns:
        How many tensors were compared, which differ, and whether the state besides them differs.
    """
    manifest = read_object_if_any(again / contract.CHECKPOINT_MANIFEST)
    if not manifest:
        return 0, (), False
    mine, theirs = read_tensors(checkpoint.path), read_tensors(again)
    common = [name for name in mine if name in theirs]
    others = [] if state_of(checkpoint.manifest) == state_of(manifest) else _differing(common, mine, theirs)
    return len(common), tuple(others), manifest.get("state") != checkpoint.manifest["state"]


def _differing(names: Iterable[str], mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    def is_same(name: str) -> bool:
        one, other = mine[name], theirs[name]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and have_same_bytes(one, other)

    return [name for name in names if not is_same(name)]


def _about_beginning(
    checkpoint: Checkpoint, intervals: Sequence[Interval], chain: Provenance | None, *, from_start: bool
) -> Iterator[str]:
    """Say why the computation did not begin at the checkpoint's predecessor, and what of the chain is not known any more."""
    if chain is None:
        if KEY not in checkpoint.manifest:
            yield "it has no provenance, since an older ttlaunch has made it; only its run's folder says where it comes from"
        return
    after = chain.own.after
    if intervals and not from_start and intervals[0].began != after:
        beside = checkpoint.path.resolve().parent / f"step-{after}" / contract.CHECKPOINT_MANIFEST
        why = (
            "its run follows the order of arrivals"
            if beside.is_file()
            else f"the checkpoint of step {after} is not here"
        )
        yield f"the computation began at step {intervals[0].began}, because {why}"
    if chain.links[0].predecessor is None and chain.links[0].after:
        yield f"the chain begins at step {chain.links[0].after} with a checkpoint that has no provenance"
    if chain.left_out:
        yield f"the chain has {counted(chain.left_out, 'older link')} that its manifest leaves out"


def judged(found: Verified) -> list[Diagnostic]:
    """Say what is wrong with a checkpoint; empty if nothing is."""
    diagnostics = []
    name = shown(found.path, longest=_LONGEST)
    for one in found.intervals:
        if one.verdict == FAILED:
            cause = shown(one.replay.ended or "", longest=_LONGEST)
            message = f"the replay of {one.run} failed, and the run did not fail in step {one.step}: {cause}"
            diagnostics.append(Diagnostic("P086", message))
            continue
        if one.replay.agreement.mismatches:
            diagnostics += mismatch_diagnostics(one.run, one.replay.agreement, began=one.began)
        if one.others or one.state_differs:
            names = (
                ", ".join(f"`{shown(tensor)}`" for tensor in one.others[:_MOST_NAMED]) or "the state besides tensors"
            )
            more = f" and {len(one.others) - _MOST_NAMED} more" if len(one.others) > _MOST_NAMED else ""
            whose = name if one is found.intervals[-1] else f"the checkpoint of step {one.step} of {one.run}"
            message = f"{whose} has other bits than its run computes: {names}{more}"
            diagnostics.append(Diagnostic(CODE, message, notes=(f"the computation began after step {one.began}",)))
    if found.problems:
        message = f"{name} contradicts its provenance: {found.problems[0]}"
        diagnostics.append(Diagnostic(CODE, message, notes=found.problems[1:]))
    return diagnostics


def as_json(found: Verified) -> dict[str, Any]:
    """Return what `ttlaunch verify CHECKPOINT --format json` prints."""
    return {
        "checkpoint": str(found.path),
        "run": found.run,
        "step": found.step,
        "verdict": found.verdict,
        "began": found.began,
        "chain": found.chain_state,
        "provenance_sha256": found.chain.sha256 if found.chain else None,
        "problems": list(found.problems),
        "notes": list(found.notes),
        "intervals": [
            {
                "run": one.run,
                "began": one.began,
                "checkpoint": one.checkpoint,
                "step": one.step,
                "verdict": one.verdict,
                "compared_tensors": one.compared,
                "other_tensors": list(one.others),
                "state_differs": one.state_differs,
                "compared_digests": sum(one.replay.agreement.tensors.values()),
                "compared_numbers": sum(one.replay.agreement.numbers.values()),
                "first_mismatch": one.replay.agreement.first_mismatch,
                "failure": one.replay.ended if one.verdict == FAILED else None,
                "duration_s": one.replay.duration_s,
            }
            for one in found.intervals
        ],
    }
