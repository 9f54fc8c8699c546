"""What `ttlaunch plan --predict` prints: memory by rank with the terms it comes from, and bytes by flow."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ttlaunch.app.fits import Fit
from ttlaunch.app.predict import NotPredicted
from ttlaunch.cli.report_tables import megabytes
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import render_size
from ttlaunch.running.metrics.prediction import PredictedRank, Prediction, TimeVerdict, Verdict
from ttlaunch.running.metrics.telemetry import KINDS

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.traffic import Traffic

_RARE = {
    "once": "once",
    "in_first_step": "more in the first step",
    "per_validation": "each validation",
    "at_end": "at the end",
}


def render_prediction(found: Prediction | NotPredicted) -> list[str]:
    """Render a prediction as tables; or why there is none."""
    if isinstance(found, NotPredicted):
        return ["", f"  not predicted: {found.reason}"]
    heading = ("rank", "role", *KINDS, "together")
    rows = [(*_who(one), *_sizes(one)) for one in found.ranks]
    total = sum(one.peak or 0 for one in found.ranks)
    return [
        "",
        "  memory of tensors in a step, MB: the most of each at any moment, with each role run without values",
        *render_table([heading, *rows], right=range(2, len(heading)), indent="    "),
        f"    all ranks together: {megabytes(total)} MB; each process also needs at least {megabytes(found.library_bytes)} MB for libraries",
        "",
        "  by formula, bytes held from step to step",
        *render_table([_TERMS, *map(_terms, found.ranks)], right=range(2, len(_TERMS)), indent="    "),
        "",
        *_flows(found),
    ]


_TERMS = ("rank", "role", "weights", "gradients", "optimizer", "sum", "found ÷ formula", "partial sums at most")


def _terms(one: PredictedRank) -> tuple[str, ...]:
    parts = one.formula
    total = sum(parts.values())
    held = sum(one.held.values())
    ratio = f"{held / total:.4f}" if held and total else "–"
    return (*_who(one), *(f"{parts[kind]:,}" for kind in parts), f"{total:,}", ratio, f"{one.sums_at_most:,}")


def _who(one: PredictedRank) -> tuple[str, str]:
    return str(one.rank), one.role


def _sizes(one: PredictedRank) -> tuple[str, ...]:
    return (*(megabytes(one.sizes.get(kind)) for kind in KINDS), megabytes(one.peak))


def _flows(found: Prediction) -> list[str]:
    if found.flows is None:
        return [f"  bytes are not predicted: {found.no_flows}"]
    if not found.flows:
        return ["  no rank sends anything"]
    roles = [one.role for one in found.ranks]
    rows = [
        (one.operation, f"{one.source} {roles[one.source]}", f"{one.dest} {roles[one.dest]}", *_bytes(one))
        for one in found.flows
    ]
    heading = ("sent", "from", "to", "bytes a step", "besides")
    table = render_table([heading, *rows], right={3}, indent="    ")
    return ["  by formula, bytes between ranks", *table, f"    all ranks together: {found.step_bytes:,} bytes a step"]


def _bytes(one: "Traffic") -> tuple[str, str]:
    besides = [f"{size:,} {text}" for name, text in _RARE.items() if (size := getattr(one, name))]
    besides += [f"every {one.every} steps"] if one.every > 1 else []
    return f"{one.per_step:,}", ", ".join(besides)


def render_fit(fit: Fit | None) -> list[str]:
    """Render whether each rank fits, and what would; nothing if no limit was given."""
    if fit is None:
        return []
    limit, needed, changed = render_size(fit.limit), render_size(fit.needed), render_size(fit.changed)
    if fit.change == ():
        return ["", f"  fits {limit}: the largest rank needs {needed}, libraries and a reserve included"]
    if fit.change is None:
        return [
            "",
            f"  does not fit {limit}: the largest rank needs {needed}, and {changed} with the best change tried",
        ]
    change = " ".join(f"--set {one}" for one in fit.change)
    return ["", f"  does not fit {limit}: the largest rank needs {needed}", f"  fits with {change}: {changed}"]


def fit_as_json(fit: Fit | None) -> dict[str, Any]:
    """Return the answer for JSON; nothing if no limit was given."""
    return {} if fit is None else {"fits": fit.as_json()}


def prediction_lines(found: Prediction | NotPredicted, fit: Fit | None) -> Iterator[tuple[Any, ...]]:
    """Yield what `--format concise` prints: a row for each rank and for each flow."""
    if isinstance(found, NotPredicted):
        yield "not predicted", found.reason
        return
    for rank in found.ranks:
        yield "memory", rank.rank, rank.role, *(rank.sizes.get(kind, "") for kind in KINDS), rank.peak or ""
    for flow in found.flows or ():
        yield "sent", flow.operation, flow.source, flow.dest, flow.per_step
    if fit is not None:
        yield "fits", fit.limit, fit.needed, "none" if fit.change is None else " ".join(fit.change), fit.changed


def prediction_as_json(found: Prediction | NotPredicted) -> dict[str, Any]:
    """Return the prediction for JSON; `not_predicted` says why there is none."""
    if isinstance(found, NotPredicted):
        return {"prediction": None, "not_predicted": found.reason}
    return {"prediction": found.as_json(), "not_predicted": None}


def render_verdict(verdict: Verdict, roles: Sequence[str]) -> list[str]:
    """Render what was predicted beside what was measured; nothing if there is nothing to compare."""
    rows: list[tuple[str, ...]] = [("prediction", "predicted", "measured", "error", "mostly by")]
    if verdict.sent is not None and verdict.sent != (0, 0):
        error = "–" if verdict.sent_error is None else f"{verdict.sent_error:+.2%}"
        rows.append(("bytes between ranks", *(f"{size:,}" for size in verdict.sent), error, ""))
    for one in verdict.memory:
        sizes = (f"{one.predicted:,}", f"{one.measured:,}")
        name = f"{_MEASURED[one.of]} of {one.rank} {roles[one.rank]}"
        rows.append((name, *sizes, f"{one.error:+.2%}", one.missed or ""))
    rows += [] if verdict.time is None else [_step(verdict.time)]
    table = ["", *render_table(rows, right={1, 2, 3}, indent="  ")] if len(rows) > 1 else []
    reasons = (("memory", verdict.no_memory), ("the time of a step", verdict.no_time))
    missing = [f"  {name} is not predicted: {reason}" for name, reason in reasons if reason is not None]
    notes = [f"  note  {note}" for note in verdict.notes()]
    return [*table, *([""] if missing and not table else []), *missing, *notes]


_MEASURED = {"tensors": "memory", "process": "process"}


def _step(one: TimeVerdict) -> tuple[str, ...]:
    said = one.predicted
    predicted = f"{said.low * 1e3:.2f} to {said.high * 1e3:.2f}" if one.is_wide else f"{said.median * 1e3:.2f}"
    return ("time of a step, ms", predicted, f"{one.measured * 1e3:.2f}", f"{one.error:+.2%}", one.missed or "")
