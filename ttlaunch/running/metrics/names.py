"""Name the numbers in events, with the same names for every sink (`train/loss`, `time/step_s`), and summarise them by name."""

import contextlib
import math
import re
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
    contract.KIND_PRINTED: "printed",
    contract.KIND_USAGE: "processes",
}
_OF_OPERATIONS = {"bytes": "sent_bytes", "messages": "sent_messages", "waited_s": "waited_s"}

_OPERATION = re.compile(r"communication/(?P<operation>.+)/(?P<name>sent_bytes|sent_messages|waited_s)")
_LAYER = re.compile(r"gradients/(?P<layer>.+)")
_SUMMED = "communication/"
"""The prefix of metrics whose values are added up; Prometheus calls such a metric a counter and computes its `rate()`."""

_GUIDE_NAMES = {
    "classic_dp": "ClassicDP",
    "elastic_dp": "EDP",
    "fully_sharded": "FSDP",
    "pipeline_parallel": "MP",
    "sync_ps": "SyncPS",
    "zero": "FSDP",
}
"""The training guide's names of recipes' algorithms."""


def metrics_of(event: Event) -> dict[str, float]:
    """Name the numbers of an event; empty for an event without any.

    The names are `train/…` for a training step, `validation/…` for a validation, `gradients/LAYER` for the gradients of
    layers, `time/…_s` for the parts of a step's time, `communication/…` for the messages of all operations,
    `communication/OPERATION/…` for those of each operation, `printed/…` for the numbers in a line of a script, `processes/…` for
    what its processes use, and `memory/peak_bytes` for the end of a rank.
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
    """Yield the numbers among named values; a recipe may have written values of other types."""
    if not isinstance(values, Mapping):
        return
    for name, value in values.items():
        kind = type(value)
        if kind is float:
            yield f"{prefix}/{name}", value
        elif kind is int:
            with contextlib.suppress(OverflowError):
                yield f"{prefix}/{name}", float(value)


def _traffic(operations: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for counted, name in _OF_OPERATIONS.items():
        found[f"communication/{name}"] = math.fsum(one[counted] for one in operations.values())
        found |= {f"communication/{operation}/{name}": float(one[counted]) for operation, one in operations.items()}
    return found


def series_of(name: str) -> tuple[str, tuple[tuple[str, str], ...], bool]:
    """Divide a name into that of a series and the labels in it, and say whether the values of the series are added up.

    >>> series_of("communication/gradients/sent_bytes")
    ('operation/sent_bytes', (('operation', 'gradients'),), True)
    """
    if of_operation := _OPERATION.fullmatch(name):
        return f"operation/{of_operation['name']}", (("operation", of_operation["operation"]),), True
    if of_layer := _LAYER.fullmatch(name):
        return "layer/grad_norm", (("layer", of_layer["layer"]),), False
    return name, (), name.startswith(_SUMMED)


def rank_run_name(run: LoggedRun, rank: int) -> str:
    """Return the name of a rank's run in the training guide's form: `{Algorithm}-{role}-{hostname}_rank{X}_lr{Y}_bs{Z}`."""
    row, training = run.ranks[rank], run.config.get("training_config") or {}
    rate, size = training.get("learning_rate", 0), training.get("batch_size", 0)
    return f"{algorithm(run.recipe)}-{row.role}-{row.host}_rank{row.rank}_lr{rate}_bs{size}"


def algorithm(recipe: str) -> str:
    """Return the training guide's name for a recipe's algorithm, or a name made of the recipe's, such as `LocalSgd`."""
    return _GUIDE_NAMES.get(recipe) or "".join(part[:1].upper() + part[1:] for part in recipe.split("_"))


@dataclass
class Summary:
    """The summary of one metric of one rank."""

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
    """Summarise the numbers of each name and rank; NaN counts as a value, but not for `least` and `most` if there are others."""
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
