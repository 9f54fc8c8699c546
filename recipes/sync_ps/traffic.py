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
    shadowed_traffic,
    shares,
    sums_of_blocks,
)

_COUNTS = 5
"""Numbers that say which step a sum is of, and what of it."""


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """A worker sends S once for each sum of its block, and gets S back; servers tell each other norms, and who came."""
    workers, servers, found = ranks.of("worker"), ranks.of("server"), []
    if not servers:
        return found
    if config.sync_ps_config.straggler == "drop":
        return _as_it_went(config, ranks, workers=workers, servers=servers)
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
    for server in servers[1:]:
        found.append(Traffic("orders", first, server, per_step=(1 + len(workers)) * NUMBER_BYTES))
        found += agreed_stop(config, first, server)
    for before, after, there, back in _norms(ranks, servers):
        found.append(Traffic("squared_norms", before, after, per_step=there))
        found.append(Traffic("squared_norms", after, before, per_step=back))
    return found


def _as_it_went(config: TrainingFile, ranks: Ranks, *, workers: list[int], servers: list[int]) -> list[Traffic]:
    """Return the traffic with `straggler: drop`, where senders report how often they sent each message.

    Which workers take part in a step is decided during the run. If the run was cut off, some of these messages belong to steps that
    not all ranks have finished.
    """
    first, found = servers[0], []
    told = ranks.facts[first]
    stop = 3 * NUMBER_BYTES if config.training_config.early_stop_patience is not None else 0
    scale = 3 * NUMBER_BYTES if config.training_config.precision == "fp16" else 0
    for worker, sums in zip(workers, sums_of_blocks(config.training_config.micro_batches, len(workers)), strict=True):
        sent, answers = ranks.facts[worker].get("pushes", 0) * sums, told.get(f"weights_to_{worker}", 0)
        for server in servers:
            facts = ranks.facts[server]
            size, given = VALUE_BYTES * facts["shard_values"], facts.get(f"weights_to_{worker}", 0)
            found += [
                ("counts", worker, server, sent * _COUNTS * NUMBER_BYTES),
                ("gradients", worker, server, sent * facts["payload_bytes"]),
                ("weights", server, worker, given * size),
                ("average", server, worker, facts.get(f"average_to_{worker}", 0) * size),
            ]
        found += [
            ("verdict", first, worker, max(0, answers - 1) * (2 + len(workers)) * NUMBER_BYTES),
            ("loss_scale", first, worker, answers * scale),
            ("validation", worker, first, ranks.facts[worker].get("losses", 0) * NUMBER_BYTES),
            ("early_stop", first, worker, told.get(f"validations_with_{worker}", 0) * stop),
        ]
    for server in servers[1:]:
        found.append(("orders", first, server, told.get("orders", 0) * (1 + len(workers)) * NUMBER_BYTES))
        found.append(("early_stop", first, server, told.get("validations", 0) * stop))
    for before, after, there, back in _norms(ranks, servers):
        found.append(("squared_norms", before, after, ranks.facts[before].get("steps_made", 0) * there))
        found.append(("squared_norms", after, before, ranks.facts[after].get("steps_made", 0) * back))
    return [Traffic(*edge, once=size, late=size) for *edge, size in found if size]


def _norms(ranks: Ranks, servers: list[int]) -> list[tuple[int, int, int, int]]:
    """Squared norms along the chain of servers and back: two neighbours, and bytes each way."""
    found, so_far, total = [], 0, sum(ranks.facts[server]["shard_tensors"] for server in servers)
    for before, after in pairwise(servers):
        so_far += ranks.facts[before]["shard_tensors"]
        found.append((before, after, NUMBER_BYTES * (1 + so_far), NUMBER_BYTES * (1 + total)))
    return found


def members_traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """Return that of the members of an epoch: servers have the first places, and the last of them owns the last layers."""
    servers = config.sync_ps_config.num_servers
    return shadowed_traffic(config, ranks, owners=list(reversed(range(servers))), servers=servers)


def shadow_bytes(config: TrainingFile) -> int:
    """Return how many bytes of each parameter shadows keep: moments and average; weights, too, unless the shadow is a worker."""
    keys, moments = config.sync_ps_config, 2 if config.training_config.optimizer == "adamw" else 1
    return VALUE_BYTES * (moments + (keys.polyak_interval is not None) + (keys.num_servers > 1))
