"""Local SGD: every worker takes H local steps, then all continue from the average of their weights.

    worker 0   step step ... step |         | step step ... step |
    worker 1   step step ... step | average | step step ... step | average ...
    worker 2   step step ... step |         | step step ... step |

Workers communicate only every H steps (`local_sgd_config.every`): 2(W - 1)/W of the weights' size S each way in H steps, H times
fewer bytes than `data_parallel`. That suits slow networks. The price: between two averages a worker sees only its own
micro-batches and the weights of the workers drift apart, so with a large H each sample helps less. The state of the optimizer stays
with its worker and is never averaged. With `compression_config` each worker sends the compressed change of its weights.

With H = 1 and SGD, with or without momentum, this is `data_parallel`, bit for bit: the average of the weights after a
step is then one step with the average gradient, so workers average gradients instead. With AdamW or a larger H the
number of workers is a part of the algorithm; the bits are the same in every run with the same number of workers. The
last step always ends with an average, even if H does not divide the number of steps.

    ttlaunch run local_sgd
    ttlaunch run local_sgd --set local_sgd_config.every=32

Shapes: V = micro-batches of a validation.
Source: S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Here an
average weighs each worker by its tokens since the last one; in the paper all workers weigh the same.
"""

from ttlaunch.train import (
    LocalReplica,
    RankContext,
    TrainingLoop,
    share_validation,
)

from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """Train on one rank: the average of a single worker changes nothing, so H does not matter."""
    _train(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Take steps on a contiguous block of each step's micro-batches, and average with the others every H of them."""
    _train(cfg, ctx)


def _train(cfg: Config, ctx: RankContext) -> None:
    every = cfg.local_sgd_config.every
    is_first = ctx.position(ctx.role) == 0  # in an elastic run the loop knows who reports
    replica = LocalReplica(cfg, ctx, among=ctx.ranks(ctx.role), every=every, compression=cfg.compression_config)
    replica.restore()

    def validate(step: int) -> None:
        workers = ctx.ranks(ctx.role)  # in an elastic run the present ones
        share_validation(cfg, ctx, step, among=workers, evaluate=replica.validation_losses)
        # Early stopping ends the run here, perhaps between two averages: the final weights must be averaged, too.
        if step > ctx.steps_done and ctx.early_stop.is_over and not replica.is_agreed:
            replica.average(step)
            replica.agree()

    norms = replica.optimizer if is_first else None
    loop = TrainingLoop(cfg, ctx, validate=validate, norms=norms, saved=(replica, replica), held=replica.replicated)
    for step in loop.steps():
        known = replica.step(step)
        if step % every == 0 or step == ctx.data(cfg).total_steps:
            mean = replica.average(step)
            replica.agree()
            known |= {"loss": mean.loss, "tokens": mean.tokens} if is_first else {}
        loop.end_step(step, **known)  # checkpoints have each worker's own state, and the agreed weights once
    ctx.report_parameters(replica.agreed_model().named_parameters())
