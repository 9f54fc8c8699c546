"""How many bytes the tensor-parallel recipe moves, as a formula. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    VALUE_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    agreed_buckets,
    all_reduce_mean_traffic,
    per,
    split_model_traffic,
    split_norm_traffic,
    validation_traffic,
)

RANKS = per("tensor_parallel_config.ranks")
REPLICAS = per("tensor_parallel_config.replicas")


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """Within a model two sums of activations a block and micro-batch, and two back; among models the mean gradient."""
    workers, width, found = ranks.of("worker"), RANKS(config), []
    models = [workers[at : at + width] for at in range(0, len(workers), width)]
    for at, model in enumerate(models):
        found += split_model_traffic(config, ranks, model, replica=at, replicas=len(models))
        found += split_norm_traffic(config, ranks, model)
    for column in zip(*models, strict=True):
        values = ranks.weight_bytes(column[0]) // VALUE_BYTES
        found += [agreed_buckets(column[0], other) for other in column[1:]]
        found += all_reduce_mean_traffic(column, values, micro_batches=config.training_config.micro_batches)
        found += validation_traffic(column, ranks.validation_micro_batches)
    return found
