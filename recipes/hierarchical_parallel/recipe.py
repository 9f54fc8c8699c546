"""What the hierarchical recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    NUMBER_BYTES,
    Layout,
    Ranks,
    Recipe,
    Traffic,
    TrainingFile,
    agreed_buckets,
    agreed_stop,
    every_worker_has_a_micro_batch,
    per,
    shares,
    sums_of_blocks,
)


class Config(TrainingFile):
    """The sections every recipe shares; this one needs no key of its own."""


def traffic(config: Config, ranks: Ranks) -> list[Traffic]:
    """Of a step: 2S for a worker and S more for each further sum of its block, 2(W + 1)S for the aggregator."""
    workers, found = ranks.of("worker"), []
    sums = sums_of_blocks(config.training_config.micro_batches, len(workers))
    for worker, count, share in zip(workers, sums, shares(ranks.validation_micro_batches, len(workers)), strict=True):
        server, size = ranks.sole("aggregator", "aggregator_optimizer"), ranks.weight_bytes(worker)
        found += [
            Traffic("gradients", worker, server, per_step=count * size),
            Traffic("counts", worker, server, per_step=4 * NUMBER_BYTES * count),
            Traffic("validation", worker, server, per_validation=NUMBER_BYTES * share),
            Traffic("weights", server, worker, per_step=size, once=size),
            agreed_buckets(server, worker),
            *agreed_stop(config, server, worker),
        ]
    for optimizer in ranks.of("optimizer"):
        server, size = ranks.sole("aggregator"), ranks.weight_bytes(optimizer)
        found += [
            Traffic("gradients", server, optimizer, per_step=size),
            Traffic("weights", optimizer, server, per_step=size, once=size),
            agreed_buckets(server, optimizer),
            *agreed_stop(config, server, optimizer),
        ]
    return found


RECIPE = Recipe(
    summary="Workers differentiate, an aggregator averages, an optimizer updates the weights.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("two_tier", worker=per("multihost_config.num_workers"), aggregator_optimizer=1),
        Layout("three_tier", worker=per("multihost_config.num_workers"), aggregator=1, optimizer=1),
    ],
    flows=[("worker", "aggregator_optimizer"), ("worker", "aggregator"), ("aggregator", "optimizer")],
    checks=[every_worker_has_a_micro_batch],
    unread=["multihost_config.pipeline_parallel_config"],
    traffic=traffic,
)
