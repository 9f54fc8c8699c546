"""How many bytes the workers move, as a formula. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    Ranks,
    Traffic,
    TrainingFile,
    averaging_traffic,
    compressed_averaging_traffic,
    validation_traffic,
)


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """2(W - 1)/W of S out of each worker, and as much in, every so many steps; or W - 1 payloads."""
    workers, every = ranks.of("worker"), config.local_sgd_config.every
    found = validation_traffic(workers, ranks.validation_micro_batches)
    if config.compression_config.kind != "none":
        return found + compressed_averaging_traffic(config, workers, ranks, every=every)
    size = ranks.weight_bytes(workers[0]) if workers else 0
    return found + averaging_traffic(config, workers, size, every=every)
