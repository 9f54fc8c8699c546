"""Compute a step of a recorded run again, in one process, and compare it with what the run recorded."""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue, Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Diagnostic, LaunchError, Severity, file_error, has_errors, shown, usage_error
from ttlaunch.lab.play import Played, play_ranks
from ttlaunch.lab.repro import (
    other_text,
    other_variables,
    other_versions,
    ranks_and_epochs,
    updates_in_order,
    with_its_code,
)
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.replay import MOST_PIECES, ReplayEnd, ReplayOrder, file_of_piece, first_not_finite, join
from ttlaunch.records.replay import as_json as record_as_json
from ttlaunch.running.checkpoints.resume import find_checkpoint
from ttlaunch.running.logs.output import SilentView, View
from ttlaunch.running.readers.repeat import Origin, restore_package
from ttlaunch.running.readers.step_digests import Agreement, StepDigests, compare_steps, read_step_digests
from ttlaunch.running.runs.files import read_file, read_object, read_object_if_any
from ttlaunch.running.runs.kept_code import KeptCodeError
from ttlaunch.running.watch import RankState

CODE = "P086"
_LONGEST = 300
_MOST_NAMED = 3
_SAY_AFTER_S, _SAY_AGAIN_S = 1.0, 5.0
_OBSERVER = Path("ttlaunch/runtime/replay/observer.py")
"""A package without this file is too old to be watched."""


@dataclass(frozen=True)
class Prepared:
    """A run that can be replayed.

    Attributes:
        origin: The run, with the code that it kept in place of code that has changed.
        last_step: The last step that the run has begun.
        failed_step: The step in which the run failed; None if it did not fail in a step.
        recorded: What the run recorded of its bits.
        package: The folder with ttlaunch as it was in the run; None for the present one.
        program: The folder of the recipe's code that is used.
        ranks: The number of ranks that are simulated: those of the run, or one for a run that one process repeats.
        can_start_late: Whether a replay may begin at a checkpoint of the run, and not only where the run began.
        report: Called with how far a replay is, after a second and then every few seconds.
    """

    origin: Origin
    last_step: int
    failed_step: int | None
    recorded: StepDigests
    package: Path | None
    ranks: int
    spec: RunSpec
    can_start_late: bool
    report: Callable[[str], object]

    @property
    def program(self) -> Path:
        """The folder of the recipe's code that is used."""
        return Path(self.origin.target)


@dataclass(frozen=True)
class Replay:
    """A part of a run, computed again.

    Attributes:
        run: The run's id.
        step: The last step that was computed again.
        began: The steps that were done where it began: those of a checkpoint, or 0.
        checkpoint: The checkpoint where it began; None if it began where the run did.
        shown: What all ranks had in the last step; None if it was not asked for, or if the process could not write it.
        not_shown: Why something that was to be shown is missing; None if nothing is.
        recorded: The digests and numbers of the replay.
        agreement: How these compare with what the run recorded.
        played: The result of the process that has computed it.
        ended: The error with which it failed; None if it did not fail.
        fell_short: Whether it failed in a step in which the run did not.
        duration_s: How long it took.
    """

    run: str
    step: int
    began: int
    checkpoint: str | None
    shown: ReplayEnd | None
    not_shown: str | None
    recorded: StepDigests
    agreement: Agreement
    played: Played
    ended: str | None
    fell_short: bool
    duration_s: float

    @property
    def verdict(self) -> str:
        """What it proves.

        `equal`: the digests of the step are the run's; `consistent`: all else that was recorded on the way is; `different`; `unknown`;
        `failed`: it fell short of the step.
        """
        return "failed" if self.fell_short else verdict_of(self.agreement, self.step)


def verdict_of(agreement: Agreement, step: int) -> str:
    """Say what an agreement proves of a step; see `Replay.verdict`."""
    if agreement.mismatches:
        return "different"
    if agreement.tensors.get(step):
        return "equal"
    return "consistent" if any((*agreement.tensors.values(), *agreement.numbers.values())) else "unknown"


def prepare_replay(origin: Origin, dialogue: Dialogue, *, env: Sequence[str] = ()) -> Prepared:
    """Find out whether and how a run can be replayed; warn of what may change its bits.

    Args:
        origin: The run.
        dialogue: Gets warnings.
        env: Variables for the ranks, as `--env` has them.

    Raises:
        LaunchError: It is a script, its code is gone, or it recorded nothing.
    """
    if origin.is_command:
        hint = f"`ttlaunch repro {origin.run_id}` repeats it as a whole"
        raise _refused(origin, "it ran a program, and only a recipe's steps are known to ttlaunch", hint)
    found = [*other_versions(origin), *other_variables(origin, env)]
    origin, changes = with_its_code(origin, with_changes=False)
    found += changes
    if has_errors(found):
        raise LaunchError(found)
    package, problems = _package_of(origin)
    dialogue.warn([*found, *problems])
    try:
        plan = read_object(origin.folder / contract.PLAN_FILE)
        recorded = read_step_digests(origin.folder, [row["rank"] for row in plan["ranks"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(origin, shown(error, longest=_LONGEST)) from error
    failed_step = _failed_step(origin)
    last_step = max(failed_step or 0, recorded.last_step)
    if last_step == 0:
        raise _refused(origin, "it has not begun a step")
    spec = _spec_of(origin, env)
    if spec.updates:  # its workers reported in each step what they knew by then, which no update has
        recorded = StepDigests(recorded.tables, {})
    can_start_late = not spec.updates and not spec.epochs and not spec.replay
    return Prepared(
        origin, last_step, failed_step, recorded, package, spec.ranks or 1, spec, can_start_late, dialogue.waiting
    )


def _spec_of(origin: Origin, env: Sequence[str]) -> RunSpec:
    """Return the run as it would be started again, in one process if only one process can repeat it."""
    updates, (ranks, epochs) = updates_in_order(origin), ranks_and_epochs(origin)
    return RunSpec(
        target=origin.target,
        config_file=str(origin.config_file),
        ranks=1 if updates else ranks,
        resume=origin.resume,
        replay=() if updates else origin.arrivals,
        updates=updates,
        epochs=epochs,
        naive=origin.is_naive,
        env=env,
        runs_dir=origin.folder.parent,
    )


def _failed_step(origin: Origin) -> int | None:
    failure = read_object_if_any(origin.folder / contract.REPORT_FILE).get("failure")
    step = failure.get("step") if isinstance(failure, dict) else None
    return step if type(step) is int else None


def _package_of(origin: Origin) -> tuple[Path | None, list[Diagnostic]]:
    try:
        package = restore_package(origin)
    except KeptCodeError as error:
        return None, [_other_package(origin, shown(error, longest=_LONGEST))]
    if package is not None and not (package / _OBSERVER).is_file():
        return None, [_other_package(origin, "what it ran with could not replay")]
    return package, []


def _other_package(origin: Origin, reason: str) -> Diagnostic:
    message = f"{origin.run_id} may have other bits now: ttlaunch has changed, and {reason}"
    return Diagnostic("P034", message, severity=Severity.WARNING)


def _refused(origin: Origin, reason: str, *hints: str) -> LaunchError:
    return LaunchError([Diagnostic(CODE, f"{origin.run_id} cannot be replayed: {reason}", hints=hints)])


def replay_steps(
    prepared: Prepared,
    *,
    order: ReplayOrder,
    keep: Path | None = None,
    view: View | None = None,
    not_after: int | None = None,
    saves: bool = False,
) -> Replay:
    """Compute a run again up to a step, from the nearest checkpoint before it.

    Args:
        prepared: The run.
        order: The step, and what to record.
        keep: The folder for records, which must not exist; None keeps nothing.
        view: Receives what the ranks print; None reports how far the replay is.
        not_after: The latest step whose checkpoint may be where it begins; None: the one before the order's.
        saves: Whether the state after the step is saved as a checkpoint below `keep`.

    Raises:
        LaunchError: The step is none of the run's, or the run cannot be planned any more.
    """
    began_at = time.monotonic()
    plan, began, checkpoint = plan_replay(prepared, step=order.step, not_after=not_after)
    with _folder(keep) as path:
        if view is None:  # a debugger has the terminal for itself
            view = SilentView() if order.line is not None else _ProgressView(prepared, began=began, last=order.step)
        played = _play(plan, path, prepared, view=view, order=order, saves=saves)
        recorded = read_step_digests(path, range(plan.world_size))
        shown_step, not_shown = _read_shown(path) if order.shown else (None, None)
    failure = played.report.failure
    return Replay(
        run=prepared.origin.run_id,
        step=order.step,
        began=began,
        checkpoint=str(checkpoint) if checkpoint else None,
        shown=shown_step,
        not_shown=not_shown,
        recorded=recorded,
        agreement=compare_steps(prepared.recorded, recorded, range(began, order.step + 1)),
        played=played,
        ended=None if failure is None else failure.cause,
        fell_short=failure is not None and order.step != prepared.failed_step,
        duration_s=time.monotonic() - began_at,
    )


class _ProgressView(SilentView):
    """Reports how far a replay is: after a second, and then every few seconds."""

    def __init__(self, prepared: Prepared, *, began: int, last: int) -> None:
        self._prepared, self._step, self._last = prepared, began, last
        self._next = time.monotonic() + _SAY_AFTER_S

    def tick(self, ranks: list[RankState]) -> None:
        """Report the last step that a rank has made, if it is time."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SAY_AGAIN_S
        self._step = max(self._step, *(state.step for state in ranks))
        self._prepared.report(f"computing {self._prepared.origin.run_id} again: step {self._step} of {self._last}")


def _play(plan: LaunchPlan, path: Path, prepared: Prepared, *, view: View, order: ReplayOrder, saves: bool) -> Played:
    run_id, environment = f"replay-{secrets.token_hex(2)}", _environment(prepared)
    python = sys.executable
    return play_ranks(
        plan, path, python=python, environment=environment, view=view, run_id=run_id, order=order, saves=saves
    )


def plan_replay(prepared: Prepared, *, step: int, not_after: int | None = None) -> tuple[LaunchPlan, int, Path | None]:
    """Plan the simulation of a run from the nearest checkpoint before a step, or from where the run began.

    Warnings about the configuration are left out: they were shown when the run was started.

    Args:
        prepared: The run.
        step: The last step that is made.
        not_after: The latest step whose checkpoint may be where it begins; None: the one before `step`.

    Returns:
        The plan, the steps that are done where it begins, and the checkpoint; None for where the run began.

    Raises:
        LaunchError: The step is none of the run's, the run cannot be planned any more, or its training text has changed.
    """
    origin = prepared.origin
    first = _began(origin)
    if not first < step <= prepared.last_step:
        steps = f"its steps are {first + 1} to {prepared.last_step}"
        raise usage_error(f"{origin.run_id} has no step {step}", f"{steps}; `--step {prepared.last_step}`")
    latest = step - 1 if not_after is None else min(not_after, step - 1)
    began, checkpoint = nearest_checkpoint(prepared, latest) or (first, None)
    spec = prepared.spec if checkpoint is None else replace(prepared.spec, resume=str(checkpoint))
    environment = _environment(prepared)
    plan = plan_simulation(spec, Unattended(), working_folder=origin.working_folder, environment=environment)
    plan = plan if prepared.package is None else _with_recorded_config(plan, origin)
    data = plan.program.data if isinstance(plan.program, RecipeProgram) else None
    changed = other_text(origin, (data or {}).get("sha256"), with_changes=False)
    if changed:
        raise LaunchError(changed)
    return plan, began, checkpoint


def _with_recorded_config(plan: LaunchPlan, origin: Origin) -> LaunchPlan:
    """Return the plan with the configuration as the run had it: ttlaunch as it was then refuses keys that have come since."""
    config = read_object_if_any(origin.folder / contract.PLAN_FILE).get("config")
    if not isinstance(plan.program, RecipeProgram) or not isinstance(config, dict):
        return plan
    return replace(plan, program=replace(plan.program, config=config))


def _began(origin: Origin) -> int:
    start = read_object_if_any(origin.folder / contract.PLAN_FILE).get("start")
    step = start.get("step") if isinstance(start, dict) else None
    return step if type(step) is int else 0


def nearest_checkpoint(prepared: Prepared, latest: int) -> tuple[int, Path] | None:
    """Find the newest whole checkpoint of a run that is no later than a step, and from which a replay may begin."""
    if not prepared.can_start_late:
        return None
    folder = prepared.origin.folder / contract.CHECKPOINTS_DIR
    steps = [path.name.removeprefix("step-") for path in folder.glob("step-*")] if folder.is_dir() else []
    for step in sorted((int(step) for step in steps if step.isdecimal()), reverse=True):
        path = folder / f"step-{step}"
        if step > latest:
            continue
        found = find_checkpoint(str(path), runs_folder=folder, working_folder=folder)
        if found.checkpoint is not None and found.checkpoint.step == step:
            return step, path
    return None


def _environment(prepared: Prepared) -> Mapping[str, str]:
    """Return the variables with which ranks import ttlaunch as it was in the run, if it has changed since."""
    if prepared.package is None:
        return os.environ
    after = os.environ.get("PYTHONPATH", str(prepared.origin.working_folder))
    return {**os.environ, "PYTHONPATH": f"{prepared.package}{os.pathsep}{after}"}


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Make the folder for records, and remove it again unless it is to be kept.

    Raises:
        LaunchError: It cannot be made.
    """
    try:
        if keep is not None:
            keep.mkdir(parents=True)
            yield keep.resolve()
            return
        with tempfile.TemporaryDirectory(prefix="ttl-replay-") as path:
            yield Path(path)
    except OSError as error:
        raise file_error(keep or "the folder for temporary files (`TMPDIR`)", error) from error


def _read_shown(path: Path) -> tuple[ReplayEnd | None, str | None]:
    """Read what the process has shown of the step, and say what of it cannot be read."""
    pieces, problem = list[ReplayEnd](), None
    for number in range(MOST_PIECES + 1):
        data = read_file(path / file_of_piece(number))
        if data is None:
            break
        found = read(ReplayEnd, data) if number < MOST_PIECES else BadRecord("there are too many tensors")
        if isinstance(found, BadRecord):
            problem = f"{file_of_piece(number)}: {found.reason}"
            break
        pieces.append(found)
    return join(pieces), problem


def as_json(replay: Replay, *, rank: int | None = None, micro_batch: int | None = None) -> dict[str, Any]:
    """Return what `ttlaunch replay --format json` prints; of all ranks and micro-batches, or of those that are asked for."""
    ranks = record_as_json(replay.shown.ranks) if replay.shown is not None else []
    chosen = [one for one in ranks if rank is None or one["rank"] == rank]
    if micro_batch is not None:
        for one in chosen:
            one["batches"] = [batch for batch in one["batches"] if batch["index"] == micro_batch]
            for name in ("activations", "micro_gradients"):
                one[name] = [tensor for tensor in one[name] if tensor["micro_batch"] == micro_batch]
    numbers = replay.recorded.numbers.get(replay.step, {})
    return {
        "run": replay.run,
        "step": replay.step,
        "began": replay.began,
        "checkpoint": replay.checkpoint,
        "verdict": replay.verdict,
        "compared_tensors": sum(replay.agreement.tensors.values()),
        "compared_numbers": sum(replay.agreement.numbers.values()),
        "last_proven": replay.agreement.last_proven,
        "mismatches": [
            {"step": one.step, "kind": one.kind, "name": one.name, "ranks": list(one.ranks)}
            for one in replay.agreement.mismatches
        ],
        "failure": replay.ended,
        "not_finite": _not_finite_as_json(replay),
        "parameters_sha256": replay.played.report.parameters_sha256,
        "numbers": {name: {str(rank): value for rank, value in by_rank.items()} for name, by_rank in numbers.items()},
        "ranks": chosen,
        "not_shown": replay.not_shown,
        "duration_s": replay.duration_s,
    }


def _not_finite_as_json(replay: Replay) -> dict[str, Any] | None:
    """Return the first layer that made a value that is no number, with its rank and its pass; None if none did."""
    first = first_not_finite(replay.shown.ranks) if replay.shown is not None else None
    return None if first is None else {"rank": first[0].rank, **record_as_json(first[1])}


def judged(replay: Replay) -> list[Diagnostic]:
    """Say whether a replay contradicts the run, or failed where the run did not."""
    if replay.fell_short:
        cause = shown(replay.ended or "", longest=_LONGEST)
        message = f"the replay of {replay.run} failed, and the run did not fail in step {replay.step}: {cause}"
        return [Diagnostic(CODE, message)]
    return mismatch_diagnostics(replay.run, replay.agreement, began=replay.began)


def mismatch_diagnostics(run: str, agreement: Agreement, *, began: int) -> list[Diagnostic]:
    """Say in which step a replay first has other bits than its run; empty if it has the same."""
    first = agreement.first_mismatch
    if first is None:
        return []
    wrong = [one for one in agreement.mismatches if one.step == first]
    names = [f"{one.kind} `{shown(one.name)}`{_of_ranks(one.ranks)}" for one in wrong[:_MOST_NAMED]]
    more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    proven = agreement.last_proven
    since = "" if proven is None else f"; after step {proven} all digests are equal"
    message = f"the replay of {run} has other bits than the run recorded in step {first}: {', '.join(names)}{more}"
    return [Diagnostic("R087", message, notes=(f"the replay began after step {began}{since}",))]


def _of_ranks(ranks: Sequence[int]) -> str:
    return f" of rank {', '.join(map(str, ranks))}" if ranks else ""
