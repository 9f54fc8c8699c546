"""A pipeline: each rank has some of the model's blocks, and several micro-batches are under way at once.

    tokens --> stage 0 -- activations --> stage 1 -- activations --> ... --> stage p-1 <-- targets
               stage 0 <-- gradients ---- stage 1 <-- gradients ---- ... <-- stage p-1

A rank needs memory for its own blocks only. The price: with m micro-batches, (p - 1) of (m + p - 1) slots of a step are idle.
Stage 0 reads the tokens and the last stage reads the targets. The step alone determines the data, so neither is sent. The schedule
is the order of a stage's passes. `gpipe` runs all forward passes first. `1f1b` runs each backward pass as early as possible, so
stage s keeps the activations of p - s micro-batches instead of m. With `interleaved` a rank has v chunks far apart in the model,
which divides the idle time by v and multiplies the messages by v. `auto` tries the schedules and takes the fastest.

With `ranks_per_stage` above 1 a stage consists of several ranks, which split its matrices as in `tensor_parallel`. Each sends
activations to the rank with the same share of the next stage. The bits are then those of any other layout with as many shares.

With R replicas there are R such pipelines, each with a block of the micro-batches; the ranks of a stage average their
gradients. For every schedule, p and R the gradients, clipping norm and update are those of one process, bit for bit.

    ttlaunch run pipeline_parallel
    ttlaunch run pipeline_parallel --on 2loudboxes -c train.yaml

Shapes: B = sequences in a micro-batch, T = tokens in a sequence, D = width of the residual stream, V = micro-batches of a
validation.
Source: D. Narayanan et al., "PipeDream", SOSP 2019, with the flush of their ICML 2021 paper (1F1B); the other orders in
`ttlaunch.runtime.parallel.pipeline.schedules`.
"""

import torch
from torch import Tensor

from ttlaunch.train import (
    PipelinePart,
    RankContext,
    ScheduleChoice,
    agree,
    all_gather,
    contiguous_blocks,
    count_tokens,
    global_norm,
    micro_batches,
    place_in_pipeline,
    report_layer_norms,
    summed_loss,
    train_in_one_process,
    validation_is_due,
    validation_micro_batches,
)

from .recipe import SHARES, STAGES, Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process has all blocks: the reference that the pipeline equals, bit for bit."""
    train_in_one_process(cfg, ctx)


def stage(cfg: Config, ctx: RankContext) -> None:
    """Train this rank's blocks; every stage updates its own, with one clipping norm for all."""
    grid = place_in_pipeline(ctx, num_stages=STAGES(cfg), ranks_per_stage=SHARES(cfg))
    choice = ScheduleChoice(cfg, ctx, grid)
    part = PipelinePart(cfg, ctx, grid, schedule=choice.now)
    ctx.restore(part.model, part.optimizer)
    ctx.compare(ctx.steps_done, part.held_tensors)
    _validate(cfg, ctx, ctx.steps_done, part=part)
    for step in ctx.steps(cfg):
        part = choice.begin_step(part)  # with `auto`, blocks move when it is another schedule's turn
        _run_passes(cfg, ctx, step, part=part)
        mean_loss, tokens = part.mean_gradients()
        norm = global_norm(part.squared_norms())
        rate = part.optimizer.step(step, norm=norm)
        choice.end_step()
        if grid.is_reporting:  # earlier stages have not seen the loss
            ctx.report(step, loss=mean_loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
        else:
            ctx.report(step)
        if validation_is_due(cfg, ctx, step):
            _validate(cfg, ctx, step, part=part)
        if grid.replica == 0 and grid.rank == grid.shares[0]:  # all replicas hold the same
            report_layer_norms(cfg, ctx, part.optimizer, step)
        part.checkpoint(step)  # the first replica saves, all are compared
    ctx.report_parameters(part.model.named_parts())


def _run_passes(cfg: Config, ctx: RankContext, step: int, *, part: PipelinePart) -> None:
    """Run the forward and backward passes of one step; the part's trees then hold the sums of this replica's gradients."""
    batches = list(micro_batches(cfg, ctx, step, among=part.grid.replicas))
    order = part.order(len(batches))
    links = part.links(order, batches)
    inputs: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    for action in order:
        (index, x_BT, y_BT), chunk = batches[action.micro_batch], part.chunks[action.chunk]
        here = action.micro_batch, action.chunk
        if action.kind == "F":
            x = inputs[here] = x_BT if chunk.is_first else links.receive_activations(action)
            out = part.model(x, part.model.masks(step, index), blocks=chunk.blocks)
            outputs[here] = summed_loss(out, y_BT) if chunk.is_last else out
            if not chunk.is_last:
                links.send_activations(action, out)
        else:
            x, out = inputs.pop(here), outputs.pop(here)
            seed = part.model.loss_scaler.seed(out) if chunk.is_last else links.receive_gradients(action)
            part.run_backward(out, seed)
            if not chunk.is_first:
                links.send_gradients(action, x.grad)
            loss = part.model.note_loss(part.model.masks(step, index), out.item()) if chunk.is_last else 0.0  # unknown
            part.add_gradients(chunk, index, tokens=count_tokens(y_BT), loss=loss)
    links.finish()


@torch.no_grad()
def _validate(cfg: Config, ctx: RankContext, step: int, *, part: PipelinePart) -> None:
    """Run the forward passes of this replica's share of a validation; the last stage reports the mean of all."""
    grid, data = part.grid, ctx.data(cfg)
    losses_V = torch.zeros(data.validation_micro_batches, dtype=torch.float64)
    share = contiguous_blocks(len(losses_V), len(grid.replicas))[grid.replica]
    batches = list(validation_micro_batches(cfg, ctx, among=grid.replicas))
    order = [action for action in part.order(len(batches)) if action.kind == "F"]
    links = part.links(order, batches)
    for action in order:
        (_, x_BT, y_BT), chunk = batches[action.micro_batch], part.chunks[action.chunk]
        out = part.model(x_BT if chunk.is_first else links.receive_activations(action), blocks=chunk.blocks)
        if chunk.is_last:
            losses_V[share[action.micro_batch]] = summed_loss(out, y_BT).item()
        else:
            links.send_activations(action, out)
    links.finish()
    if grid.is_last_stage:
        all_gather(ctx, losses_V, among=grid.replicas)
        ctx.report_validation(step, losses_V.tolist(), tokens=data.validation_tokens, reporter=grid.reporter)
    agree(ctx, ctx.early_stop, source=grid.next_stage, dests=grid.stages[: grid.stage][-1:])
