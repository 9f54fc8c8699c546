"""Whether a plan fits into so much memory for each rank, and the nearest change of its configuration that does."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.predict import NotPredicted, predict
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import LaunchError, shown, usage_error
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.metrics.prediction import Prediction, process_bytes

_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?([kKMGT])(i?)B")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_RESERVE, _RESERVE_BYTES = 1.05, 48_000_000
"""How much more than predicted a rank may need: freed memory has holes in which the next tensor has no room."""
_LAST_STAGE = 3


@dataclass(frozen=True)
class Fit:
    """Whether a plan fits.

    Attributes:
        limit: The bytes that each rank may take.
        needed: The bytes that the largest rank takes as the plan is.
        change: The values of the configuration, as `KEY=VALUE`, with which it fits; empty if it fits as it is; None if none of
            the changes that were tried is enough.
        changed: The bytes that the largest rank takes with the change; with the best one that was tried if none is enough.
    """

    limit: int
    needed: int
    change: tuple[str, ...] | None
    changed: int

    def as_json(self) -> dict[str, Any]:
        change = None if self.change is None else list(self.change)
        return {"limit": self.limit, "needed": self.needed, "change": change, "needed_with_change": self.changed}


def parse_limit(text: str) -> int:
    """Return the bytes of a size such as `24GB` or `512 MiB`.

    Raises:
        LaunchError: It is no size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise usage_error(
            f"`--fits {shown(text)}` names no size", "`--fits 24GB`, or a number and kB, MB, TB, MiB, GiB"
        )
    number, unit, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** _POWERS[unit.upper()])


def find_fit(spec: RunSpec, config: Mapping[str, Any], prediction: Prediction, *, limit: int) -> Fit:
    """Find the first change of the configuration with which every rank fits; the nearest ones are tried first.

    Cost: a prediction for each change that is tried, at most a dozen.
    """
    needed = least = needed_bytes(prediction)
    if needed <= limit:
        return Fit(limit, needed, (), needed)
    for change in _changes(config):
        try:
            prepared = prepare(replace(spec, overrides=(*spec.overrides, *change)), Unattended())
        except LaunchError:  # such as more workers than the hosts have slots
            continue
        found = predict(prepared.plan)
        if isinstance(found, NotPredicted):
            continue
        least = min(least, needed_bytes(found))
        if needed_bytes(found) <= limit:
            return Fit(limit, needed, change, needed_bytes(found))
    return Fit(limit, needed, None, least)


def needed_bytes(prediction: Prediction) -> int:
    """Return what the process of the largest rank takes, on the safe side; ranks of a host divide the pages of libraries among them."""
    most = max((process_bytes(prediction, one) for one in prediction.ranks), default=prediction.library_bytes)
    divided = prediction.shared_bytes * (1 - 1 / prediction.most_on_host)
    return int(_RESERVE * (most - divided)) + _RESERVE_BYTES


def needed_by_host(prediction: Prediction, hosts: Sequence[str]) -> dict[str, int]:
    """Return what the processes on each host take together, on the safe side.

    Args:
        prediction: The prediction.
        hosts: The host of each rank.
    """
    found: dict[str, int] = {}
    for one, host in zip(prediction.ranks, hosts, strict=True):
        # The pages of libraries are there once, with the first rank of a host.
        again = prediction.shared_bytes if host in found else 0
        found[host] = found.get(host, 0) + int(_RESERVE * (process_bytes(prediction, one) - again)) + _RESERVE_BYTES
    return found


def _changes(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield changes, those that keep the bits of training first, then single ones before pairs."""
    training = config.get("training_config")
    if not isinstance(training, Mapping):  # a recipe without training has none of these keys
        return
    computed_again = () if training["activation_checkpointing"] else ("training_config.activation_checkpointing=true",)
    if computed_again:
        yield computed_again
    stage = config.get("zero_config", {}).get("stage", _LAST_STAGE)
    yield from ((f"zero_config.stage={more}",) for more in range(stage + 1, _LAST_STAGE + 1))
    size = training["micro_batch_size"] or max(1, training["batch_size"] // 8)
    smaller = []
    while size > 1:
        size //= 2
        smaller.append(f"training_config.micro_batch_size={size}")
    yield from ((one,) for one in smaller)
    workers = config["multihost_config"].get("num_workers") or 1
    yield from ((f"multihost_config.num_workers={workers * more}",) for more in (2, 4))
    yield from ((*computed_again, one) for one in smaller if computed_again)
