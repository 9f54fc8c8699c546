"""`ttlaunch.replay`: a step of a recorded run computed again in this process, with the model, the optimizer and the batch in it.

This is the only function of the library that imports torch: it returns tensors.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.named_run import find_named_run
from ttlaunch.diagnostics import Diagnostic, LaunchError, shown, usage_error
from ttlaunch.lab.replay import mismatch_diagnostics, plan_replay, prepare_replay, verdict_of
from ttlaunch.lab.repro import read_origin_of
from ttlaunch.records.replay import FirstNotFinite, ReplayOrder, first_not_finite
from ttlaunch.running.readers.step_digests import Agreement, compare_steps, read_step_digests
from ttlaunch.running.runs.run_folder import write_plan
from ttlaunch.runtime.replay.replayed_context import ReplayedContext
from ttlaunch.runtime.simulate import simulate_ranks
from ttlaunch.runtime.world import read_world

_LONGEST = 300


@dataclass(frozen=True)
class ReplayedRank:
    """One rank after the step.

    Attributes:
        rank, role: Which rank, and what it does.
        model, optimizer: As they are after the update of the step, both as the recipe gives them to its checkpoints; None for a
            rank that has none.
        batches: By index, inputs and targets of the micro-batches that the rank read in the step, int64, shape (sequences, tokens).
    """

    rank: int
    role: str
    model: Any = field(repr=False)
    optimizer: Any = field(repr=False)
    batches: Mapping[int, tuple[Tensor, Tensor]] = field(repr=False)


@dataclass(frozen=True)
class Replayed:
    """A step of a run, computed again.

    Attributes:
        run: The run's id.
        step: The step.
        began: The steps that were done where the replay began.
        verdict: `equal` if the digests of the step are those of the run; `consistent` if the run has none of this step, and all
            else that it recorded on the way is equal; `different`; `unknown` if nothing could be compared.
        agreement: What was compared, by step.
        ranks: All ranks.
        not_finite: The first layer whose forward or backward pass made a NaN or infinite value in the step, with its rank; None if
            none did.
    """

    run: str
    step: int
    began: int
    verdict: str
    agreement: Agreement = field(repr=False)
    ranks: Sequence[ReplayedRank]
    not_finite: tuple[int, FirstNotFinite] | None = None

    @property
    def model(self) -> Any:
        """The model of the first rank that has one."""
        return self._first.model

    @property
    def optimizer(self) -> Any:
        """The optimizer of this rank."""
        return self._first.optimizer

    @property
    def batch(self) -> tuple[Tensor, Tensor] | None:
        """The first micro-batch of the step, as inputs and targets; None if no rank read one."""
        batches = {index: batch for rank in self.ranks for index, batch in rank.batches.items()}
        return batches[min(batches)] if batches else None

    @property
    def _first(self) -> ReplayedRank:
        return next((rank for rank in self.ranks if rank.model is not None), self.ranks[0])

    def raise_for_difference(self) -> None:
        """Raise if the bits are others than the run's.

        Raises:
            LaunchError: They are.
        """
        if self.verdict == "different":
            raise LaunchError(mismatch_diagnostics(self.run, self.agreement, began=self.began))


def replay(run: str | Path = "latest", *, step: int | None = None, runs_dir: str | Path = "runs") -> Replayed:
    """Compute a step of a recorded run again in this process, from the nearest checkpoint before it.

    All ranks are simulated, with the code that the run kept and the ttlaunch that is imported here. The weights are those *after* the
    update of the step; those that the step began with are those of `step - 1`.

    Args:
        run: A run's id or a part of it, a path, or `latest`.
        step: The step; None for the one that failed, or the last.
        runs_dir: The folder of runs.

    Raises:
        LaunchError: The run cannot be replayed, has no such step, or failed before its end for another reason than the run did.
    """
    if isinstance(step, bool) or not isinstance(step, int | None):
        raise usage_error(f"`step` is {shown(step)}, which is no whole number", "`step=10`")
    dialogue = Unattended()
    prepared = prepare_replay(read_origin_of(find_named_run(str(run), runs_dir=Path(runs_dir))), dialogue)
    order = ReplayOrder(step=prepared.last_step if step is None else step, shown=True, digests=False)
    plan, began, _ = plan_replay(prepared, step=order.step)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="ttl-replay-") as folder:
        path = Path(folder)
        write_plan(plan, path)
        try:
            outcome, contexts = simulate_ranks(read_world(path / contract.PLAN_FILE), path, order=order)
        finally:
            torch.set_num_threads(threads)
        recorded = read_step_digests(path, range(plan.world_size))
    replayed = [ctx for ctx in contexts.values() if isinstance(ctx, ReplayedContext)]
    if outcome.errors and not any(ctx.observer.batches for ctx in replayed):
        error = next(iter(outcome.errors.values()))
        message = (
            f"the replay of {prepared.origin.run_id} failed before step {order.step}: {shown(error, longest=_LONGEST)}"
        )
        raise LaunchError([Diagnostic("P086", message)])
    agreement = compare_steps(prepared.recorded, recorded, range(began, order.step + 1))
    ranks = tuple(map(_rank_of, sorted(replayed, key=lambda ctx: ctx.rank)))
    verdict, bad = verdict_of(agreement, order.step), _first_not_finite(replayed)
    return Replayed(prepared.origin.run_id, order.step, began, verdict, agreement, ranks, bad)


def _first_not_finite(replayed: Sequence[ReplayedContext]) -> tuple[int, FirstNotFinite] | None:
    first = first_not_finite([ctx.shown() for ctx in replayed])
    return None if first is None else (first[0].rank, first[1])


def _rank_of(ctx: ReplayedContext) -> ReplayedRank:
    seen = ctx.observer
    return ReplayedRank(ctx.rank, ctx.role, seen.model, seen.optimizer, dict(seen.batches))
