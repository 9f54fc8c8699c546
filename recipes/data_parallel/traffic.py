"""How many bytes the data-parallel recipe moves, as a formula. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    VALUE_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    agreed_buckets,
    all_reduce_mean_traffic,
    compressed_mean_traffic,
    distributed_data_parallel_traffic,
    validation_traffic,
)


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """(W - 1)/W of S out of each worker, and as much back; the first of them once for each sum of its block. Or payloads."""
    workers, count = ranks.of("worker"), config.training_config.micro_batches
    found = validation_traffic(workers, ranks.validation_micro_batches)
    values = ranks.weight_bytes(workers[0]) // VALUE_BYTES if workers else 0
    if config.compression_config.kind != "none":
        return found + compressed_mean_traffic(workers, config.compression_config, ranks)
    if config.data_parallel_config.reduction == "canonical":
        found += [agreed_buckets(workers[0], other) for other in workers[1:]]
        return found + all_reduce_mean_traffic(workers, values, micro_batches=count, blocks=ranks.blocks)
    has_group = config.multihost_config.socket_type == "fabric"
    return found + distributed_data_parallel_traffic(workers, values, has_group=has_group)
