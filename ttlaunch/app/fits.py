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
from ttlaunch.running.metrics.prediction import PredictedRank, Prediction, held_at_most

_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?([kKMGT])(i?)B")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_RUNNING_BYTES = 5_800_000
"""What a rank takes besides, without pages of files: Python, messages, and what the kernel keeps for the process. Measured with the built-in recipes
over Open MPI."""
_LIMITED, _UNLIMITED = (1.002, 5_000_000), (1.03, 10_000_000)
"""How much more than that a rank may need, as a part and in bytes: the kernel's tables of pages, 8 bytes for each of 4 kB, and by how much ranks
differed from the prediction: from 4 MB less to 3 MB more, 7 MB of 2.6 GB, and 5 MB while Python compiled their code. Where no group limits them, their tensors lie between holes."""
_OTHER_BUCKETS = 0.005
"""The part of its tensors by which a step may take more than the predicted one, where ranks exchange gradients in buckets of another size:
the first steps try some. Measured: 3.4 MB of 656 and 10.6 MB of 2,525."""
_LAST_STAGE = 3


@dataclass(frozen=True)
class Fit:
    """Whether a plan fits.

    Attributes:
        limit: The bytes that each rank may take.
        needed: The bytes that the largest rank needs as the plan is.
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
    """Return with how much memory the largest rank cannot be killed for its limit, on the safe side."""
    return max((_safe(unreclaimable_bytes(prediction, one), *_LIMITED) for one in prediction.ranks), default=0)


def unreclaimable_bytes(prediction: Prediction, one: PredictedRank) -> int:
    """Return what a rank takes at its largest that the kernel cannot take back.

    It can take back pages of files, such as the code of libraries: it reads them again when they are used. Where memory is scarce, it does that
    before it kills, so a rank is killed only for what remains. Whether other ranks on its host share its libraries changes nothing.
    """
    steps = prediction.data_bytes + one.small  # small pieces lie between holes, at most as large as they are
    extent = one.extent if len(prediction.ranks) == 1 else int((1 + _OTHER_BUCKETS) * one.extent)
    at_most = max(
        steps + extent + one.saved * one.saves_early,
        steps + one.left + one.saved,
        prediction.data_most_bytes + one.held.get("parameters", 0) + one.held.get("gradients", 0),
    )
    return _kept_bytes(prediction, one) + at_most


def _kept_bytes(prediction: Prediction, one: PredictedRank) -> int:
    libraries = prediction.library_bytes - prediction.shared_bytes
    computing = prediction.computing_bytes - prediction.computing_shared_bytes
    return libraries + _RUNNING_BYTES + one.factors + computing * one.makes_passes + one.workspaces


def needed_by_host(prediction: Prediction, hosts: Sequence[str]) -> dict[str, int]:
    """Return what the ranks on each host take together, on the safe side, with the code of libraries, which a host should not read again and again.

    Ranks reach their peaks at different times, but nothing keeps them from the same one.

    Args:
        prediction: The prediction.
        hosts: The host of each rank.
    """
    found = dict.fromkeys(
        hosts, prediction.shared_bytes
    )  # the pages of libraries are there once, for all ranks of a host
    for one, host in zip(prediction.ranks, hosts, strict=True):
        size = _kept_bytes(prediction, one) + prediction.data_bytes + held_at_most(one)
        found[host] += _safe(size, *_UNLIMITED)
    return found


def _safe(size: int, part: float, more: int) -> int:
    """Add the reserve; the part is of all bytes, libraries included."""
    return int(part * size) + more


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
