"""What a plan was predicted to hold and to send, rank by rank, and how far a run was from it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.records.prediction import PREDICTION_FILE, PredictionEnd, RankPrediction
from ttlaunch.running.metrics.telemetry import KINDS, RankMemory
from ttlaunch.running.metrics.traffic import Settlement, expected_traffic
from ttlaunch.running.runs.files import read_file

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.traffic import Traffic

NOTED_ERROR = 0.1
"""The part of a prediction by which a run may differ before the report says which term missed."""

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
    """

    rank: int
    role: str
    sizes: dict[str, int]
    peak: int | None
    held: dict[str, int]
    formula: dict[str, int]
    sums_at_most: int

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Prediction:
    """What a plan will hold and send.

    Attributes:
        library_bytes: What a process with torch and the transport takes before it has any tensor.
        flows: What goes from rank to rank, by operation; None if the bytes cannot be known beforehand.
        no_flows: Why not, as a clause.
    """

    library_bytes: int
    ranks: "tuple[PredictedRank, ...]"
    flows: "tuple[Traffic, ...] | None"
    no_flows: str | None

    @property
    def step_bytes(self) -> int:
        """The bytes of all ranks in a step, without those that only some steps send."""
        return sum(one.per_step for one in self.flows or () if one.every == 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "library_bytes": self.library_bytes,
            "ranks": [one.as_json() for one in self.ranks],
            "flows": None if self.flows is None else [dict(vars(one)) for one in self.flows],
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
    return Prediction(found.library_bytes, ranks, None if flows is None else tuple(flows), reason)


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
    )


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
    """Return the bytes of ⌈log₂(M/W)⌉ + 1 vectors: a tree over a worker's micro-batches has no more unfinished sums."""
    block = -(-facts.get("micro_batches", 0) // workers)
    return ((block - 1).bit_length() + 1) * _VALUE_BYTES * facts.get("values", 0) if block else 0


@dataclass(frozen=True)
class MemoryVerdict:
    """A rank's memory as it was predicted and as the rank measured it.

    Attributes:
        error: By how much the prediction of the peak was wrong, as a part of what was measured; positive: too high.
        missed: The kind of tensors whose prediction was wrong by most bytes; None if all were right.
    """

    rank: int
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
class Verdict:
    """What was predicted of a run, beside what the run measured.

    Attributes:
        sent: The bytes between all ranks by the formula, and those that were counted; None if either is not known.
        memory: For each rank that measured its memory, and for which it was predicted.
        no_memory: Why no memory was predicted, as a clause; None if it was, or if no rank measured any.
    """

    sent: tuple[int, int] | None
    memory: tuple[MemoryVerdict, ...]
    no_memory: str | None = None

    @property
    def sent_error(self) -> float | None:
        """By how much the predicted bytes were wrong, as a part of those that were counted."""
        return (self.sent[0] - self.sent[1]) / self.sent[1] if self.sent and self.sent[1] else None

    def notes(self) -> list[str]:
        """Say which predictions were wrong by more than `NOTED_ERROR`, and which term missed."""
        sent = self.sent_error or 0.0
        return [
            *([f"the bytes between ranks were predicted {_off(sent)}"] if abs(sent) > NOTED_ERROR else []),
            *(
                f"the memory of rank {one.rank} was predicted {_off(one.error)}, mostly its {one.missed}"
                for one in self.memory
                if one.is_noted
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        sent = None if self.sent is None else {"predicted": self.sent[0], "measured": self.sent[1]}
        return {
            "bytes": None if sent is None else {**sent, "error": self.sent_error},
            "memory": [one.as_json() for one in self.memory],
            "not_predicted": self.no_memory,
            "notes": self.notes(),
        }


def _off(error: float) -> str:
    return f"{abs(error):.0%} too {'high' if error > 0 else 'low'}"


def judge(
    traffic: Settlement | None,
    prediction: Prediction | None,
    measured: Sequence[RankMemory],
    *,
    no_memory: str | None = None,
) -> Verdict:
    """Compare what was predicted with what the ranks of a run measured."""
    edges = () if traffic is None else traffic.edges
    both = [(one.expected, one.size) for one in edges if one.expected is not None and one.size is not None]
    sent = (sum(said for said, _ in both), sum(size for _, size in both)) if both else None
    known = [] if prediction is None else [(prediction.ranks[one.rank], one) for one in measured]
    return Verdict(sent, tuple(_judge_memory(*pair) for pair in known if pair[0].sizes), no_memory)


def _judge_memory(said: PredictedRank, one: RankMemory) -> MemoryVerdict:
    off = {kind: abs(said.sizes[kind] - one.sizes[kind]) for kind in KINDS}
    worst = max(KINDS, key=lambda kind: off[kind])
    peak = said.peak or 0
    return MemoryVerdict(one.rank, peak, one.peak, (peak - one.peak) / max(1, one.peak), worst if off[worst] else None)
