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
    """(n - 1)/n of a unit each time that its n ranks gather it, and once a step for its gradients.

    A worker makes m passes a step. With `shard: all` blocks are gathered 2m times, for forward and backward pass, and the
    unit of embedding and head m times, since it is the last of the one and the first of the other; else all once.
    """
    workers, sharing = ranks.of("worker"), config.fully_sharded_config
    if not workers:
        return []
    found = validation_traffic(workers, ranks.validation_micro_batches)
    sums = all_reduce_bytes(workers, 2, value_bytes=NUMBER_BYTES)
    found += [Traffic("all_reduce", source, dest, per_step=size) for source, dest, size in sums]
    if config.multihost_config.socket_type == "mpi":  # else the fabric communicator has made the group
        found += process_group_traffic(workers)
    passes = max(shares(config.training_config.micro_batches, len(workers)))
    checks = max(shares(ranks.validation_micro_batches, len(workers)))
    blocks, ends = ranks.facts[workers[0]]["values_of_blocks"], ranks.facts[workers[0]]["values_of_ends"]
    keeps = sharing.shard != "all"
    gathered = blocks + ends if keeps else 2 * passes * blocks + passes * ends
    evaluated = blocks + ends if keeps else checks * blocks + ends
    weight = VALUE_BYTES if config.training_config.precision == "fp32" else VALUE_BYTES // 2
    size = len(workers) // sharing.replicas
    for first in range(0, len(workers), size):
        peers = workers[first : first + size]
        parameters = (
            ranks.tensors(peers[0]) - config.transformer_config.tie_embeddings
        )  # a matrix of two uses has one norm
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
