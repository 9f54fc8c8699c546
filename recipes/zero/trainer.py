"""ZeRO: data parallelism in which no worker keeps what another one keeps already.

    worker 0  owns shard 0 of every layer --.      .-- parameters of layer l + 1 --> all, while layer l computes
    worker 1  owns shard 1 of every layer --+--<>--+
    worker W-1 owns shard W-1               '      '-- gradients of layer l + 1 --> owners, while layer l computes

AdamW in float32 needs 16 bytes for each parameter: 4 for itself, 4 for its gradient, 8 for two moments. With
`data_parallel` every worker has all of these. Here a worker owns a shard of each layer. With W workers, each keeps between steps

    zero_config.stage   0: 16 bytes   1: 8 + 8/W   2: 4 + 12/W   3: 16/W     for each parameter

In a step, (W - 1)/W of the weights' size S moves in and out of each worker for gradients, and at stages 1 and 2 the same again for
parameters. At stage 3 it is nearly twice as much for parameters, because layers are gathered for the forward and again for the
backward pass. (Stage 0 is an all-reduce.) A worker runs each layer for all of its micro-batches before the next layer, so the
number of micro-batches does not change how often a layer is gathered. The price is memory for their activations.

Gradients are added along one tree over the micro-batches, and the owner of a value updates it. The kernel gives the same bits
wherever shards begin and end. So all stages, for any number of workers, train to the bits of one process.

    ttlaunch run zero
    ttlaunch run zero --set zero_config.stage=2 --set multihost_config.num_workers=4

Shapes: B = sequences in a micro-batch, T = tokens in a sequence, V = micro-batches of a validation.
Source: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020; the order of sums and of passes is our own.
"""

import itertools
from functools import partial

from ttlaunch.train import (
    GatheredWeights,
    LayerPasses,
    OwnedParameters,
    RankContext,
    ScatteredGradients,
    ShardLayout,
    SharedNorms,
    TrainingLoop,
    audited,
    build_model,
    build_optimizer,
    global_norm,
    held_tensors,
    losses_by_layer,
    micro_batches,
    place_of_second_use,
    report_memory,
    share_validation,
    train_in_one_process,
)

from .elastic import come_and_go
from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process has everything: the reference that the workers equal, bit for bit."""
    train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Own a shard of each layer; compute with layers that are gathered from all owners."""
    if ctx.elastic is not None:
        come_and_go(cfg, ctx, _mean_gradient)
        return
    workers, is_first = ctx.ranks("worker"), ctx.position("worker") == 0
    model = build_model(cfg, ctx)  # drawn from the seed; what others own is given up at once
    layout = ShardLayout(dict(model.named_parameters()), ranks=len(workers), second_use=place_of_second_use(model))
    owned = OwnedParameters(model, layout, place=ctx.position("worker"), zero_stage=cfg.zero_config.stage)
    optimizer = build_optimizer(cfg, owned, total_steps=ctx.data(cfg).total_steps)
    ctx.restore(owned, optimizer)
    weights = GatheredWeights(model, owned, ctx=ctx, among=workers)
    gradients = ScatteredGradients(
        list(model.parameters()), owned, ctx=ctx, among=workers, micro_batches=cfg.training_config.micro_batches
    )
    norms = SharedNorms(owned, ctx=ctx, among=workers, traffic=ctx.traffic)
    ctx.traffic.note_shares(ctx.position("worker"), **owned.shares())
    weights.publish(ctx.steps_done)

    def validate(step: int) -> None:
        weights.begin(step)  # all gather every layer once, also those whose share of the validation is empty
        evaluate = partial(losses_by_layer, cfg, ctx, model, weights, among=workers)
        share_validation(cfg, ctx, step, among=workers, evaluate=evaluate)

    owners = workers if cfg.zero_config.stage else workers[:1]  # at stage 0 all hold the same
    whole_norms = norms if is_first else None
    loop = TrainingLoop(
        cfg,
        ctx,
        validate=validate,
        reports=is_first,
        norms=whole_norms,
        saved=(owned, optimizer),
        owners=owners,
        held=lambda: itertools.chain(weights.replicated(), held_tensors(owned, optimizer)),  # shards: for replays
    )
    for step in loop.steps():
        weights.begin(step - 1)
        passes = LayerPasses(model, list(micro_batches(cfg, ctx, step, among=workers)), step=step)
        with audited(cfg, ctx, step, model=model, weights=weights, gradients=gradients):
            loss, tokens = _mean_gradient(passes, weights, gradients)
        norm = global_norm(list(norms.squares().values()))
        rate = optimizer.step(step, norm=norm)  # of the shards that this worker owns
        weights.publish(step)
        loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    weights.begin(ctx.step)
    for layer in layout.layers:  # whole layers, so that their digests can be compared with those of any other layout
        weights.fetch(layer.index, then=None)
        ctx.report_parameters(layout.parameters_of(layer, model))
    report_memory(ctx, model, owned, optimizer, buffer_bytes=weights.buffer_bytes + gradients.buffer_bytes)


def _mean_gradient(passes: LayerPasses, weights: GatheredWeights, gradients: ScatteredGradients) -> tuple[float, int]:
    """Leave the gradient of the mean loss with its owners; layers come, compute and go."""
    layers = weights.layers
    for before, layer in itertools.pairwise(layers):
        weights.fetch(before.index, then=layer.index)  # the next one comes while this one computes
        passes.forward(before.index)
    for layer in reversed(layers):
        weights.fetch(layer.index, then=layer.index - 1 if layer.index else None)
        for at, (index, _, _) in enumerate(passes.batches):
            with gradients.of(layer, index):
                passes.backward(layer.index, at)
        gradients.reduce(layer, passes.counts)  # its sums travel while the layer before it computes
    return gradients.finish()
