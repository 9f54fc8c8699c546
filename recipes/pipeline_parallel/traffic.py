"""Who talks to whom in a pipeline, and how many bytes that is. No torch here: the launcher reads it."""

from itertools import pairwise

from ttlaunch.recipe import (
    NUMBER_BYTES,
    VALUE_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    agreed_stop,
    all_reduce_bytes,
    all_reduce_mean_traffic,
    per,
    sequences_of_blocks,
    split_model_traffic,
    split_norm_traffic,
    validation_traffic,
)

STAGES = per("multihost_config.pipeline_parallel_config.blocks_per_rank")
REPLICAS = per("multihost_config.pipeline_parallel_config.replicas")
CHUNKS = per("multihost_config.pipeline_parallel_config.chunks_per_rank")
SHARES = per("multihost_config.pipeline_parallel_config.ranks_per_stage")
WIDTH = per(STAGES.key, times=SHARES.key)


def closes_the_chain(config: TrainingFile) -> bool:
    """The last stage hands activations back to the first, which has the next chunk, or shares the embedding with it."""
    return CHUNKS(config) > 1 or config.transformer_config.tie_embeddings


def moves_blocks(config: TrainingFile) -> bool:
    """Blocks change ranks when `auto` goes from a schedule without chunks to one with several, or back."""
    pipeline = config.multihost_config.pipeline_parallel_config
    return pipeline is not None and pipeline.schedule == "auto" and CHUNKS(config) > 1


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic] | None:
    """Activations and their gradients between neighbouring parts; norms along the chain; gradients among replicas."""
    stages, found = ranks.of("stage"), []
    if not stages:
        return found
    width, shares = WIDTH(config), SHARES(config)
    if moves_blocks(config):
        return None
    replicas = [stages[at : at + width] for at in range(0, len(stages), width)]
    for place in range(shares):  # each is a pipeline by itself, with its shares of the stages
        found += _of_chains(config, ranks, [replica[place::shares] for replica in replicas])
    if shares > 1:
        for at, replica in enumerate(replicas):
            rows = [replica[first : first + shares] for first in range(0, width, shares)]
            found += [one for row in rows for one in _of_stage(config, ranks, row, at=at, count=len(replicas))]
    return found


def _of_chains(config: TrainingFile, ranks: Ranks, replicas: list[list[int]]) -> list[Traffic]:
    """Return the traffic between and within pipelines that have the same shares of their stages."""
    found = []
    for at, replica in enumerate(replicas):
        found += _passes(config, ranks, replica, at=at, count=len(replicas)) + _norms(config, ranks, replica)
    for column in zip(*replicas, strict=True):
        found += _means(config, ranks, column)
    found += validation_traffic([replica[-1] for replica in replicas], ranks.validation_micro_batches)
    is_measured_first = config.multihost_config.pipeline_parallel_config.schedule == "auto"
    return found + (_choice(replicas) if is_measured_first else [])


def _of_stage(config: TrainingFile, ranks: Ranks, row: list[int], *, at: int, count: int) -> list[Traffic]:
    """Return the traffic among ranks that split a stage's matrices: sums of activations, and squared norms."""
    pipeline = config.multihost_config.pipeline_parallel_config
    stage = row[0] % WIDTH(config) // len(row)
    found = split_model_traffic(config, ranks, row, replica=at, replicas=count, blocks=pipeline.blocks[stage])
    found += split_norm_traffic(config, ranks, row, has_both_ends=len(pipeline.blocks) == 1)
    if pipeline.schedule == "auto":
        times = all_reduce_bytes(row, 2, value_bytes=NUMBER_BYTES)
        found += [Traffic("end_step", source, dest, slack=size) for source, dest, size in times]
    return found


def _passes(config: TrainingFile, ranks: Ranks, replica: list[int], *, at: int, count: int) -> list[Traffic]:
    """Return 4BTD bytes per micro-batch from each part to the next and back; in a validation only forward."""
    training, sizes, chunks = config.training_config, config.transformer_config, CHUNKS(config)
    each, place = training.sequences_per_micro_batch, VALUE_BYTES * sizes.max_sequence_length * sizes.embedding_dim
    trained = place * sequences_of_blocks(training.sequences_per_step, each, count)[at]
    validated = place * sequences_of_blocks(ranks.validation_sequences, each, count)[at]
    neighbours = list(pairwise(replica)) * chunks
    neighbours += [(replica[-1], replica[0])] * (chunks - 1 if len(replica) > 1 else 0)
    return [
        one
        for before, after in neighbours
        for one in (
            Traffic("activations", before, after, per_step=trained, per_validation=validated),
            Traffic("activation_gradients", after, before, per_step=trained),
        )
    ]


def _norms(config: TrainingFile, ranks: Ranks, replica: list[int]) -> list[Traffic]:
    """Part and squared norm of each parameter: what has come so far on the way down the chain, everything on the way up.

    And from the last stage up, whether training goes on.
    """
    found, so_far = _shared_matrix(config, ranks, replica), 0
    total = sum(2 * ranks.tensors(rank) for rank in replica) - (2 if found else 0)  # the norm counts the matrix once
    for before, after in pairwise(replica):
        so_far += 2 * ranks.tensors(before)
        found.append(Traffic("squared_norms", before, after, per_step=NUMBER_BYTES * (1 + so_far)))
        found.append(Traffic("squared_norms", after, before, per_step=NUMBER_BYTES * (1 + total)))
        found += agreed_stop(config, after, before)
    return found


def _shared_matrix(config: TrainingFile, ranks: Ranks, replica: list[int]) -> list[Traffic]:
    """The gradients of both uses of the matrix that embedding and head share, between the stages that have them."""
    first, last = replica[0], replica[-1]
    if first == last or not config.transformer_config.tie_embeddings:
        return []
    size = VALUE_BYTES * ranks.facts[first]["tied_values"]
    return [Traffic("tied_gradient", a, b, per_step=size) for a, b in ((first, last), (last, first))]


def _means(config: TrainingFile, ranks: Ranks, column: tuple[int, ...]) -> list[Traffic]:
    """The gradients of a stage among its replicas; counts once for each chunk."""
    values, chunks = ranks.weight_bytes(column[0]) // VALUE_BYTES, CHUNKS(config)
    found = all_reduce_mean_traffic(column, values, micro_batches=config.training_config.micro_batches)
    return found + [one for one in found if one.operation == "counts"] * (chunks - 1)


def _choice(replicas: list[list[int]]) -> list[Traffic]:
    """Once, after the measured steps: two times along each chain, then among replicas; none in a run of a few steps."""
    found, two = [], 2 * NUMBER_BYTES
    for replica in replicas:
        for at, (before, after) in enumerate(pairwise(replica), start=1):
            found.append(Traffic("end_step", before, after, slack=NUMBER_BYTES + two * at))
            found.append(Traffic("end_step", after, before, slack=NUMBER_BYTES + two * len(replica)))
    for column in zip(*replicas, strict=True):
        shares = all_reduce_bytes(column, 2, value_bytes=NUMBER_BYTES)
        found += [Traffic("end_step", source, dest, slack=size) for source, dest, size in shares]
    return found
