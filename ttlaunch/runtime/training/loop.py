"""What every recipe does around its updates: validate before the first, report each, and save checkpoints."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from ttlaunch import contract
from ttlaunch.runtime.checkpoint.checkpoints import HasParameters, HasState, held_tensors
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.freed_memory import keep_if_plenty
from ttlaunch.runtime.training.validation import HasLayerNorms, report_layer_norms, validation_is_due
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile

_ENOUGH_STEPS = 2
"""After so many steps the tensors of a rank have been at their peak."""


class TrainingLoop:
    """The steps of a run on one rank, and what follows the update of each.

        loop = TrainingLoop(cfg, ctx, validate=validate, saved=(model, optimizer))
        for step in loop.steps():
            ...                                        # the technique: gradients, messages, an update
            loop.end_step(step, loss=loss, tokens=tokens)

    It sends nothing itself. `validate` and checkpoints follow the same steps on all ranks, so messages of `validate`
    meet.
    """

    def __init__(
        self,
        cfg: TrainingFile,
        ctx: RankContext,
        *,
        validate: Callable[[int], object],
        reports: bool = True,
        norms: HasLayerNorms | None = None,
        saved: tuple[HasParameters, HasState] | None = None,
        owners: Sequence[Rank] = (),
        held: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        compares: bool = True,
        at_end: Callable[[], object] = lambda: None,
        applies: bool = True,
    ) -> None:
        """Send and report nothing yet.

        Args:
            cfg: Says when validations and checkpoints are due.
            ctx: This rank.
            validate: Evaluates the weights after a step; all ranks that take part call it after the same steps.
            reports: Whether this rank reports what is known of a step. Of ranks with the same numbers one does; in an elastic run all
                do, because each may end before it does, and one of them reports what is counted.
            norms: The optimizer whose layers' norms this rank reports; None: another rank reports them.
            saved: Model and optimizer that checkpoints take from this rank or, if it is no owner, from another rank that
                has the same; None: nothing.
            owners: The ranks whose parts make up a checkpoint, others save nothing; empty: all ranks of this role.
            held: Returns the tensors that other ranks hold, too, when a comparison of replicas is due; None: all that are in
                `saved`.
            compares: Whether all tensors have the updates of each step when it ends; if not, the recipe calls `ctx.compare`
                itself, and only checkpoints compare here.
            at_end: In an elastic run, what all members do together after the last step, as often as they change then.
            applies: Whether in an elastic run the update of each step is made when it ends; if not, the exchange of gradients
                reports updates.
        """
        self._cfg, self._ctx, self._validate = cfg, ctx, validate
        self._reports, self._norms, self._owners = reports, norms, owners
        self._saved, self._held, self._compares, self._applies = saved, held, compares, applies
        self._at_end = at_end
        self._newest_saved: int | None = None  # by this rank
        self._has_all = False
        if ctx.elastic is not None:
            ctx.elastic.validate_with(validate)
            if saved is not None and len(owners) == 1:  # else nobody has the whole state of a step
                self._has_all = applies
                ctx.save_if_abandoned(*saved)

    def steps(self) -> Iterator[int]:
        """Compare and validate the weights to begin with, then count the steps; see `RankContext.steps`."""
        elastic = self._ctx.elastic
        self._compare(self._ctx.steps_done)
        (self._validate if elastic is None else elastic.validate)(self._ctx.steps_done)
        yield from self._ctx.steps(self._cfg)
        if elastic is not None:
            elastic.stay(self._end)  # others may need what this worker has

    def _end(self) -> None:
        """Do what follows the last step, once in each epoch; until the last checkpoint is written, nobody is done."""
        self._at_end()
        elastic = self._ctx.elastic
        if elastic is not None and self._has_all and self._ctx.rank in self._owners:
            if self._newest_saved != elastic.applied:  # the owner of the epoch before ended, perhaps while it wrote
                self._save(elastic.applied)
            self._ctx.finish_checkpoint()

    def end_step(self, step: int, **known: float) -> None:
        """Report a step; validate, report norms, compare replicas and save a checkpoint if each is due.

        The checkpoint comes last: it holds whether the validation has ended the training.
        """
        elastic, is_due = self._ctx.elastic, validation_is_due(self._cfg, self._ctx, step)
        knows_step = True
        if elastic is not None and self._applies:
            knows_step = elastic.apply(step, validation_is_due=is_due)
            if elastic.applied != step or elastic.follows:
                self._ctx.report(elastic.applied)
                return  # others have made the step, or several, and what follows it
        is_reporter = knows_step and (elastic is None or self._ctx.rank == 0)  # all members have the same numbers
        self._ctx.report(
            step, **(self._of_this_rank(known, counts=is_reporter) if self._reports and knows_step else {})
        )
        if is_due:
            (self._validate if elastic is None else elastic.validate)(step)
        if self._norms is not None and is_reporter:
            report_layer_norms(self._cfg, self._ctx, self._norms, step)
        self._compare(step)
        self._save(step)
        if step == self._ctx.steps_done + _ENOUGH_STEPS:
            keep_if_plenty(os.environ, to_come=self._copied_bytes())

    def _copied_bytes(self) -> int:
        """Return how much memory a copy for a checkpoint takes on this rank; 0 if the run saves none."""
        saves = self._cfg.checkpoint_config.interval is not None
        return sum(tensor.nbytes for _, tensor in self._all_saved()) if saves else 0

    def _of_this_rank(self, known: dict[str, float], *, counts: bool) -> dict[str, float]:
        """Return what this rank reports of a step: each member of an elastic run its loss, and one of them what the step counted."""
        return known if counts else {name: value for name, value in known.items() if name not in contract.COUNTED}

    def _save(self, step: int) -> None:
        if self._saved is not None:
            model, optimizer = self._saved
            if self._ctx.checkpoint(step, model, optimizer, owners=self._owners):
                self._newest_saved = step

    def _compare(self, step: int) -> None:
        if self._compares:
            self._ctx.compare(step, self._held or self._all_saved)

    def _all_saved(self) -> Iterable[tuple[str, Tensor]]:
        return () if self._saved is None else held_tensors(*self._saved)
