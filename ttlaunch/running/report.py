"""The result of a run, `report.json`: losses, speed, the parameters' hash, and the failure if there was one."""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from ttlaunch import contract
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.endings import RankExit
from ttlaunch.records.parser import checked
from ttlaunch.records.ranks import Validation
from ttlaunch.running.bad_records import Complain, pass_over
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.flight_recorders import LastOperation, last_operations
from ttlaunch.running.metrics.traffic import Settlement, settle
from ttlaunch.running.runs.files import read_object, write_whole
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.start_times import read_start_times
from ttlaunch.running.watch import Phase, RankState, start_up_end, steps_done

_NOT_FINITE = {"inf", "-inf", "nan"}
_MEASURED = (
    "first_validation",
    "last_validation",
    "last_perplexity",
    "tokens_per_s",
    "samples_per_s",
    "layer_grad_norms",
    "results",
)

_KINDS = {
    "run_id": "Word",
    "plan_hash": "Word",
    "name": "Text",
    "layout": "Word | None",
    "exit_status": "Status",
    "world_size": "Count",
    "duration_s": "Seconds",
    "startup_s": "Seconds | None",
    "start_times": "dict[str, Json] | None",
    "steps": "Count",
    "first_validation": "Number | None",
    "last_validation": "Number | None",
    "last_perplexity": "Number | None",
    "tokens_per_s": "Number | None",
    "samples_per_s": "Number | None",
    "parameters_sha256": "Word | None",
    "parameters_agree": "Flag",
    "leftovers": "Count",
    "layer_grad_norms": "dict[str, Json]",
    "results": "dict[str, Json]",
    "lost_hosts": "dict[str, Time]",
    "epochs": "tuple[dict[str, Json], ...]",
    "loss_spikes": "tuple[dict[str, Json], ...]",
    "failure": "dict[str, Json] | None",
    "ranks": "tuple[dict[str, Json], ...]",
}
"""The kinds of the parts of `report.json`, as `records/parser.py` names them; older versions wrote fewer parts."""
_SPIKE_KINDS = {"step": "Count", "loss": "Number", "median": "Number", "bound": "Number"}
_RANK_KINDS = {"rank": "Rank", "role": "Word", "host": "Word"}
_EPOCH_KINDS = {
    "epoch": "Count",
    "step": "Count",
    "members": "tuple[Rank, ...]",
    "reasons": "tuple[Text, ...]",
    "computed_anew": "Count",
}
_MORE_EPOCH_KINDS = {"pause_s": "Seconds | None", "lost_steps": "Count"}
_EPOCH_TRAFFIC_KINDS = {"steps": "Count", "bytes": "Size", "formula_bytes": "Size"}
_MORE_RANK_KINDS = {"step": "Count", "peak_memory_bytes": "Size | None", "metrics": "dict[str, Number]"}


@dataclass(frozen=True)
class Report:
    """The result of a run.

    Attributes:
        status: "done", "failed", "hung", "interrupted", "terminated" or "time limit".
        duration_s, startup_s: Seconds from the start of the engine to the end, and until every rank was up; None if one never was.
        first_validation, last_validation: Mean loss per token, or per image, in nats, None if none was measured.
        last_perplexity: The perplexity of the last validation: the exponential of its loss.
        tokens_per_s, samples_per_s: The speed of the fastest rank, in what ranks count; None in the other.
        layer_grad_norms: The norm of each layer's gradient in the last step that reported them; empty if none did.
        parameters_sha256: The hash over all parameters in name order; None if no rank reported them.
        parameters_agree: Whether all ranks that hold a parameter hold the same bits.
        began_from: The checkpoint or the weights from which training began: `origin`, `step` and, for a checkpoint,
            `passed_over`: the newer checkpoints that could not be used, with reasons; also `saved_by` where a worker saved the
            state from memory. None if weights were drawn from the seed.
        leftovers: How many processes had to be killed after their rank, or the engine, had ended.
        stopped: How the run ended by order, see `ending.stopped`; None if nobody ordered it to end.
        lost_checkpoints: For each step that should have a checkpoint and has none, the reason.
        lost_hosts: Lost hosts, with the time of the last frame from each, seconds since the epoch.
        epochs: Of an elastic run, its epochs in order: `members`, the `step` after which each began, `reasons`, and what the
            change cost and its members sent, see `running/membership/membership.py`; empty for any other run.
        start_times: Where the time from Enter to the first step went, see `running/start_times.py`; None if it is not known.
        loss_spikes: The first steps whose training loss was far above those before: `step`, `loss`, and the `median` and the `bound` of
            the last losses, see `LossSpike`.
        traffic: The bytes that ranks sent, compared with the recipe's formula; None if ranks did not count them.
    """

    run_id: str
    plan_hash: str
    name: str
    layout: str | None
    status: str
    exit_status: int
    world_size: int
    duration_s: float
    steps: int
    first_validation: float | None
    last_validation: float | None
    last_perplexity: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    layer_grad_norms: Mapping[str, Any]
    parameters_sha256: str | None
    parameters_agree: bool
    began_from: Mapping[str, Any] | None
    results: Mapping[str, Any]
    failure: Failure | None
    leftovers: int
    ranks: tuple[Mapping[str, Any], ...]
    traffic: Settlement | None = None
    lost_checkpoints: Mapping[int, str] = field(default_factory=dict)
    stopped: Mapping[str, Any] | None = None
    lost_hosts: Mapping[str, float] = field(default_factory=dict)
    epochs: tuple[Mapping[str, Any], ...] = ()
    startup_s: float | None = None
    start_times: Mapping[str, Any] | None = None
    loss_spikes: tuple[Mapping[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the content of `report.json`."""
        values = dict(vars(self))
        values["failure"] = self.failure.as_json() if self.failure else None
        values["traffic"] = self.traffic.as_json() if self.traffic else None
        values["results"], values["lost_hosts"] = dict(self.results), dict(self.lost_hosts)
        lost = self.lost_checkpoints.items()
        values["lost_checkpoints"] = [{"step": step, "reason": reason} for step, reason in lost]
        values["ranks"] = [_finite(dict(rank)) for rank in self.ranks]
        values["epochs"] = [dict(epoch) for epoch in self.epochs]
        values["loss_spikes"] = [dict(spike) for spike in self.loss_spikes]
        return {name: _finite(value) for name, value in values.items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Make the report from the content of `report.json`.

        Raises:
            KeyError, TypeError, ValueError: The content is no report of this version.
        """
        check_parts(record)
        failure, traffic = record["failure"], record["traffic"]
        parts = {
            "failure": Failure.from_json(failure) if failure else None,
            "traffic": Settlement.from_json(traffic) if traffic else None,
            "lost_checkpoints": {one["step"]: one["reason"] for one in record["lost_checkpoints"]},
            "ranks": tuple(map(_number, record["ranks"])),
            "epochs": tuple(record.get("epochs", ())),
            "loss_spikes": tuple(record.get("loss_spikes", ())),
        }
        measured = {name: _number(record.get(name)) for name in _MEASURED}
        return cls(**{**record, **measured, **parts})


def check_parts(record: Mapping[str, Any]) -> None:
    """Check the parts of a report that readers show, whichever version wrote it.

    Raises:
        ValueError: A part is of another kind, or one that every version wrote is missing.
    """
    _check(record, {"status": "Word"}, optional=_KINDS)
    for epoch in record.get("epochs", ()):
        check_epoch(epoch)
        if epoch.get("traffic") is not None:
            _check(checked("dict[str, Json]", epoch["traffic"]), _EPOCH_TRAFFIC_KINDS)
    for spike in record.get("loss_spikes", ()):
        _check(spike, _SPIKE_KINDS)
    for row in record.get("ranks", ()):
        _check(row, _RANK_KINDS, optional=_MORE_RANK_KINDS)
        if row.get("last_operation") is not None:
            _check(checked("dict[str, Json]", row["last_operation"]), {"text": "Text"})


def check_epoch(epoch: Mapping[str, Any]) -> None:
    """Check what readers show of an epoch of an elastic run.

    Raises:
        ValueError: A part of it is missing, or of another kind.
    """
    _check(epoch, _EPOCH_KINDS, optional=_MORE_EPOCH_KINDS)


def _check(
    record: Mapping[str, Any], kinds: Mapping[str, str], *, optional: Mapping[str, str] = MappingProxyType({})
) -> None:
    for name, kind in [*kinds.items(), *(pair for pair in optional.items() if pair[0] in record)]:
        try:
            checked(kind, record.get(name))
        except ValueError as error:
            raise ValueError(
                f"{contract.REPORT_FILE} is not a report of this version: `{name}` is not {error}"
            ) from error


def make_report(
    plan: LaunchPlan,
    folder: RunFolder,
    ranks: list[RankState],
    *,
    status: str,
    exit_status: int,
    duration_s: float,
    failure: Failure | None,
    leftovers: int,
    complain: Complain = pass_over,
) -> Report:
    """Make the report from the last states of all ranks and the files in the run's folder."""
    validations = sorted((v for state in ranks for v in state.validations), key=lambda v: v.step)
    digest, agree = combine_digests([state.digests for state in ranks if state.digests])
    recipe = plan.program if isinstance(plan.program, RecipeProgram) else None
    end = failure.time if failure else None
    up = start_up_end(ranks, reports_ready=recipe is not None)
    start = read_start_times(folder.path, ranks, plan.as_json())
    last = {} if status == "done" else last_operations(folder.path, ranks, end=end)
    shown = [state for state in ranks if not plan.elastic or state.phase is not Phase.ABSENT]
    return Report(
        run_id=folder.run_id,
        plan_hash=plan.hash,
        name=plan.program.name,
        layout=recipe.layout if recipe else None,
        status=status,
        exit_status=exit_status,
        world_size=plan.elastic.first if plan.elastic else plan.world_size,
        duration_s=round(duration_s, 3),
        steps=steps_done(ranks),
        first_validation=validations[0].loss if validations else None,
        last_validation=validations[-1].loss if validations else None,
        last_perplexity=validations[-1].perplexity if validations else None,
        tokens_per_s=max((state.tokens_per_s or 0 for state in ranks), default=0) or None,
        samples_per_s=max((state.samples_per_s or 0 for state in ranks), default=0) or None,
        layer_grad_norms=_layer_norms(ranks),
        parameters_sha256=digest,
        parameters_agree=agree,
        began_from=_began_from(recipe),
        results=_accuracy(validations) | {name: value for state in ranks for name, value in state.results.items()},
        failure=failure,
        leftovers=leftovers + sum(state.exit.left_behind for state in ranks if state.exit),
        ranks=tuple(_rank_summary(state, last.get(state.row.rank), is_recipe=recipe is not None) for state in shown),
        traffic=None if plan.elastic else _traffic(plan, folder, ranks, is_done=status == "done", complain=complain),
        startup_s=None if up is None else round(min(duration_s, max(0.0, up - time.time() + duration_s)), 3),
        start_times=start.as_json() if start else None,
        loss_spikes=_loss_spikes(ranks),
    )


def _loss_spikes(ranks: list[RankState]) -> tuple[Mapping[str, Any], ...]:
    """Return the spikes of the loss by step, from the first rank that has reported one for a step."""
    by_step = {spike.step: spike._asdict() for state in reversed(ranks) for spike in state.spikes.found}
    return tuple(by_step[step] for step in sorted(by_step))


def _traffic(
    plan: LaunchPlan, folder: RunFolder, ranks: list[RankState], *, is_done: bool, complain: Complain
) -> Settlement | None:
    """Compare the bytes that ranks sent with the formula, which is one of a fixed number of ranks."""
    return settle(folder.path, plan.as_json(), ranks, is_done=is_done, runs_recipe=True, complain=complain)


def _layer_norms(ranks: list[RankState]) -> dict[str, float]:
    """Return the gradient norms of all layers in the last step for which a rank reported some."""
    last = max((step for state in ranks for step in state.layer_norms), default=0)
    return {layer: norm for state in ranks for layer, norm in state.layer_norms.get(last, {}).items()}


def write_report(report: Report, folder: RunFolder) -> None:
    """Write `report.json` in one step: views wait for the file and read it as soon as it exists."""
    write_whole(folder.file(contract.REPORT_FILE), json.dumps(report.as_json(), indent=1) + "\n")


def read_report(folder: Path) -> Report:
    """Read the report in a run's folder.

    Raises:
        OSError: There is no report, or it cannot be read.
        ValueError: The file is no report of this version.
    """
    try:
        return Report.from_json(read_object(folder / contract.REPORT_FILE))
    except (AttributeError, KeyError, TypeError) as error:  # a part of it may have another type
        raise ValueError(f"{contract.REPORT_FILE} is not a report of this version: {error}") from error


def combine_digests(by_rank: list[dict[str, str]]) -> tuple[str | None, bool]:
    """Combine the ranks' digests of parameters into one SHA-256 over all parameters in name order.

    Returns:
        The digest, None if there are no parameters; and whether ranks that hold the same parameter agree on its bits.
    """
    merged: dict[str, str] = {}
    agree = True
    for digests in by_rank:
        for name, digest in digests.items():
            agree = agree and merged.setdefault(name, digest) == digest
    if not merged:
        return None, True
    text = "\n".join(f"{name} {merged[name]}" for name in sorted(merged))
    return hashlib.sha256(text.encode()).hexdigest(), agree


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON cannot express, by text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return {name: _finite(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def _number(value: Any) -> Any:
    """Turn the text that `_finite` has made back into numbers."""
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    return {name: _number(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def _accuracy(validations: Sequence[Validation]) -> dict[str, str]:
    """Return the accuracy of the last validation, for tasks whose answers are right or wrong."""
    accuracy = validations[-1].accuracy if validations else None
    return {} if accuracy is None else {"accuracy": f"{accuracy:.1%}"}


def _began_from(recipe: RecipeProgram | None) -> dict[str, Any] | None:
    start = recipe.start if recipe else None
    return (
        {name: start[name] for name in ("origin", "step", "passed_over", "saved_by") if name in start}
        if start
        else None
    )


def _rank_summary(state: RankState, last: LastOperation | None, *, is_recipe: bool) -> dict[str, Any]:
    ending = state.exit or RankExit()
    metrics = {"metrics": dict(state.metrics)} if state.metrics and not is_recipe else {}
    return {
        "rank": state.row.rank,
        "role": state.row.role,
        "host": state.row.host,
        "state": str(state.phase),
        "step": state.step,
        "status": ending.status,
        "signal": ending.signal,
        "peak_memory_bytes": ending.peak_memory_bytes,
        "unkept_output": dict(ending.unkept_output),
        "unkept_reason": ending.unkept_reason,
        "last_operation": last.as_json() if last else None,
        **metrics,
    }
