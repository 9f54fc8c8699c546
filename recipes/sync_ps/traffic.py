"""How many bytes workers and servers exchange. No torch here: the launcher reads it."""

from itertools import pairwise

from ttlaunch.recipe import (
    NUMBER_BYTES,
    VALUE_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    agreed_scale,
    agreed_stop,
    shares,
    sums_of_blocks,
)

_COUNTS = 5
"""Numbers that say which step a sum is of, and what of it."""


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic] | None:
    """A worker sends S once for each sum of its block, and gets S back; servers tell each other norms, and who came.

    With `straggler: drop` who sends what is decided in the run.
    """
    workers, servers, found = ranks.of("worker"), ranks.of("server"), []
    if not servers:
        return found
    if config.sync_ps_config.straggler == "drop":
        return None
    sums = sums_of_blocks(config.training_config.micro_batches, len(workers))
    validated = shares(ranks.validation_micro_batches, len(workers))
    times = 1 if config.sync_ps_config.polyak_interval is None else 2
    first = servers[0]
    for worker, count, share in zip(workers, sums, validated, strict=True):
        for server in servers:
            size = VALUE_BYTES * ranks.facts[server]["shard_values"]
            found += [
                Traffic("counts", worker, server, per_step=_COUNTS * NUMBER_BYTES * count),
                Traffic("gradients", worker, server, per_step=count * ranks.facts[server]["payload_bytes"]),
                Traffic("weights", server, worker, per_step=size, once=size),
                Traffic("average", server, worker, per_validation=(times - 1) * size),
            ]
        found += [
            Traffic("verdict", first, worker, per_step=(2 + len(workers)) * NUMBER_BYTES),
            Traffic("validation", worker, first, per_validation=times * share * NUMBER_BYTES),
            *agreed_stop(config, first, worker),
            *agreed_scale(config, first, worker),
        ]
    return found + _between_servers(config, ranks, servers, workers=len(workers))


def _between_servers(config: TrainingFile, ranks: Ranks, servers: list[int], *, workers: int) -> list[Traffic]:
    """Whose gradients make a step; squared norms along the chain of servers and back."""
    found, first, size = [], servers[0], (1 + workers) * NUMBER_BYTES
    for server in servers[1:]:
        found += [Traffic("orders", first, server, per_step=size), *agreed_stop(config, first, server)]
    so_far, total = 0, sum(ranks.facts[server]["shard_tensors"] for server in servers)
    for before, after in pairwise(servers):
        so_far += ranks.facts[before]["shard_tensors"]
        found.append(Traffic("squared_norms", before, after, per_step=NUMBER_BYTES * (1 + so_far)))
        found.append(Traffic("squared_norms", after, before, per_step=NUMBER_BYTES * (1 + total)))
    return found
