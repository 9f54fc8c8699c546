"""What every recipe does around its updates: validate before the first, report each, and save checkpoints."""

from collections.abc import Callable, Iterator, Sequence

from ttlaunch.runtime.checkpoint.checkpoints import HasParameters, HasState
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.training.validation import HasLayerNorms, report_layer_norms, validation_is_due
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile


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
    ) -> None:
        """Send and report nothing yet.

        Args:
            cfg: Says when validations and checkpoints are due.
            ctx: This rank.
            validate: Evaluates the weights after a step; all ranks that take part call it after the same steps.
            reports: Whether this rank reports what is known of a step; of ranks with the same numbers one does.
            norms: The optimizer whose layers' norms this rank reports; None: another rank reports them.
            saved: Model and optimizer that checkpoints take from this rank; None: nothing.
            owners: The ranks whose parts make up a checkpoint, others save nothing; empty: all ranks of this role.
        """
        self._cfg, self._ctx, self._validate = cfg, ctx, validate
        self._reports, self._norms, self._owners = reports, norms, owners
        self._saved = saved if not owners or ctx.rank in owners else None

    def steps(self) -> Iterator[int]:
        """Validate the weights to begin with, then count the steps; see `RankContext.steps`."""
        self._validate(self._ctx.steps_done)
        yield from self._ctx.steps(self._cfg)

    def end_step(self, step: int, **known: float) -> None:
        """Report a step, validate and report norms if that is due, and save a checkpoint if that is.

        The checkpoint comes last: it holds whether the validation has ended the training.
        """
        self._ctx.report(step, **(known if self._reports else {}))
        if validation_is_due(self._cfg, self._ctx, step):
            self._validate(step)
        if self._norms is not None:
            report_layer_norms(self._cfg, self._ctx, self._norms, step)
        if self._saved is not None:
            model, optimizer = self._saved
            self._ctx.checkpoint(step, model, optimizer, owners=self._owners)
