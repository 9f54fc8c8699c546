"""How many bytes the tiers exchange. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    NUMBER_BYTES,
    VALUE_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    agreed_buckets,
    agreed_scale,
    agreed_stop,
    aligned_subtrees,
    contiguous_blocks,
    per,
    shadowed_traffic,
    shares,
    split_model_traffic,
)

RANKS_OF_A_WORKER = per("device_config.local_ranks")


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """A worker moves 2S a step and S more for each further sum of its block; the aggregator moves 2(W + 1)S."""
    workers, width, found = ranks.of("worker"), config.device_config.split_ranks, []
    rows = [workers[at : at + width] for at in range(0, len(workers), width)]
    for at, row in enumerate(rows):
        found += split_model_traffic(config, ranks, row, replica=at, replicas=len(rows))
        found += [one for place in range(width) for one in _of_worker(config, ranks, rows, at=at, place=place)]
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


def _of_worker(config: TrainingFile, ranks: Ranks, rows: list[list[int]], *, at: int, place: int) -> list[Traffic]:
    """Return a rank's traffic with the aggregator, or with the rank at its place in its worker's first row."""
    worker, height = rows[at][place], RANKS_OF_A_WORKER(config) // len(rows[at])
    blocks = contiguous_blocks(config.training_config.micro_batches, len(rows))
    validated = shares(ranks.validation_micro_batches, len(rows))
    is_first, size = at % height == 0, ranks.weight_bytes(worker)
    last = at + height - 1 if is_first else at  # whose sums are in what it sends
    server = ranks.sole("aggregator", "aggregator_optimizer") if is_first else rows[at - at % height][place]
    sums = len(list(aligned_subtrees(range(blocks[at].start, blocks[last].stop))))
    found = [
        Traffic("gradients", worker, server, per_step=sums * size),
        Traffic("counts", worker, server, per_step=4 * NUMBER_BYTES * sums),
        Traffic("weights", server, worker, per_step=size, once=size),
        agreed_buckets(server, worker),
        *agreed_stop(config, server if place == 0 else rows[at][0], worker),
        *agreed_scale(config, server, worker),
    ]
    if place == 0:  # all of a row know its losses
        validation = NUMBER_BYTES * sum(validated[at : last + 1])
        found.append(Traffic("validation", worker, server, per_validation=validation))
    return found


def members_traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """Return that of the members of an epoch: the optimizer at place 0, the aggregator at place 1."""
    return shadowed_traffic(config, ranks, owners=[1], servers=2)


def shadow_bytes(config: TrainingFile) -> int:
    """Return how many bytes of each parameter the optimizer's shadow keeps: the moments, since the aggregator has weights anyway."""
    return VALUE_BYTES * (2 if config.training_config.optimizer == "adamw" else 1)
