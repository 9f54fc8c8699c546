"""Compare the bytes that the members of each epoch of an elastic run counted with those of the recipe's formula.

epoch 2 begins after step 7     step 8: its first, in which members also send what they have kept
                                steps 9 .. 14: compared
epoch 3 begins after step 15    step 15: not compared, since a member that ended may not have sent all of it
"""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.bad_records import Complain, pass_over
from ttlaunch.running.metrics.telemetry import OUTSIDE_STEPS, RankTelemetry, read_rank

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.sections import ConfigFile
    from ttlaunch.spec.recipe.traffic import Formula, Traffic


@dataclass(frozen=True)
class EpochTraffic:
    """What all members of an epoch sent to one another in the steps that were compared.

    Attributes:
        steps: How many steps these were.
        size: The bytes that members counted.
        expected: The bytes according to the formula.
    """

    steps: int
    size: int
    expected: int

    def as_json(self) -> dict[str, int]:
        return {"steps": self.steps, "bytes": self.size, "formula_bytes": self.expected}


@dataclass(frozen=True)
class _MembersFormula:
    """What a recipe says of the members of an epoch."""

    config: "type[ConfigFile]"
    traffic: "Formula"


def compare_epochs(
    folder: Path,
    plan: Mapping[str, Any],
    epochs: Sequence[Mapping[str, Any]],
    *,
    is_done: bool,
    complain: Complain = pass_over,
) -> list[EpochTraffic | None]:
    """Compare each epoch of a run that this user has started.

    Args:
        folder: The run's folder.
        plan: The content of the run's `plan.json`.
        epochs: What began each: its `step`, `members` and `blocks`.
        is_done: Whether the run has finished; else the last step that a member has counted may be incomplete.
        complain: Called with each line that cannot be used.

    Returns:
        A comparison for each epoch; None where no step can be compared, a member was on a machine that the run has not started, or
        the recipe has no formula for epochs.
    """
    formula = _formula(plan)
    if formula is None:
        return [None] * len(epochs)
    known: dict[int, RankTelemetry] = {}
    planned = len(plan["ranks"])
    for number in {number for epoch in epochs for number in epoch["members"] if number < planned}:
        known[number] = read_rank(folder, number, world_size=planned, complain=complain, with_times=False)
    found = []
    for epoch, following in zip_longest(epochs, epochs[1:]):
        members = [known[number] for number in epoch["members"] if number in known and known[number].is_written]
        ends = [one.last + (following is None and is_done) for one in members]
        steps = range(epoch["step"] + 2, min([*ends, *([following["step"]] if following else [])], default=0))
        is_whole = len(members) == len(epoch["members"])
        found.append(_compare(formula, plan, epoch, members=members, steps=steps) if is_whole and steps else None)
    return found


def _formula(plan: Mapping[str, Any]) -> _MembersFormula | None:
    from ttlaunch.spec.recipe.declare import Elastic  # noqa: PLC0415 - runs of programs read no recipe
    from ttlaunch.spec.recipe.importing import import_recipe_module  # noqa: PLC0415 - as above

    try:
        recipe = import_recipe_module(Path(plan["recipe"]["folder"]), "recipe").RECIPE
    except Exception:  # noqa: BLE001 - a recipe that cannot be read any more is compared with nothing
        return None
    if not isinstance(recipe.elastic, Elastic) or recipe.elastic.traffic is None:
        return None
    return _MembersFormula(recipe.config, recipe.elastic.traffic)


def members_step_bytes(
    plan: Mapping[str, Any], *, facts: Sequence[Mapping[str, int]], blocks: Sequence[tuple[int, int]]
) -> int | None:
    """Return what the members of an epoch send in each step, by the recipe's formula, without what they send in some steps only.

    Args:
        plan: The content of a `plan.json`.
        facts: The numbers that each member reports, by place.
        blocks: The micro-batches of each.

    Returns:
        None where the recipe has no formula for epochs.
    """
    formula = _formula(plan)
    each = None if formula is None else _each_step(formula, plan, facts=facts, blocks=blocks)
    return None if each is None else sum(one.per_step for one in each if one.every == 1)


def members_interval(
    plan: Mapping[str, Any], *, facts: Sequence[Mapping[str, int]], blocks: Sequence[tuple[int, int]]
) -> int:
    """Return the number of steps from one agreement of the members to the next, by the recipe's formula; 1 if it has none. See above."""
    formula = _formula(plan)
    each = None if formula is None else _each_step(formula, plan, facts=facts, blocks=blocks)
    return max((one.every for one in each or ()), default=1)


def _each_step(
    formula: _MembersFormula,
    plan: Mapping[str, Any],
    *,
    facts: Sequence[Mapping[str, int]],
    blocks: Sequence[tuple[int, int]],
) -> "list[Traffic] | None":
    """Return what members send in steps, as far as it is counted; None where the recipe has no formula for them."""
    from ttlaunch.spec.recipe.traffic import Ranks  # noqa: PLC0415 - runs of programs read no recipe

    role = plan["ranks"][0]["role"]
    ranks = Ranks([role] * len(facts), facts, blocks=blocks)
    try:
        found = formula.traffic(formula.config.model_validate_json(json.dumps(plan["config"])), ranks)
    except Exception:  # noqa: BLE001 - whatever a user's recipe raises, there is nothing to compare with
        return None
    return None if found is None else [one for one in found if one.per_step and one.is_measured]


def _compare(
    formula: _MembersFormula,
    plan: Mapping[str, Any],
    epoch: Mapping[str, Any],
    *,
    members: Sequence[RankTelemetry],
    steps: range,
) -> EpochTraffic | None:
    each = _each_step(formula, plan, facts=[one.facts for one in members], blocks=epoch["blocks"])
    if not each:
        return None
    operations = {one.operation for one in each}
    if any(one.every > 1 for one in each):
        steps = steps[:-1]  # the last step of a training has an average, too, whatever its number
    if not steps:
        return None
    size = sum(
        row.size * (row.steps_until(steps[-1]) - row.steps_until(steps[0] - 1))
        for one in members
        for row in one.sent
        if row.operation in operations and row.phase not in OUTSIDE_STEPS
    )
    expected = sum(one.per_step * sum(step % one.every == 0 for step in steps) for one in each)
    return EpochTraffic(len(steps), size, expected)
