"""Make the failure of a run whose replicas differ."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttlaunch.diagnostics.count import counted
from ttlaunch.planning.launch_plan import LaunchPlan, RankRow, RecipeProgram
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure, name_ranks
from ttlaunch.running.replicas import Difference
from ttlaunch.spec.named_folders import built_in_folder

_MOST_NAMED = 4
NAMES_OF_THEIR_OWN = (
    "if these ranks are meant to differ, give the tensors of each a name of its own, in checkpoints and in "
    "`ctx.report_parameters`: docs/how-to/write-your-own-trainer.md"
)
"""What to declare in a recipe whose ranks rightly hold different tensors."""


def replica_failure(
    difference: Difference, plan: LaunchPlan, *, step: int | None = None, agreed: int | None = None
) -> Failure:
    """Return the failure of ranks whose tensors differ.

    It names the rank that the majority contradicts. If no side has a majority, it names all sides and blames no rank.

    Args:
        difference: The tensors that differ.
        plan: The plan of the run.
        step: The step after which the digests were compared, 0 before the first; None for the end of the run.
        agreed: The last step before it after which all digests agreed; None if there was no comparison.
    """
    odd = plan.ranks[difference.odd[0]] if difference.odd else None
    when = {None: "", 0: " before the first step"}.get(step, f" in step {step}")
    return Failure(
        code="R009",
        kind=Cause.DIFFERS,
        rank=odd.rank if odd else None,
        role=odd.role if odd else None,
        host=odd.host if odd else None,
        step=step or None,
        cause=_cause(difference, plan.ranks, did="ended with" if step is None else "had", when="" if odd else when),
        when=when.strip() if step == 0 else None,
        time=time.time(),
        evidence=tuple(_evidence(difference, plan.ranks, agreed=agreed)),
        # In built-in recipes no replicas are meant to differ.
        next_step=None if _is_built_in(plan) else NAMES_OF_THEIR_OWN,
        comes_again=True,
    )


def _cause(difference: Difference, rows: Sequence[RankRow], *, did: str, when: str) -> str:
    """Return a clause whose subject is the odd rank; if there is none, a sentence with `when`."""
    most, *rest = difference.sides
    if difference.odd:
        return f"{did} other bits in `{difference.name}` than {name_ranks(most, noun='ranks')}"
    sides = [_one(rows[side[0]]) if len(side) == 1 else name_ranks(side, noun="ranks") for side in (most, *rest)]
    *first, last = sides if len(sides) <= _MOST_NAMED else [*sides[: _MOST_NAMED - 1], "others"]
    return f"{', '.join(first)} and {last} {did} different bits in `{difference.name}`{when}"


def _evidence(difference: Difference, rows: Sequence[RankRow], *, agreed: int | None) -> Iterator[str]:
    if difference.odd:
        most = len(difference.sides[0])
        yield f"{most} of {most + len(difference.odd)} copies agree"
        yield from (f"{_one(rows[rank])} has other bits, too" for rank in difference.odd[1 : 1 + _MOST_NAMED])
    else:
        yield "no side has a majority, so nothing shows which one is right"
    if difference.others:
        names = ", ".join(f"`{name}`" for name in difference.others[:_MOST_NAMED])
        more = ", …" if len(difference.others) > _MOST_NAMED else ""
        yield f"{counted(len(difference.others), 'further tensor')} with different bits: {names}{more}"
    if agreed is not None:
        yield f"all copies agreed {f'in step {agreed}' if agreed else 'before the first step'}"


def _is_built_in(plan: LaunchPlan) -> bool:
    program = plan.program
    return isinstance(program, RecipeProgram) and Path(program.folder).parent == built_in_folder("recipes")


def _one(row: RankRow) -> str:
    return f"rank {row.rank} ({row.role}, {row.host})"
