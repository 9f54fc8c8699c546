"""How many bytes the fully sharded recipe moves, as a formula. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    NUMBER_BYTES,
    VALUE_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    all_reduce_bytes,
    process_group_traffic,
    shares,
    validation_traffic,
)


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """Predict the bytes of a step: each rank sends (n - 1)/n of a unit whenever the n ranks of its shard group gather it.

    The gradients of a unit are reduced once a step, which costs the same. A worker makes m passes a step. With
    `shard: all`, weights are freed after each use: every block is gathered 2m times, for the forward and for the backward
    pass. Embedding and head form one unit. It is gathered only m times, because the forward pass ends with it and the
    backward pass begins with it. With any other `shard`, every unit is gathered once a step.
    """
    workers, sharing = ranks.of("worker"), config.fully_sharded_config
    if not workers:
        return []
    found = validation_traffic(workers, ranks.validation_micro_batches)
    sums = all_reduce_bytes(workers, 2, value_bytes=NUMBER_BYTES)
    found += [Traffic("all_reduce", source, dest, per_step=size) for source, dest, size in sums]
    if config.multihost_config.socket_type != "fabric":  # whose communicator has made the group
        found += process_group_traffic(workers)
    passes = max(shares(config.training_config.micro_batches, len(workers)))
    checks = max(shares(ranks.validation_micro_batches, len(workers)))
    blocks, ends = ranks.facts[workers[0]]["values_of_blocks"], ranks.facts[workers[0]]["values_of_ends"]
    keeps_weights = sharing.shard != "all"
    gathered = blocks + ends if keeps_weights else 2 * passes * blocks + passes * ends
    evaluated = blocks + ends if keeps_weights else checks * blocks + ends
    weight = VALUE_BYTES if config.training_config.precision == "fp32" else VALUE_BYTES // 2
    size = len(workers) // sharing.replicas
    for first in range(0, len(workers), size):
        peers = workers[first : first + size]
        # A matrix that embedding and head share is listed as two tensors, but its norm is sent once.
        parameters = ranks.tensors(peers[0]) - config.transformer_config.tie_embeddings
        norms = all_reduce_bytes(peers, parameters, value_bytes=NUMBER_BYTES)
        found += [Traffic("squared_norms", source, dest, per_step=moved) for source, dest, moved in norms]
        found += _ring("weights (torch)", peers, per_step=gathered * weight, per_validation=evaluated * weight)
        found += _ring("gradients (torch)", peers, per_step=(blocks + ends) * VALUE_BYTES)
    for place in range(size):
        found += _ring("replicas (torch)", workers[place::size], per_step=2 * (blocks + ends) * VALUE_BYTES // size)
    return found


def _ring(operation: str, among: list[int], *, per_step: int, per_validation: int = 0) -> list[Traffic]:
    """Return the traffic of a ring, in which each rank sends to the next, for vectors of this many bytes."""
    count = len(among)
    parts = (count - 1) * per_step // count, (count - 1) * per_validation // count
    pairs = zip(among, [*among[1:], *among[:1]], strict=True)
    return [Traffic(operation, *pair, per_step=parts[0], per_validation=parts[1]) for pair in pairs if count > 1]
