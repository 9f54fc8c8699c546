"""Closed formulas for the bytes that the runtime's collectives move between each pair of ranks."""

from collections.abc import Iterator, Sequence

from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.recipe.traffic import (
    NUMBER_BYTES,
    VALUE_BYTES,
    Ranks,
    Traffic,
    agreed_buckets,
    agreed_scale,
    shares,
    sums_of,
    sums_of_blocks,
)

_GREETING_BYTES = 256
_KEEPERS, _NODE_NUMBERS = 2, 4


def validation_traffic(among: Sequence[int], micro_batches: int) -> list[Traffic]:
    """Return the traffic of a validation that the ranks share: an `all_gather` of the losses of its micro-batches."""
    sizes = all_gather_bytes(among, micro_batches, value_bytes=NUMBER_BYTES)
    return [Traffic("all_gather", source, dest, per_validation=size) for source, dest, size in sizes if size]


def all_gather_bytes(among: Sequence[int], values: int, *, value_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield source, destination and bytes of an `all_gather` of a vector of `values` numbers, for every pair of ranks."""
    for source, length in zip(among, shares(values, len(among)), strict=True):
        yield from ((source, dest, length * value_bytes) for dest in among if dest != source)


def all_reduce_bytes(
    among: Sequence[int], values: int, *, value_bytes: int, sums: Sequence[int] | None = None
) -> Iterator[tuple[int, int, int]]:
    """Yield source, destination and bytes of an `all_reduce`, or of an `all_reduce_mean` of several sums per rank."""
    sizes = [length * value_bytes for length in shares(values, len(among))]
    for place, source in enumerate(among):
        count = sums[place] if sums else 1
        yield from (
            (source, dest, count * size + sizes[place])
            for dest, size in zip(among, sizes, strict=True)
            if dest != source
        )


def ring_all_reduce_bytes(among: Sequence[int], values: int, *, value_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield source, destination and bytes of a ring all-reduce: each rank sends all shards but one, twice."""
    sizes, count = shares(values, len(among)), len(among)
    for place, source in enumerate(among if count > 1 else ()):
        after = (place + 1) % count
        sent = 2 * values - sizes[after] - sizes[(place + 2) % count]
        yield source, among[after], sent * value_bytes


def all_reduce_mean_traffic(
    among: Sequence[int], values: int, *, micro_batches: int, blocks: Sequence[tuple[int, int]] | None = None
) -> list[Traffic]:
    """Return the traffic of a step that averages gradients, in shards that are sent, summed and returned, and their counts.

    Args:
        among: The ranks.
        values: The number of values of the gradient.
        micro_batches: M, the micro-batches of a step.
        blocks: Those of each rank, as in `Ranks`.
    """
    sums = sums_of_blocks(micro_batches, len(among)) if blocks is None else sums_of(range(*block) for block in blocks)
    counts = {source: 2 * NUMBER_BYTES * count for source, count in zip(among, sums, strict=True)}
    found = []
    for source, dest, size in all_reduce_bytes(among, values, value_bytes=VALUE_BYTES, sums=sums):
        found.append(Traffic("gradients", source, dest, per_step=size))
        found.append(Traffic("counts", source, dest, per_step=counts[source]))
    return found


def shadowed_traffic(config: TrainingFile, ranks: Ranks, *, owners: Sequence[int], servers: int) -> list[Traffic]:
    """Return the traffic of a step of an elastic run in which two members keep the optimizer's state, as `ShadowedUpdate` makes it.

    A worker sends S for each sum of its block, and gets S back unless it keeps the state; the keepers send each other S together.

    Args:
        config: The configuration.
        ranks: The members, by their places, with their blocks.
        owners: The places of the members that add up gradients, as in `ShadowedUpdate`; which of them has how much is not known here, so
            all bytes of the parts are those of the first.
        servers: How many places differentiate nothing.
    """
    members = ranks.of("member")
    keepers, workers, size = members[:_KEEPERS], members[servers:], ranks.weight_bytes(0)
    sums = sums_of(range(*block) for block in ranks.blocks or ())
    found = []
    for worker in workers:
        rows = 1 + sums[worker]
        found += [Traffic("counts", worker, owner, per_step=_NODE_NUMBERS * NUMBER_BYTES * rows) for owner in owners]
        found.append(Traffic("gradients", worker, owners[0], per_step=sums[worker] * size))
        if worker not in keepers:
            found.append(Traffic("weights", owners[0], worker, per_step=size))
            found += agreed_scale(config, owners[0], worker)
    for keeper, other in (keepers, keepers[::-1]):
        is_shadow = other not in owners  # which gets the sums of loss and tokens, too
        found.append(Traffic("counts", keeper, other, per_step=NUMBER_BYTES * (1 + 2 * is_shadow)))
    return [*found, Traffic("gradients", keepers[0], keepers[1], per_step=size)]


def averaging_traffic(config: TrainingFile, among: Sequence[int], size: int, *, every: int) -> list[Traffic]:
    """Return the traffic of an average of `size` bytes of weights after every `every` steps, as `LocalReplica` makes it.

    With SGD and an average after every step, workers average gradients instead.
    """
    values, training = size // VALUE_BYTES, config.training_config
    if every == 1 and training.optimizer == "sgd":
        agreed = [agreed_buckets(among[0], other) for other in among[1:]]
        return agreed + all_reduce_mean_traffic(among, values, micro_batches=training.micro_batches)
    found = []
    for source, dest, moved in all_reduce_bytes(among, values, value_bytes=VALUE_BYTES):
        found.append(Traffic("weights", source, dest, per_step=moved, every=every))
        found.append(Traffic("counts", source, dest, per_step=2 * NUMBER_BYTES, every=every))
    return found


def distributed_data_parallel_traffic(among: Sequence[int], values: int, *, has_group: bool) -> list[Traffic]:
    """Return the traffic of a step of torch's DDP (its unmeasured ring, loss and tokens), and that of its set-up.

    Args:
        among: The replicas.
        values: The number of values of the gradient.
        has_group: Whether torch's process group already exists, as with fabric sockets.
    """
    found = [
        Traffic("all_reduce", source, dest, per_step=size)
        for source, dest, size in all_reduce_bytes(among, 2, value_bytes=NUMBER_BYTES)
    ]
    ring = 2 * (len(among) - 1) * values * VALUE_BYTES // max(1, len(among))
    following = [*among[1:], *among[:1]] if len(among) > 1 else []
    for source, dest in zip(among, following, strict=False):
        found.append(Traffic("gradients (torch)", source, dest, per_step=ring, is_measured=False))
    return found if has_group else [*found, *process_group_traffic(among)]


def process_group_traffic(among: Sequence[int]) -> Iterator[Traffic]:
    """Yield the traffic that sets up torch's process group: all ranks report to rank 0, which answers along a tree."""
    yield from (Traffic("process_group", rank, among[0], once=_GREETING_BYTES) for rank in among[1:])
    distance = 1
    while distance < len(among):
        for source, dest in zip(among[:distance], among[distance:], strict=False):
            yield Traffic("process_group", source, dest, once=_GREETING_BYTES)
        distance *= 2
