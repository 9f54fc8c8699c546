"""Compare the bytes that ranks counted with those of the recipe's formula."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ttlaunch.no_cycles import collection_paused
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.bad_records import Complain, pass_over
from ttlaunch.running.metrics.telemetry import RankTelemetry, measured, read_telemetry
from ttlaunch.running.watch import RankState
from ttlaunch.spec.named_folders import built_in_folder

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.traffic import Traffic

Key = tuple[str, int, int]
"""Operation, source, destination."""

TOLERANCE = 0.005
"""The part of the formula's bytes by which the measured bytes may differ, for headers that a formula leaves out."""


@dataclass(frozen=True)
class Edge:
    """The messages of one rank to another for one operation.

    Attributes:
        size: The bytes that the rank counted; None if the traffic counter cannot count them, because another library sends them.
        expected: The bytes according to the formula; None if there is no formula.
        slack: How many bytes more than `expected` are also correct.
        late: How many bytes fewer than `expected` are also correct, because the run ended before they were sent.
    """

    operation: str
    source: int
    dest: int
    messages: int
    size: int | None
    expected: int | None
    slack: int = 0
    late: int = 0

    @property
    def ratio(self) -> float | None:
        """Measured bytes divided by expected bytes; None if either is not known or nothing was expected."""
        return self.size / self.expected if self.size is not None and self.expected else None

    @property
    def differs(self) -> bool:
        if self.size is None or self.expected is None:
            return False
        more = self.size - self.expected
        return not -self.late - TOLERANCE * self.expected <= more <= self.slack + TOLERANCE * self.expected

    def as_json(self) -> dict[str, Any]:
        return {**dict(zip(_EDGE_NAMES, astuple(self), strict=True)), "ratio": self.ratio}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Make the edge from the record that `as_json` returns.

        Raises:
            KeyError, TypeError: The record lacks a field, or has one of another type.
        """
        values = {"late_bytes": 0, **record}  # older versions did not write this field
        operation, *numbers = (values[name] for name in _EDGE_NAMES)
        if not all(number is None or type(number) in (int, float) for number in numbers):
            raise TypeError("a number of the traffic is no number")
        return cls(str(operation), *numbers)


_EDGE_NAMES = ("operation", "source", "dest", "messages", "bytes", "formula_bytes", "slack_bytes", "late_bytes")
"""The fields of `Edge`, in their order, as `report.json` names them."""


@dataclass(frozen=True)
class Settlement:
    """The comparison of all bytes of a run with the formula.

    Attributes:
        steps, validations: How many steps and validations were compared: those that all ranks have finished. The validation
            before the first step counts, also in a run that continues from a checkpoint.
        edges: The edges of each operation; empty without messages.
        reason: Why nothing was compared, as a clause; None if there was a comparison.
        is_mistaken: Whether the reason is a mistake in the recipe.
    """

    steps: int
    validations: int
    edges: tuple[Edge, ...]
    reason: str | None = None
    is_mistaken: bool = False

    @property
    def differing(self) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.differs)

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "validations": self.validations,
            "not_compared": self.reason,
            "is_mistaken": self.is_mistaken,
            "edges": [edge.as_json() for edge in self.edges],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Make the comparison from the record that `as_json` returns.

        Raises:
            KeyError: The record lacks a field.
        """
        edges = tuple(Edge.from_json(edge) for edge in record["edges"])
        return cls(record["steps"], record["validations"], edges, record["not_compared"], record["is_mistaken"])


def settle(
    folder: Path,
    plan: Mapping[str, Any],
    ranks: Sequence[RankState],
    *,
    is_done: bool,
    runs_recipe: bool,
    complain: Complain = pass_over,
    telemetry: Sequence[RankTelemetry] | None = None,
) -> Settlement | None:
    """Compare the bytes that ranks counted with the recipe's formula, over the steps that all ranks have finished.

    Args:
        folder: The run's folder.
        plan: The content of the run's `plan.json`.
        ranks: The states of all ranks.
        is_done: Whether the run has finished; else the telemetry of the last reported step may be incomplete.
        runs_recipe: Whether the code of the recipe that the plan names may be run: only if this user has started the run. The
            code of a built-in recipe may always be run.
        complain: Called with each line that cannot be used.
        telemetry: The telemetry of all ranks, if the caller has read it; None to read it.

    Returns:
        The comparison; None if a rank has written no telemetry, such as one of a program that is no recipe.
    """
    telemetry = telemetry or read_telemetry(folder, world_size=len(ranks), complain=complain, with_times=False)
    if telemetry is None:
        return None
    until = min(entry.last for entry in telemetry)
    folder_of_recipe = _recipe_folder(plan, runs_recipe=runs_recipe)
    if folder_of_recipe and _is_asynchronous(folder_of_recipe):
        # Each rank counts its own steps; the formula uses the counts that the ranks report.
        until = max(entry.last for entry in telemetry)
    elif not is_done:
        until = min([until - 1, *(state.step - 1 for state in ranks)])
    first = max((state.first_step for state in ranks), default=0)
    steps = max(0, until - first + 1) if first else 0
    began = _began_with(plan)
    checked = {record.step for state in ranks for record in state.validations}
    validations = sum(step <= max(until, began) for step in checked) if until >= 0 else 0
    roles = [state.row.role for state in ranks]
    ended_early = None, "the run ended within its first step", False
    formula, reason, is_mistaken = (
        _formula(plan, folder_of_recipe, roles=roles, facts=[entry.facts for entry in telemetry])
        if until >= 0
        else ended_early
    )
    counted = range(first, first + steps)
    edges = _edges(measured(telemetry, until=until), formula, steps=counted, validations=validations, is_done=is_done)
    return Settlement(steps, validations, edges, reason, is_mistaken)


def _began_with(plan: Mapping[str, Any]) -> int:
    """Return the step of the checkpoint from which a run began; 0 without one."""
    start = plan.get("start")
    return start["step"] if isinstance(start, dict) and type(start.get("step")) is int else 0


def _edges(
    found: Mapping[Key, tuple[int, int]],
    formula: Sequence["Traffic"] | None,
    *,
    steps: range,
    validations: int,
    is_done: bool,
) -> tuple[Edge, ...]:
    expected: dict[Key, int] = defaultdict(int)
    slack: dict[Key, int] = defaultdict(int)
    late: dict[Key, int] = defaultdict(int)
    hidden = set()
    for one in formula or ():
        key = (one.operation, one.source, one.dest)
        expected[key] += (
            one.once
            + _times(steps, one.every, is_done=is_done and one.at_last) * one.per_step
            + validations * one.per_validation
        )
        expected[key] += (one.in_first_step if steps else 0) + (one.at_end if is_done else 0)
        slack[key] += one.slack
        late[key] += 0 if is_done else one.late
        hidden |= set() if one.is_measured else {key}
    edges = []
    for key in sorted({*found, *(key for key, size in expected.items() if size)}):
        messages, size = found.get(key, (0, 0))
        formula_bytes = None if formula is None else expected[key]
        edges.append(Edge(*key, messages, None if key in hidden else size, formula_bytes, slack[key], late[key]))
    return tuple(edges)


def _times(steps: range, every: int, *, is_done: bool) -> int:
    """Count the steps that are divisible by `every`; the last step also counts if training ends there.

    >>> _times(range(1, 11), 4, is_done=True), _times(range(1, 11), 4, is_done=False), _times(range(5, 9), 4, is_done=True)
    (3, 2, 1)
    """
    if not steps:
        return 0
    return steps[-1] // every - (steps.start - 1) // every + (is_done and steps[-1] % every > 0)


def _recipe_folder(plan: Mapping[str, Any], *, runs_recipe: bool) -> Path | None:
    """The folder of the recipe that a plan names, if its code may be run: a stranger's plan may name any folder."""
    recipe = plan.get("recipe")
    named = recipe.get("folder") if isinstance(recipe, dict) else None
    if not isinstance(named, str) or "\0" in named:
        return None
    return Path(named) if runs_recipe or Path(named).parent == built_in_folder("recipes") else None


def _is_asynchronous(folder: Path) -> bool:
    from ttlaunch.spec.recipe.importing import import_recipe_module  # noqa: PLC0415 - runs of programs read no recipe

    with contextlib.suppress(Exception):  # `_formula` reports a recipe that cannot be read any more
        return bool(import_recipe_module(folder, "recipe").RECIPE.is_asynchronous)
    return False


def expected_traffic(
    plan: Mapping[str, Any], *, roles: Sequence[str], facts: Sequence[Mapping[str, int]], runs_recipe: bool
) -> tuple[list["Traffic"] | None, str | None]:
    """Return the traffic by the recipe's formula, before a run; or None, and why there is none, as a clause.

    Args:
        plan: The content of `plan.json`.
        roles: The role of each rank.
        facts: The numbers of each rank that the formula needs.
        runs_recipe: As for `settle`.
    """
    folder = _recipe_folder(plan, runs_recipe=runs_recipe)
    if folder is not None and _is_asynchronous(folder):
        return None, "how often its ranks exchange anything is known at the end only"
    return _formula(plan, folder, roles=roles, facts=facts)[:2]


@collection_paused()
def _formula(
    plan: Mapping[str, Any], folder: Path | None, *, roles: Sequence[str], facts: Sequence[Mapping[str, int]]
) -> tuple[list["Traffic"] | None, str | None, bool]:
    """Return the traffic by the recipe's formula; or None, why there is none, and whether this is the recipe's mistake."""
    if not plan.get("recipe"):
        return None, "it is a program and no recipe", False
    if plan.get("naive"):
        return None, f"the naive form of {plan['recipe']['name']} has no formula", False
    from ttlaunch.spec.recipe.importing import import_recipe_module  # noqa: PLC0415 - runs of programs read no recipe
    from ttlaunch.spec.recipe.traffic import Ranks, audit_traffic  # noqa: PLC0415 - as above

    name = plan["recipe"]["name"]
    if folder is None:
        return None, f"this user has not started it here, so the code of {name} is not run", False
    if not folder.is_dir():
        return None, f"the folder of {name} is no longer there: {folder}", False
    try:
        recipe = import_recipe_module(folder, "recipe").RECIPE
        if recipe.traffic is None:
            return None, f"{name} declares no `traffic`", False
        config = recipe.config.model_validate_json(json.dumps(plan["config"]))  # keys of JSON are always text
        ranks = Ranks(roles, facts)
        formula = recipe.traffic(config, ranks)
        if formula is not None and recipe.audited is not None:
            formula = [*formula, *audit_traffic(config, ranks.of(recipe.audited.role))]
        undecided = f"with this configuration {name} moves what it measures to be quickest"
        return (None, undecided, False) if formula is None else (list(formula), None, False)
    except LookupError as error:
        return None, f"the formula of {name} needs a value that no rank reported: {error}", True
    except Exception as error:  # noqa: BLE001 - whatever the user's recipe raises is reported as its mistake
        return None, f"the formula of {name} raises {type(error).__name__}: {error}", True
