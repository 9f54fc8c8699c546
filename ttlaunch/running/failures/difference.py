"""Make the failure of a run whose replicas differ."""

import time
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
    difference: Difference, plan: LaunchPlan, *, did: str = "ended with", step: int | None = None
) -> Failure:
    """Return the failure of ranks whose tensors differ.

    It names the rank that the majority contradicts. If no side has a majority, it names all sides and blames no rank.

    Args:
        difference: The tensors that differ.
        plan: The plan of the run.
        did: What the ranks did: "ended with" or "had".
        step: The step after which the digests were compared; None for the end of the run.
    """
    rows, (most, *rest), odd = plan.ranks, difference.sides, difference.odd
    if odd:
        cause = f"{did} other bits in `{difference.name}` than {name_ranks(most, noun='ranks')}"
        evidence = [f"{len(most)} of {len(most) + len(odd)} copies agree"]
        evidence += [f"{_one(rows[rank])} {did} other bits, too" for rank in odd[1 : 1 + _MOST_NAMED]]
    else:
        sides = [_one(rows[side[0]]) if len(side) == 1 else name_ranks(side, noun="ranks") for side in (most, *rest)]
        when = "" if step is None else f" in step {step}"
        cause = f"{' and '.join(sides[:_MOST_NAMED])} {did} different bits in `{difference.name}`{when}"
        evidence = ["no side has a majority, so nothing shows which one is right"]
    if difference.others:
        names = ", ".join(f"`{name}`" for name in difference.others[:_MOST_NAMED])
        more = ", …" if len(difference.others) > _MOST_NAMED else ""
        evidence.append(f"{counted(len(difference.others), 'further tensor')} with different bits: {names}{more}")
    row = rows[odd[0]] if odd else None
    return Failure(
        code="R009",
        kind=Cause.DIFFERS,
        rank=row.rank if row else None,
        role=row.role if row else None,
        host=row.host if row else None,
        step=step,
        cause=cause,
        time=time.time(),
        evidence=tuple(evidence),
        # In built-in recipes no replicas are meant to differ.
        next_step=None if _is_built_in(plan) else NAMES_OF_THEIR_OWN,
        comes_again=True,
    )


def _is_built_in(plan: LaunchPlan) -> bool:
    program = plan.program
    return isinstance(program, RecipeProgram) and Path(program.folder).parent == built_in_folder("recipes")


def _one(row: RankRow) -> str:
    return f"rank {row.rank} ({row.role}, {row.host})"
