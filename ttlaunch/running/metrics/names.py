"""Name the numbers of events, the same in every sink: `train/loss`, `time/step_s`; and summarise them by name."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ttlaunch import contract
from ttlaunch.running.metrics.event_log import EXITED, TIMES, TRAFFIC, Event, LoggedRun

_PREFIXES = {
    contract.KIND_STEP: "train",
    contract.KIND_VALIDATION: "validation",
    TIMES: "time",
    contract.KIND_RESULT: "result",
}
_OF_OPERATIONS = {"bytes": "sent_bytes", "messages": "sent_messages", "waited_s": "waited_s"}

_GUIDE_NAMES = {
    "classic_dp": "ClassicDP",
    "elastic_dp": "EDP",
    "fully_sharded": "FSDP",
    "pipeline_parallel": "MP",
    "sync_ps": "SyncPS",
    "zero": "FSDP",
}
"""What the training guide calls the algorithms that it has."""


def metrics_of(event: Event) -> dict[str, float]:
    """The numbers of an event, by their names; empty for one that has none.

    Of a training step: `train/…`; of a validation: `validation/…`; of a layer's gradient: `gradients/LAYER`; of what the
    rank's time went into: `time/…_s`; of what it sent: `communication/…` for all operations together and
    `communication/OPERATION/…` for each; at its end: `memory/peak_bytes`.
    """
    if event.kind == contract.KIND_LAYER_NORMS:
        return dict(_numbers("gradients", event.values.get("norms")))
    if event.kind == TRAFFIC:
        return _traffic(event.values["operations"])
    if event.kind == EXITED:
        peak = event.values.get("peak_memory_bytes")
        return {"memory/peak_bytes": float(peak)} if peak else {}
    prefix = _PREFIXES.get(event.kind)
    values = event.values.get("values") if event.kind == contract.KIND_RESULT else event.values
    return dict(_numbers(prefix, values)) if prefix else {}


def _numbers(prefix: str, values: Any) -> Iterator[tuple[str, float]]:
    """The numbers among named values; none where a recipe has written something else."""
    if not isinstance(values, Mapping):
        return
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                yield f"{prefix}/{name}", float(value)


def _traffic(operations: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for counted, name in _OF_OPERATIONS.items():
        found[f"communication/{name}"] = math.fsum(one[counted] for one in operations.values())
        found |= {f"communication/{operation}/{name}": float(one[counted]) for operation, one in operations.items()}
    return found


def rank_run_name(run: LoggedRun, rank: int) -> str:
    """A rank as the training guide names its runs: `{Algorithm}-{role}-{hostname}_rank{X}_lr{Y}_bs{Z}`."""
    row, training = run.ranks[rank], run.config.get("training_config") or {}
    rate, size = training.get("learning_rate", 0), training.get("batch_size", 0)
    return f"{algorithm(run.recipe)}-{row.role}-{row.host}_rank{row.rank}_lr{rate}_bs{size}"


def algorithm(recipe: str) -> str:
    """What the training guide calls a recipe's algorithm; for others the recipe's own name, such as `LocalSgd`."""
    return _GUIDE_NAMES.get(recipe) or "".join(part[:1].upper() + part[1:] for part in recipe.split("_"))


@dataclass
class Summary:
    """One metric of one rank."""

    name: str
    rank: int
    count: int
    first: float
    last: float
    least: float
    most: float

    @property
    def values(self) -> tuple[float, float, float, float]:
        return self.first, self.last, self.least, self.most


def summarise(events: Iterable[Event]) -> list[Summary]:
    """Summarise every number by name and rank; a NaN is counted and is never the least or the most."""
    found: dict[tuple[str, int], Summary] = {}
    for event in events:
        if event.rank is None:
            continue
        for name, value in metrics_of(event).items():
            known = found.setdefault((name, event.rank), Summary(name, event.rank, 0, value, value, value, value))
            known.count += 1
            known.last = value
            known.least = value if math.isnan(known.least) else min(known.least, value)
            known.most = value if math.isnan(known.most) else max(known.most, value)
    return [found[key] for key in sorted(found)]
