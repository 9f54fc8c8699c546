"""Local SGD: every worker takes H steps of its own, then all of them go on from the average of their weights.

    worker 0   step step ... step |         | step step ... step |
    worker 1   step step ... step | average | step step ... step | average ...
    worker 2   step step ... step |         | step step ... step |

Workers talk only every H steps (`local_sgd_config.every`), so H times fewer bytes than `data_parallel` sends: 2(W - 1)/W of
the weights' size S each way in H steps. That suits slow networks. The price: between two averages workers see only
their own micro-batches and drift apart, so a large H learns less from a sample. The state of the optimizer stays with
its worker and is never averaged. With `compression_config` each sends what it has moved, in fewer bytes yet.

With H = 1 and SGD, with or without momentum, this is `data_parallel`, bit for bit: then the average of the weights after a
step is one step with the average gradient, and workers average that. With AdamW or a larger H the number of workers is a
part of the algorithm; the bits are the same in every run with as many workers. The last step has an average, whether or
not H divides the number of steps.

    ttlaunch run local_sgd
    ttlaunch run local_sgd --set local_sgd_config.every=32

Shapes: V = micro-batches of a validation.
Source: S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Workers weigh what they have seen: an
average counts each by its tokens since the last one, where Stich's workers have seen equally many.
"""

from collections.abc import Sequence

from ttlaunch.train import (
    LocalReplica,
    RankContext,
    TrainingLoop,
    share_validation,
)

from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One worker alone, whose average is itself: plain training, for any H."""
    _train(cfg, ctx, workers=ctx.ranks("trainer"))


def worker(cfg: Config, ctx: RankContext) -> None:
    """Take steps on a contiguous block of each step's micro-batches, and average with the others every H of them."""
    _train(cfg, ctx, workers=ctx.ranks("worker"))


def _train(cfg: Config, ctx: RankContext, *, workers: Sequence[int]) -> None:
    every, is_first = cfg.local_sgd_config.every, ctx.rank == workers[0]
    replica = LocalReplica(cfg, ctx, among=workers, every=every, compression=cfg.compression_config)
    replica.restore()

    def validate(step: int) -> None:
        share_validation(cfg, ctx, step, among=workers, evaluate=replica.validation_losses)
        if step > ctx.steps_done and ctx.early_stop.is_over and not replica.is_agreed:
            replica.average()
            replica.agree()

    norms = replica.optimizer if is_first else None
    loop = TrainingLoop(cfg, ctx, validate=validate, norms=norms, saved=(replica, replica), owners=workers)
    for step in loop.steps():
        known = replica.step(step)._asdict()
        if step % every == 0 or step == ctx.data(cfg).total_steps:
            loss, tokens = replica.average()
            replica.agree()
            known |= {"loss": loss, "tokens": tokens} if is_first else {}
        loop.end_step(step, **known)  # checkpoints have each worker's own state, and the agreed weights once
    ctx.report_parameters(replica.agreed_model().named_parameters())
