"""What a plan was predicted to hold and to send, rank by rank, and how far a run was from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.prediction import PREDICTION_FILE, PredictionEnd, RankPrediction
from ttlaunch.running.metrics.telemetry import KINDS, RankMemory, RankTelemetry
from ttlaunch.running.metrics.time_prediction import BUSY, Interval, TimePrediction
from ttlaunch.running.metrics.times import step_times
from ttlaunch.running.metrics.traffic import Settlement, expected_traffic
from ttlaunch.running.runs.files import read_file

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.traffic import Traffic

NOTED_ERROR = 0.1
"""The part of a prediction by which a run may differ before the report says which term missed."""

RUNNING_BYTES = 13_000_000
"""What the process of a rank takes besides tensors, data and what its libraries take after a step: Python and messages, with pages of files. Measured
with the built-in recipes over Open MPI."""
_KERNELS = 3
"""A rank that makes no passes only adds up and updates, for which it needs this part of torch's code for a step."""

_KEPT_BYTES = 64 * 2**20
"""The most freed memory that glibc keeps at the end of its heap: twice its largest threshold from which on a block is mapped by itself."""
_FEWEST_STEPS = 5
_VALUE_BYTES = 4
_SHARES_GRADIENTS, _SHARES_PARAMETERS = 2, 3  # stages of ZeRO
_ADAMW_BYTES, _SGD_BYTES = 8, 4  # means and mean squares; with SGD only the momentum


@dataclass(frozen=True)
class PredictedRank:
    """One rank of a prediction.

    Attributes:
        sizes: For each kind of tensor, the most bytes at any moment of a step; empty for a rank that makes no steps.
        peak: The most bytes of all kinds together at one moment; None for such a rank.
        held: For weights, gradients and optimizer state, the bytes that the rank holds from step to step.
        formula: The same by closed formulas.
        sums_at_most: By the formula, the most that partial sums of gradients take; they are among the buffers.
        makes_passes: Whether it runs the model in a step.
        saved: The bytes of the copy that it keeps for its checkpoints: weights and optimizer state; 0 if it saves none.
        saves_early: Whether it makes steps after its first checkpoint, so that the copy is there at the peak of a step.
        extent: The most bytes that tensors take where small pieces of memory stay with the process when they are freed.
        left: Those at the end of a step.
        small: Those of them that small pieces take.
        factors: What is kept to compare replicas.
        workspaces: What the library of matrix products keeps.
    """

    rank: int
    role: str
    sizes: dict[str, int]
    peak: int | None
    held: dict[str, int]
    formula: dict[str, int]
    sums_at_most: int
    makes_passes: bool = True
    saved: int = 0
    saves_early: bool = True
    extent: int = 0
    left: int = 0
    small: int = 0
    factors: int = 0
    workspaces: int = 0

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Prediction:
    """What a plan will hold and send.

    Attributes:
        library_bytes: What a process with torch and the transport takes before it has any tensor.
        flows: What goes from rank to rank, by operation; None if the bytes cannot be known beforehand.
        no_flows: Why not, as a clause.
        shared_bytes: Those of `library_bytes` that are pages of files, of which the ranks of a host have only one copy together.
        data_bytes: What the training data takes in each rank.
        data_most_bytes: What it takes at most while it is prepared.
        computing_bytes: What torch loads for the first step that it computes.
        computing_shared_bytes: Those of `computing_bytes` that are pages of files.
    """

    library_bytes: int
    ranks: "tuple[PredictedRank, ...]"
    flows: "tuple[Traffic, ...] | None"
    no_flows: str | None
    shared_bytes: int = 0
    data_bytes: int = 0
    data_most_bytes: int = 0
    computing_bytes: int = 0
    computing_shared_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """The bytes of all ranks in a step, without those that only some steps send."""
        return sum(one.per_step for one in self.flows or () if one.every == 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "library_bytes": self.library_bytes,
            "library_shared_bytes": self.shared_bytes,
            "computing_bytes": self.computing_bytes,
            "computing_shared_bytes": self.computing_shared_bytes,
            "data_bytes": self.data_bytes,
            "data_most_bytes": self.data_most_bytes,
            "ranks": [one.as_json() for one in self.ranks],
            "flows": None if self.flows is None else [one._asdict() for one in self.flows],
            "no_flows": self.no_flows,
            "step_bytes": self.step_bytes,
        }


def kept_prediction(folder: Path, plan: Mapping[str, Any], *, runs_recipe: bool) -> Prediction | None:
    """Read the prediction that is kept in a run's folder; None if there is none that fits the plan."""
    data = read_file(folder / PREDICTION_FILE)
    return None if data is None else read_prediction(data, plan, runs_recipe=runs_recipe)


def read_prediction(data: bytes, plan: Mapping[str, Any], *, runs_recipe: bool) -> Prediction | None:
    """Parse what the process that predicts wrote; None if it does not fit the plan.

    Args:
        data: The content of its file.
        plan: The content of `plan.json`.
        runs_recipe: Whether the recipe's formula may be run; see `settle`.
    """
    found = read(PredictionEnd, data)
    rows = plan.get("ranks")
    if isinstance(found, BadRecord) or not isinstance(rows, list) or len(found.ranks) != len(rows):
        return None
    roles = [str(row["role"]) for row in sorted(rows, key=lambda row: int(row["rank"]))]
    facts = [one.facts for one in found.ranks]
    flows, reason = expected_traffic(plan, roles=roles, facts=facts, runs_recipe=runs_recipe)
    ranks = tuple(
        _rank(rank, role, one, config=plan["config"], workers=roles.count(role) if role == "worker" else 1)
        for rank, (role, one) in enumerate(zip(roles, found.ranks, strict=True))
    )
    sent = None if flows is None else tuple(flows)
    return Prediction(
        found.library_bytes,
        ranks,
        sent,
        reason,
        found.library_shared_bytes,
        data_bytes=found.data_bytes,
        data_most_bytes=found.data_most_bytes,
        computing_bytes=found.computing_bytes,
        computing_shared_bytes=found.computing_shared_bytes,
    )


def _rank(rank: int, role: str, one: RankPrediction, *, config: Mapping[str, Any], workers: int) -> PredictedRank:
    has_memory = {"peak", *KINDS} <= one.memory.keys()
    peak = one.memory["peak"] if has_memory else None
    formula = _formula(one.facts, config, updates=one.held.get("optimizer", 0) > 0)
    return PredictedRank(
        rank,
        role,
        {kind: one.memory[kind] for kind in KINDS} if has_memory else {},
        peak,
        {kind: one.held.get(kind, 0) for kind in formula},
        formula,
        _sums_at_most(one.facts, workers=workers),
        one.facts.get("passes") != 0,
        _saved(one, config),
        _saves_early(config),
        one.memory.get("extent", 0),
        one.memory.get("left", 0),
        one.memory.get("small", 0),
        one.facts.get("factor_bytes", 0),
        one.workspace_bytes,
    )


def _saved(one: RankPrediction, config: Mapping[str, Any]) -> int:
    """Return the bytes of a rank's shard: of values that other ranks update, ZeRO saves no weight, even where it holds them."""
    if not one.facts.get("saves") or not config.get("checkpoint_config", {"interval": 1})["interval"]:
        return 0
    weights = one.held.get("parameters", 0)
    owned = _VALUE_BYTES * one.facts.get("owned_values", weights)
    return min(weights, owned) + one.held.get("optimizer", 0)


def _saves_early(config: Mapping[str, Any]) -> bool:
    interval = config.get("checkpoint_config", {}).get("interval")
    return interval is not None and interval < config.get("training_config", {}).get("steps", 0)


def _formula(facts: Mapping[str, int], config: Mapping[str, Any], *, updates: bool) -> dict[str, int]:
    """Return what is held from step to step: 4 bytes of each weight and of each gradient, and the state of what the rank updates.

    The state is 8 bytes of a value with AdamW, and 4 of each tensor, which counts its updates; with SGD 4 of a value. Of values that other
    ranks update, ZeRO keeps no state from stage 1 on, no gradient from stage 2 on, and no weight in stage 3.
    """
    values, stage = facts.get("values", 0), config.get("zero_config", {}).get("stage", 0)
    owned = facts.get("owned_values", values)
    is_adamw = config.get("training_config", {}).get("optimizer") == "adamw"
    counters = _VALUE_BYTES * facts.get("owned_tensors", facts.get("tensors", 0)) if is_adamw else 0
    state = (_ADAMW_BYTES if is_adamw else _SGD_BYTES) * owned + counters
    return {
        "parameters": _VALUE_BYTES * (owned if stage >= _SHARES_PARAMETERS else values),
        "gradients": _VALUE_BYTES * (owned if stage >= _SHARES_GRADIENTS else values),
        "optimizer": state if updates else 0,
    }


def _sums_at_most(facts: Mapping[str, int], *, workers: int) -> int:
    """Return the bytes of ⌈log₂ B⌉ + 1 vectors: a tree over the B micro-batches that a rank adds up has no more unfinished sums.

    A rank that makes passes adds up as many; it has all micro-batches of its replica where ranks split matrices. One that makes none adds
    up those of the step, for the workers.
    """
    block = facts.get("passes", 0) or -(-facts.get("micro_batches", 0) // workers)
    return ((block - 1).bit_length() + 1) * _VALUE_BYTES * facts.get("values", 0) if block else 0


@dataclass(frozen=True)
class MemoryVerdict:
    """A rank's memory as it was predicted and as it was measured.

    Attributes:
        of: What was measured: `tensors` at their peak in a step, or the `process` at its largest.
        error: By how much the prediction was wrong, as a part of what was measured; positive: too high.
        missed: The kind of tensors whose prediction was wrong by most bytes; of a process, whose parts nobody measures, the largest
            part of the prediction. None if all were right.
    """

    rank: int
    of: str
    predicted: int
    measured: int
    error: float
    missed: str | None

    @property
    def is_noted(self) -> bool:
        return abs(self.error) > NOTED_ERROR

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class TimeVerdict:
    """The time of a step as it was predicted and as the ranks measured it, both of the rank whose steps take longest.

    Attributes:
        predicted: The interval; only its ends count if ranks outnumber cores.
        is_busy: Whether other programs had the cores during the calibration.
        measured: The median of the steps, in seconds.
        error: As in `MemoryVerdict`; of an interval alone, by how much the measurement lies outside of it.
        missed: The phase whose prediction was wrong by most; None if all were right.
    """

    rank: int
    predicted: Interval
    is_wide: bool
    is_busy: bool
    measured: float
    error: float
    missed: str | None

    @property
    def is_noted(self) -> bool:
        return abs(self.error) > NOTED_ERROR

    @property
    def excuse(self) -> str:
        """Say if the measurement is one of those that a calibration beside other programs expects."""
        is_within = self.is_busy and self.predicted.low <= self.measured <= self.predicted.high
        return "; it is within the interval of the calibration, during which the machine was busy" if is_within else ""

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "predicted": self.predicted.as_json()}


@dataclass(frozen=True)
class Verdict:
    """What was predicted of a run, beside what the run measured.

    Attributes:
        sent: The bytes between all ranks by the formula, and those that were counted; None if either is not known.
        memory: For each rank whose memory was measured, and for which it was predicted.
        no_memory: Why no memory was predicted, as a clause; None if it was, or if there is nothing to compare it with.
        time: The time of a step.
        no_time: Why no time was predicted.
    """

    sent: tuple[int, int] | None
    memory: tuple[MemoryVerdict, ...]
    no_memory: str | None = None
    time: TimeVerdict | None = None
    no_time: str | None = None

    @property
    def sent_error(self) -> float | None:
        """By how much the predicted bytes were wrong, as a part of those that were counted."""
        return (self.sent[0] - self.sent[1]) / self.sent[1] if self.sent and self.sent[1] else None

    def notes(self) -> list[str]:
        """Say which predictions were wrong by more than `NOTED_ERROR`, and which term missed."""
        sent = self.sent_error or 0.0
        time = self.time if self.time is not None and self.time.is_noted else None
        return [
            *([f"the bytes between ranks were predicted {_off(sent)}"] if abs(sent) > NOTED_ERROR else []),
            *(
                f"the {_NAMES[one.of]} of rank {one.rank} was predicted {_off(one.error)}, mostly its {one.missed}"
                for one in self.memory
                if one.is_noted
            ),
            *(
                [f"the time of a step was predicted {_off(time.error)}, mostly its {time.missed}{time.excuse}"]
                if time
                else []
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        sent = None if self.sent is None else {"predicted": self.sent[0], "measured": self.sent[1]}
        return {
            "bytes": None if sent is None else {**sent, "error": self.sent_error},
            "memory": [one.as_json() for one in self.memory],
            "not_predicted": self.no_memory,
            "time": None if self.time is None else self.time.as_json(),
            "time_not_predicted": self.no_time,
            "notes": self.notes(),
        }


_NAMES = {"tensors": "memory", "process": "process"}


def _off(error: float) -> str:
    return f"{abs(error):.0%} too {'high' if error > 0 else 'low'}"


def judge(
    traffic: Settlement | None,
    prediction: Prediction | None,
    measured: Sequence[RankMemory],
    *,
    processes: Mapping[int, int] | None = None,
    no_memory: str | None = None,
) -> Verdict:
    """Compare what was predicted with what the ranks of a run measured; see `judge_time` for the time.

    Args:
        traffic: The bytes between ranks.
        prediction: The memory.
        measured: The memory of tensors, of ranks that measured it.
        processes: By rank, the bytes that its process had in memory at most.
        no_memory: Why no memory was predicted.
    """
    edges = () if traffic is None else traffic.edges
    both = [(one.expected, one.size) for one in edges if one.expected is not None and one.size is not None]
    sent = (sum(said for said, _ in both), sum(size for _, size in both)) if both else None
    ranks = () if prediction is None else prediction.ranks
    tensors = [_judge_memory(ranks[one.rank], one) for one in measured if ranks and ranks[one.rank].sizes]
    whole = [
        _judge_process(prediction, ranks[rank], size)
        for rank, size in sorted((processes or {}).items())
        if prediction is not None and rank < len(ranks) and ranks[rank].sizes
    ]
    return Verdict(sent, (*tensors, *whole), no_memory)


def _judge_memory(said: PredictedRank, one: RankMemory) -> MemoryVerdict:
    off = {kind: abs(said.sizes[kind] - one.sizes[kind]) for kind in KINDS}
    worst = max(KINDS, key=lambda kind: off[kind])
    peak = said.peak or 0
    error = (peak - one.peak) / max(1, one.peak)
    return MemoryVerdict(one.rank, "tensors", peak, one.peak, error, worst if off[worst] else None)


def process_bytes(prediction: Prediction, one: PredictedRank) -> int:
    """Return what a rank's process has in memory at its largest: libraries, data, what runs beside them, and what `held_at_most` returns."""
    computing = prediction.computing_bytes // (1 if one.makes_passes else _KERNELS) + one.workspaces
    beside = RUNNING_BYTES + prediction.data_bytes + one.factors
    return prediction.library_bytes + computing + beside + held_at_most(one)


def held_at_most(one: PredictedRank) -> int:
    """Return the bytes of tensors at their peak, of the copy for checkpoints, and of freed memory that the process keeps.

    Memory of activations that are freed stays with the process, and much of it has holes in which the next ones have no room.
    """
    return (one.peak or 0) + one.saved + min(_KEPT_BYTES, one.sizes.get("activations", 0))


def _judge_process(prediction: Prediction, said: PredictedRank, size: int) -> MemoryVerdict:
    predicted = process_bytes(prediction, said)
    error = (predicted - size) / max(1, size)
    largest = "tensors" if held_at_most(said) > predicted / 2 else "libraries"
    return MemoryVerdict(said.rank, "process", predicted, size, error, largest if error else None)


def judge_time(said: TimePrediction, telemetry: Sequence[RankTelemetry]) -> TimeVerdict | None:
    """Compare the time of a step with what the ranks of a run measured; None if they have done too few steps."""
    found = [(one.rank, step_times([one])) for one in telemetry if len(one.steps) >= _FEWEST_STEPS]
    known = [(rank, times) for rank, times in found if times is not None]
    if not known:
        return None
    rank, slowest = max(known, key=lambda one: one[1].step.median)
    predicted, measured = said.step, slowest.step.median
    nearest = min(max(measured, predicted.low), predicted.high) if said.is_wide else predicted.median
    error = (nearest - measured) / max(measured, 1e-9)
    terms = next((one.phases for one in said.ranks if one.rank == rank), {})
    took = {share.name: share.median for share in slowest.phases}
    off = {name: abs(one.median - took.get(name, 0.0)) for name, one in terms.items()}
    missed = max(off, key=lambda name: off[name]) if off and error else None
    return TimeVerdict(rank, predicted, said.is_wide, said.kept.busy >= BUSY, measured, error, missed)
