"""How many bytes the tiers exchange. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    NUMBER_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    agreed_buckets,
    agreed_scale,
    agreed_stop,
    aligned_subtrees,
    contiguous_blocks,
    per,
    shares,
)

RANKS_OF_A_WORKER = per("device_config.local_ranks")


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """Of a step: 2S for a worker and S more for each further sum of its block, 2(W + 1)S for the aggregator."""
    workers, local, found = ranks.of("worker"), RANKS_OF_A_WORKER(config), []
    blocks = contiguous_blocks(config.training_config.micro_batches, len(workers)) if workers else []
    validated = shares(ranks.validation_micro_batches, len(workers))
    for at, worker in enumerate(workers):
        is_first, size = at % local == 0, ranks.weight_bytes(worker)
        last = at + local - 1 if is_first else at  # whose sums are in what it sends
        server = ranks.sole("aggregator", "aggregator_optimizer") if is_first else workers[at - at % local]
        sums = len(list(aligned_subtrees(range(blocks[at].start, blocks[last].stop))))
        found += [
            Traffic("gradients", worker, server, per_step=sums * size),
            Traffic("counts", worker, server, per_step=4 * NUMBER_BYTES * sums),
            Traffic("validation", worker, server, per_validation=NUMBER_BYTES * sum(validated[at : last + 1])),
            Traffic("weights", server, worker, per_step=size, once=size),
            agreed_buckets(server, worker),
            *agreed_stop(config, server, worker),
            *agreed_scale(config, server, worker),
        ]
    for optimizer in ranks.of("optimizer"):
        server, size = ranks.sole("aggregator"), ranks.weight_bytes(optimizer)
        found += [
            Traffic("gradients", server, optimizer, per_step=size),
            Traffic("weights", optimizer, server, per_step=size, once=size),
            agreed_buckets(server, optimizer),
            *agreed_stop(config, server, optimizer),
            *agreed_scale(config, optimizer, server),
        ]
    return found
