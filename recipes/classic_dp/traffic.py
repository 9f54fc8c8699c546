"""How many bytes the workers move, as a formula. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    NUMBER_BYTES,
    VALUE_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    agreed_buckets,
    all_reduce_mean_traffic,
    ring_all_reduce_bytes,
    validation_traffic,
)

_COUNTS = 3


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """2(W - 1)/W of S from each worker to the next, and three numbers to every other; with bound 0 that of the tree."""
    workers, bound = ranks.of("worker"), config.classic_dp_config.staleness_bound
    found = validation_traffic(workers, ranks.validation_micro_batches)
    values = ranks.weight_bytes(workers[0]) // VALUE_BYTES if workers else 0
    if bound == 0:
        found += [agreed_buckets(workers[0], other) for other in workers[1:]]
        count = config.training_config.micro_batches
        return found + all_reduce_mean_traffic(workers, values, micro_batches=count, blocks=ranks.blocks)
    for source, dest, size in ring_all_reduce_bytes(workers, values, value_bytes=VALUE_BYTES):
        found.append(Traffic("gradients", source, dest, per_step=size, late=bound * size))
    pairs = [(source, dest) for source in workers for dest in workers if source != dest]
    return found + [Traffic("counts", *pair, per_step=_COUNTS * NUMBER_BYTES) for pair in pairs]


def members_traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic] | None:
    """Return that of the members of an epoch; with a bound above 0 their messages of several steps overlap, also over changes."""
    return None if config.classic_dp_config.staleness_bound else traffic(config, ranks)


def kept_bytes(config: TrainingFile) -> int:
    """Return how many bytes of each parameter each worker of an elastic run keeps of the last step: of staleness 0, its mean gradient."""
    return 0 if config.classic_dp_config.staleness_bound else VALUE_BYTES
