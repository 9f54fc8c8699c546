"""DiLoCo: workers take H local steps; then an outer optimizer takes one step with their average change.

    worker 0   step step ... step |         |       | step step ... step |
    worker 1   step step ... step | average | outer | step step ... step | average ...
    worker 2   step step ... step |         | step  | step step ... step |

The outer gradient is the common weights of H steps ago minus the average of the workers' weights now. SGD with Nesterov
momentum takes a step with it, and all workers continue from there. So workers send as much as with `local_sgd`, 2(W - 1)/W
of the weights' size S each way in H steps, and H may be larger. With `compression_config` each worker sends its part of the outer
gradient through a codec. All workers make the same outer step, so it needs no message. Every worker also keeps the common weights
and the outer momentum, 2S more memory. The state of the inner optimizer stays with its worker and is not averaged.

With `outer_learning_rate: 1` and `outer_momentum: 0` the outer step ends at the average, and this is `local_sgd`, bit
for bit. An outer step always follows the last step of training, even if H does not divide the number of steps.

    ttlaunch run diloco
    ttlaunch run diloco --set diloco_config.every=50

Shapes: N = values of all parameters in one flat vector, V = micro-batches of a validation.
Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, its Algorithm 1.
Here an average weighs each worker by its tokens; in the paper all workers have equally many.
"""

import torch
from torch import Tensor

from ttlaunch.train import (
    LocalReplica,
    RankContext,
    TrainingLoop,
    share_validation,
)

from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One worker alone, whose average is itself; the outer optimizer still has its say."""
    _train(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Take steps on a contiguous block of each step's micro-batches, and an outer one with the others every H of them."""
    _train(cfg, ctx)


def _train(cfg: Config, ctx: RankContext) -> None:
    every = cfg.diloco_config.every
    is_first = ctx.position(ctx.role) == 0  # in an elastic run the loop knows who reports
    replica = LocalReplica(cfg, ctx, among=ctx.ranks(ctx.role), every=every, compression=cfg.compression_config)
    momentum_N = replica.keep_shared("outer_momentum")
    replica.restore()

    def validate(step: int) -> None:
        workers = ctx.ranks(ctx.role)  # in an elastic run the present ones
        share_validation(cfg, ctx, step, among=workers, evaluate=replica.validation_losses)
        if step > ctx.steps_done and ctx.early_stop.is_over and not replica.is_agreed:
            replica.average(step)
            outer_step(cfg, replica, momentum_N)

    norms = replica.optimizer if is_first else None
    loop = TrainingLoop(cfg, ctx, validate=validate, norms=norms, saved=(replica, replica), held=replica.replicated)
    for step in loop.steps():
        known = replica.step(step)
        if step % every == 0 or step == ctx.data(cfg).total_steps:
            mean = replica.average(step)
            if not mean.is_given:  # else others have made the outer step, too
                outer_step(cfg, replica, momentum_N)
            known |= {"loss": mean.loss, "tokens": mean.tokens} if is_first else {}
        loop.end_step(step, **known)  # checkpoints have each worker's own state, and the agreed weights once
    ctx.report_parameters(replica.agreed_model().named_parameters())


@torch.no_grad()
def outer_step(cfg: Config, replica: LocalReplica, momentum_N: Tensor) -> None:
    """Go from the agreed weights w towards the average, and beyond it with momentum; agree on where that leads.

    With the outer gradient d = w - average and Nesterov momentum m <- b m + d the new weights are w - a (d + b m). They are
    computed as average - (a (d + b m) - d), which is exactly the average where a is 1 and b is 0.
    """
    rate, decay = cfg.diloco_config.outer_learning_rate, cfg.diloco_config.outer_momentum
    gradient_N = replica.agreed_N - replica.model.weights_N
    momentum_N.mul_(decay).add_(gradient_N)
    beyond_N = (gradient_N + decay * momentum_N) * rate - gradient_N
    replica.model.weights_N.sub_(beyond_N)
    replica.agree()
