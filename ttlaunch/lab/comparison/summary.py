"""Summarise the repeats of each candidate as a row, and render all rows as JSON and as Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ttlaunch.lab.comparison.measure import Measured, as_json
from ttlaunch.lab.comparison.repeats import Attempt
from ttlaunch.planning.comparison import Candidate, Workload
from ttlaunch.planning.parity import class_names


@dataclass(frozen=True)
class Spread:
    """A number that was measured several times."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Row:
    """The results of a candidate; numbers are None if they were not measured.

    Attributes:
        name: The candidate as the table names it.
        runs: The completed runs.
        ranks: The number of ranks of each role, as text.
        bits: A letter for the SHA-256 of the parameters, equal for equal bits; None if the candidate's runs differ.
        is_counted: Whether all bytes were counted, none taken from the recipe's formula.
        error: Why a run failed; None if none did.
    """

    name: str
    runs: tuple[Measured, ...]
    ranks: str
    steps_per_s: Spread | None
    tokens_per_s: Spread | None
    samples_per_s: Spread | None
    loss: Spread | None
    bytes_per_step: Spread | None
    memory_bytes: Spread | None
    idle_share: Spread | None
    bits: str | None
    is_counted: bool
    error: str | None = None


def summarise(attempts: Sequence[Attempt]) -> list[Row]:
    """Make a row for each candidate, in the order of their first runs."""
    by_candidate: dict[Candidate, list[Attempt]] = {}
    for attempt in attempts:
        by_candidate.setdefault(attempt.candidate, []).append(attempt)
    hashes = {
        candidate: {attempt.measured.sha256 for attempt in own if attempt.measured}
        for candidate, own in by_candidate.items()
    }
    letters = class_names([text for texts in hashes.values() if len(texts) == 1 for text in texts if text])
    return [
        _row(str(candidate), own, hashes=hashes[candidate], letters=letters) for candidate, own in by_candidate.items()
    ]


def _row(name: str, attempts: Sequence[Attempt], *, hashes: set[str | None], letters: dict[str, str]) -> Row:
    runs = tuple(one.measured for one in attempts if one.measured is not None)
    error = next((one.error for one in attempts if one.error is not None), None)
    ranks = ", ".join(f"{count} {role}" for role, count in (runs[0].ranks.items() if runs else ()))
    return Row(
        name=name,
        runs=runs,
        ranks=ranks,
        steps_per_s=_spread(runs, lambda run: run.steps_per_s),
        tokens_per_s=_spread(runs, lambda run: run.tokens_per_s),
        samples_per_s=_spread(runs, lambda run: run.samples_per_s),
        loss=_spread(runs, lambda run: run.loss),
        bytes_per_step=_spread(runs, lambda run: run.bytes_per_step),
        memory_bytes=_spread(runs, lambda run: float(max(run.peak_memory_bytes, default=0)) or None),
        idle_share=_spread(runs, lambda run: run.idle_share),
        bits=letters.get(next(iter(hashes)) or "") if len(hashes) == 1 else None,
        is_counted=all(run.is_counted for run in runs),
        error=error,
    )


def _spread(runs: Sequence[Measured], value: Callable[[Measured], float | None]) -> Spread | None:
    found = [number for run in runs if (number := value(run)) is not None]
    return Spread(median(found), min(found), max(found)) if found else None


HEADING = ("recipe", "ranks", "steps/s", "tokens/s", "loss", "MB/step", "peak memory", "idle", "bits")


def heading(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the heading over these rows: the speed of training on images is in samples."""
    has_samples = any(row.samples_per_s for row in rows)
    return tuple("samples/s" if has_samples and name == "tokens/s" else name for name in HEADING)


def cells(row: Row) -> tuple[str, ...]:
    """Render the cells of a row, under `heading`."""
    if row.error is not None and not row.runs:
        return (row.name, "failed", *["–"] * (len(HEADING) - 2))
    sign = "" if row.is_counted else "≈ "
    return (
        row.name,
        row.ranks,
        _text(row.steps_per_s, "{:.1f}", with_spread=True),
        _text(row.tokens_per_s or row.samples_per_s, "{:,.0f}"),
        _text(row.loss, "{:.3f}"),
        sign + _text(row.bytes_per_step, "{:.2f}", scale=1e-6),
        _text(row.memory_bytes, "{:.0f} MB", scale=1e-6),
        _text(row.idle_share, "{:.0f} %", scale=100),
        row.bits or "–",
    )


def _text(spread: Spread | None, form: str, *, scale: float = 1.0, with_spread: bool = False) -> str:
    if spread is None:
        return "–"
    text = form.format(spread.median * scale)
    if not with_spread or spread.least == spread.most:
        return text
    return f"{text} ({form.format(spread.least * scale)} to {form.format(spread.most * scale)})"


def render_markdown(rows: Sequence[Row], workload: Workload, *, machine: str) -> str:
    """Render the comparison as a page: what was run, the table, and the meaning of its columns."""
    table = [heading(rows), tuple("---" for _ in HEADING), *map(cells, rows)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    failed = [f"- {row.name}: {row.error}" for row in rows if row.error is not None]
    return "\n".join(
        [
            f"{machine}. Every recipe with the same model, data and seed for {workload.steps} steps:",
            "",
            *(f"- `--set '{one}'`" for one in workload.settings()),
            "",
            *lines,
            "",
            *_LEGEND,
            *(["", "Failed:", "", *failed] if failed else []),
            "",
        ]
    )


_LEGEND = (
    "Medians over repeats, with minimum and maximum in brackets. steps/s: global batches per second, without the first quarter of the steps.",
    "loss: of the validation after the last step. MB/step: sent by all ranks together; ≈: counted partly by the recipe's formula,",
    "because another library sends some of the bytes. peak memory: what the process of the largest rank held, with torch's own libraries;",
    "`--profile-steps` counts only the memory of tensors. idle: share of a step in which ranks that compute gradients",
    "could only wait. bits: equal letters, equal parameters to the last bit; –: the repeats of one recipe differ.",
)


def render_json(rows: Sequence[Row], workload: Workload, *, machine: str, repeats: int) -> dict[str, Any]:
    """Return the comparison as JSON."""
    return {
        "machine": machine,
        "workload": {"steps": workload.steps, "settings": workload.settings(), "repeats": repeats},
        "rows": [_row_as_json(row) for row in rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    values = {
        name: vars(value) if isinstance(value, Spread) else value for name, value in vars(row).items() if name != "runs"
    }
    return {**values, "runs": [as_json(run) for run in row.runs]}
