"""What a step of a plan was predicted to take, from a calibration of this host that is kept outside of the project.

A calibration has rehearsed the plan's own ranks (`ttlaunch/runtime/calibration/`). It is kept by host and by release of ttlaunch, and in
there by a key of everything that a step's time depends on: the recipe's files, the configuration, the roles. The
number of steps, the learning rate, checkpoints and the like do not belong to it, so a calibration serves every run of the same work.
"""

import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.hosts.sync.hash_cache import cache_folder
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.calibration import (
    KEPT_FORMAT,
    KeptCalibration,
    KeptPlan,
    KeptRank,
    RehearsalEnd,
    RehearsedStep,
)
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.running.runs.files import read_file, write_whole

PHASES = ("forward", "backward", "update", "exchange")
"""The phases of a step, as telemetry has them; `exchange` is the rest of it. Each contains the waits within it."""
WAITS = ("exposed", "waiting")
BUSY = 1.25
"""Elapsed time as a multiple of processor time from which on a calibration says that the machine was busy."""

_MOST_APART = 0.1
"""By how much the medians of two halves of a calibration may differ."""
_WIDEST = 3.0
"""How many times as long as the fastest tenth of its steps the slowest tenth may take."""
_MOST_PLANS = 200
_WITHOUT_TIME = {
    "training_config": (
        "seed",
        "steps",
        "num_epochs",
        "validation_interval",
        "verify_interval",
        "early_stop_patience",
        "early_stop_min_delta",
        "learning_rate",
        "beta1",
        "beta2",
        "epsilon",
        "weight_decay",
        "on_not_finite",
    )
}
"""Keys on which the time of a step does not depend."""
_OTHER_SECTIONS = ("scheduler_config", "checkpoint_config")


@dataclass(frozen=True)
class Interval:
    """A time in seconds: the median of all rehearsed steps, and times that a tenth and nine tenths of them do not exceed."""

    low: float
    median: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {"low_s": self.low, "median_s": self.median, "high_s": self.high}


@dataclass(frozen=True)
class RankTime:
    """The step of one rank.

    Attributes:
        step: All of it.
        phases: The parts in `PHASES`.
        exposed: In all phases, waits for messages that were under way.
        waiting: In all phases, waits for ranks that had not begun to send or to receive; in a pipeline, its bubble.
    """

    rank: int
    role: str
    step: Interval
    phases: dict[str, Interval]
    exposed: Interval
    waiting: Interval

    @property
    def computing_s(self) -> float:
        return self.step.median - self.exposed.median - self.waiting.median

    def as_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "role": self.role,
            "step": self.step.as_json(),
            "phases": {name: one.as_json() for name, one in self.phases.items()},
            "exposed": self.exposed.as_json(),
            "waiting": self.waiting.as_json(),
        }


@dataclass(frozen=True)
class TimePrediction:
    """The time of a step, and what it comes from.

    Attributes:
        step: That of the rank whose steps take longest.
        ranks: All ranks that count steps.
        is_wide: Whether ranks outnumber the cores, so that only the interval counts: who gets a core when is not known.
        is_pipeline: Whether ranks wait for each other because they are stages of a pipeline.
        kept: The calibration.
        not_kept: Why the calibration could not be kept for later; None if it was.
    """

    step: Interval
    ranks: tuple[RankTime, ...]
    is_wide: bool
    is_pipeline: bool
    kept: KeptPlan
    not_kept: str | None = None

    def as_json(self) -> dict[str, Any]:
        link = self.kept.link
        costs = None if link is None else {**vars(link), "samples": [vars(one) for one in link.samples]}
        return {
            "step": self.step.as_json(),
            "interval_only": self.is_wide,
            "ranks": [one.as_json() for one in self.ranks],
            "link": costs,
            "measured_at": self.kept.made,
            "steps": self.kept.steps,
            "copies": self.kept.copies,
            "busy": self.kept.busy,
        }


def predicted_time(plan: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> TimePrediction | None:
    """Return the time of a plan's steps if a calibration of it is kept here; None if not.

    Args:
        plan: The content of `plan.json`.
        environment: Says where the cache is.

    Cost: reads the recipe's and the runtime's files, about 20 ms.
    """
    kept = read_kept(environment)
    found = None if kept is None else kept.plans.get(key_of(plan))
    return None if found is None else time_of(found, plan)


def time_of(kept: KeptPlan, plan: Mapping[str, Any], *, cores: int | None = None) -> TimePrediction | None:
    """Return the time of a plan's steps by a calibration of it; None if the two do not belong together."""
    if len(kept.ranks) != len(plan["ranks"]):
        return None
    ranks = tuple(_rank_time(rank, one) for rank, one in enumerate(kept.ranks) if one.parts)
    if not ranks:
        return None
    cores = cores or len(os.sched_getaffinity(0))
    slowest = max(ranks, key=lambda one: one.step.median).step
    is_wide = len(plan["ranks"]) > cores
    if is_wide:
        together = sum(one.computing_s for one in ranks)
        low = max(slowest.low, together / cores)
        slowest = Interval(low, max(slowest.median, together / cores), max(slowest.high, low) + together / cores)
    pipeline = plan["config"].get("multihost_config", {}).get("pipeline_parallel_config")
    return TimePrediction(slowest, ranks, is_wide, bool(pipeline), kept)


def _rank_time(rank: int, one: KeptRank) -> RankTime:
    parts = {name: Interval(*values) for name, values in one.parts.items()}
    phases = {name: parts[name] for name in PHASES if name in parts}
    return RankTime(rank, one.role, parts["step"], phases, parts["exposed"], parts["waiting"])


def settle_rehearsal(copies: Sequence[RehearsalEnd]) -> KeptPlan | str:
    """Return what to keep of what all copies have found; or why it is useless, as a clause.

    A part of a step is the median over the steps of all copies: one step during which the machine did something else counts as
    one of many. The calibration is useless if its own steps do not agree.
    """
    findings = [text for one in copies for text in one.findings]
    if findings:
        return findings[0]
    count = min(len(one.ranks) for one in copies)
    ranks = [_kept_rank([one.ranks[rank].steps for one in copies], copies[0].ranks[rank].role) for rank in range(count)]
    slowest = max((rank for rank in range(count) if ranks[rank].parts), key=lambda rank: ranks[rank].parts["step"][1])
    steps = [step for one in copies for step in one.ranks[slowest].steps]
    halves = [statistics.median(step.all_s for step in half) for half in (steps[::2], steps[1::2])]
    apart = abs(halves[0] - halves[1]) / max(sum(halves) / 2, 1e-9)
    ordered = sorted(step.all_s for step in steps)
    low, _, high = _quantiles(ordered)
    if apart > _MOST_APART:
        return f"the medians of every second step and of the others differ by {apart:.0%}"
    if high > _WIDEST * low:
        return f"a tenth of the steps took up to {low * 1e3:.1f} ms, and a tenth {high * 1e3:.1f} ms or more"
    computed = sum(step.all_s - step.exposed_s - step.waiting_s for step in steps)
    return KeptPlan(
        made=time.time(),
        copies=len(copies),
        steps=len(steps),
        busy=sum(step.elapsed_s for step in steps) / max(computed, 1e-9),
        halves=apart,
        ranks=tuple(ranks),
        link=copies[0].link,
    )


def _kept_rank(copies: Sequence[Sequence[RehearsedStep]], role: str) -> KeptRank:
    steps = [step for one in copies for step in one]
    if not steps:
        return KeptRank(role=role, passes=0, parts={})
    low, median, high = _quantiles(sorted(step.all_s for step in steps))
    # The upper end is by the clock on the wall, which also ran while other programs had the core.
    slow = _quantiles(sorted(step.elapsed_s + step.exposed_s + step.waiting_s for step in steps))[2]
    parts: dict[str, tuple[float, ...]] = {"step": (low, median, max(high, slow))}
    for name in PHASES:
        parts[name] = _quantiles(sorted(step.phases.get(name, 0.0) for step in steps))
    parts["exposed"] = _quantiles(sorted(step.exposed_s for step in steps))
    parts["waiting"] = _quantiles(sorted(step.waiting_s for step in steps))
    return KeptRank(role=role, passes=round(statistics.median(step.passes for step in steps)), parts=parts)


def _quantiles(ordered: Sequence[float]) -> tuple[float, float, float]:
    last = len(ordered) - 1
    return ordered[int(0.1 * last)], statistics.median(ordered), ordered[last - int(0.1 * last)]


def key_of(plan: Mapping[str, Any]) -> str:
    """Return the key of everything in a plan that the time of its steps depends on."""
    config = {
        section: {key: value for key, value in content.items() if key not in _WITHOUT_TIME.get(section, ())}
        for section, content in plan["config"].items()
        if section not in _OTHER_SECTIONS and isinstance(content, Mapping)
    }
    rows = [(row["role"], row["host"], row["local_rank"]) for row in plan["ranks"]]
    data = (plan.get("data") or {}).get("sha256")
    engine = (plan.get("engine") or {}).get("name")
    content = [config, plan.get("layout"), plan.get("naive"), rows, data, engine]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    _add_files(digest, Path(plan["recipe"]["folder"]))
    return digest.hexdigest()[:32]


def _add_files(digest: Any, folder: Path) -> None:
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())


def host_and_release() -> tuple[str, str]:
    """Describe this machine and this release of ttlaunch: what a calibration holds for."""
    cores = len(os.sched_getaffinity(0))
    digest = hashlib.sha256()
    _add_files(digest, Path(contract.__file__).parent / "runtime")
    libraries = []
    for name in ("ttlaunch", "torch"):
        try:
            libraries.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            libraries.append(name)
    release = f"{', '.join(libraries)}, Python {platform.python_version()}, {digest.hexdigest()[:12]}"
    return f"{platform.node()}, {_processor()}, {cores} cores", release


def _processor() -> str:
    data = read_file(Path("/proc/cpuinfo")) or b""
    names = [line.partition(b":")[2].strip() for line in data.splitlines() if line.startswith(b"model name")]
    return names[0].decode(errors="replace") if names else f"{platform.machine()} {sys.platform}"


def kept_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the calibrations of this host and release are kept."""
    digest = hashlib.sha256("\n".join(host_and_release()).encode()).hexdigest()
    return cache_folder(environment) / "calibrations" / f"{digest[:32]}.json"


def read_kept(environment: Mapping[str, str] = os.environ) -> KeptCalibration | None:
    """Read the calibrations of this host and release; None if there are none that can be used."""
    data = read_file(kept_file(environment))
    found = BadRecord("none is kept") if data is None else read(KeptCalibration, data)
    if isinstance(found, BadRecord) or found.format != KEPT_FORMAT:
        return None
    is_whole = all(
        {"step", *WAITS} <= rank.parts.keys() and all(len(values) == 3 for values in rank.parts.values())  # noqa: PLR2004  an interval
        for plan in found.plans.values()
        for rank in plan.ranks
        if rank.parts
    )
    return found if is_whole else None


def keep(plan: Mapping[str, Any], found: KeptPlan, environment: Mapping[str, str] = os.environ) -> None:
    """Keep a calibration of a plan beside the others of this host and release, without the oldest if there are many.

    Raises:
        OSError: It cannot be written.
    """
    known = read_kept(environment)
    plans = {} if known is None else dict(known.plans)
    plans[key_of(plan)] = found
    newest = sorted(plans, key=lambda key: plans[key].made)[-_MOST_PLANS:]
    host, release = host_and_release()
    content = KeptCalibration(format=KEPT_FORMAT, host=host, release=release, plans={key: plans[key] for key in newest})
    path = kept_file(environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, default=vars) + "\n")
