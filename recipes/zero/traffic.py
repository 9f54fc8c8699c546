"""How many bytes the ZeRO recipe moves, as a formula. No torch here: the launcher reads it."""

from collections.abc import Sequence

from ttlaunch.recipe import (
    NUMBER_BYTES,
    VALUE_BYTES,
    Ranks,
    Traffic,
    TrainingFile,
    all_reduce_mean_traffic,
    sums_of_blocks,
    validation_traffic,
)

_FIRST_AND_LAST = 2
"""Layers besides the blocks: embedding and head."""

_SHARES_PARAMETERS = 3
"""The stage from which on no rank has the whole model between steps."""


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """Each worker sends (W - 1)/W of S a step for gradients, once for each sum of its block, and for parameters.

    At stage 3 parameters go out twice, but for the two layers that a forward pass leaves behind for the backward pass. Each
    rank says how many values it owns, which is S / W up to a row, and how many of them leave again. A matrix that embedding and
    head share has two gradients, and at stage 3 goes out for each of the two layers.
    """
    workers, zero_stage = ranks.of("worker"), config.zero_config.stage
    sums = sums_of_blocks(config.training_config.micro_batches, len(workers))
    layers = config.transformer_config.num_blocks + _FIRST_AND_LAST
    owned = {rank: VALUE_BYTES * ranks.fact(rank, "owned_values") for rank in workers}
    found = validation_traffic(workers, ranks.validation_micro_batches)
    for source, count in zip(workers, sums, strict=True):
        others = [dest for dest in workers if dest != source]
        means = owned[source] if zero_stage == 0 else 0
        found += [Traffic("gradients", source, dest, per_step=count * owned[dest] + means) for dest in others]
        numbers = 2 * NUMBER_BYTES * count  # found once for all: a thousand workers have a million pairs
        found += [Traffic("counts", source, dest, per_step=numbers) for dest in others]
        if zero_stage:
            found += _shared(ranks, source, others, layers=layers)
            found += _weights(ranks, source, others, size=owned[source], zero_stage=zero_stage)
    return found


def members_traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic] | None:
    """Return that of the members of an epoch at stage 0; at others every change cuts the slots anew, and only the newest sizes are known."""
    if config.zero_config.stage:
        return None
    workers, count = ranks.of("worker"), config.training_config.micro_batches
    values = ranks.weight_bytes(workers[0]) // VALUE_BYTES
    return all_reduce_mean_traffic(workers, values, micro_batches=count, blocks=ranks.blocks)


def shadow_bytes(config: TrainingFile) -> int:
    """Return how many bytes of each parameter all shadows of an elastic run keep: whatever of it the stage shares."""
    zero_stage, moments = config.zero_config.stage, 2 if config.training_config.optimizer == "adamw" else 1
    return VALUE_BYTES * (moments * (zero_stage >= 1) + (zero_stage >= 2) + (zero_stage >= 3))  # noqa: PLR2004


def kept_bytes(config: TrainingFile) -> int:
    """Return how many bytes of each parameter each worker of an elastic run keeps of the last step: at stage 0 its mean gradient."""
    return 0 if config.zero_config.stage else VALUE_BYTES


def _shared(ranks: Ranks, source: int, others: Sequence[int], *, layers: int) -> list[Traffic]:
    """A version of each layer, and the nodes of the norm's tree that the source has."""
    versions, nodes = NUMBER_BYTES * layers, NUMBER_BYTES * ranks.fact(source, "norm_nodes")
    return [
        *(Traffic("versions", source, dest, once=versions, per_step=versions) for dest in others),
        *(Traffic("squared_norms", source, dest, per_step=nodes) for dest in others),
    ]


def _weights(ranks: Ranks, source: int, others: Sequence[int], *, size: int, zero_stage: int) -> list[Traffic]:
    """What the source owns: at stage 3 for each pass, else for each step."""
    if zero_stage == _SHARES_PARAMETERS:
        each = size + VALUE_BYTES * ranks.fact(source, "values_of_backward")
        return [Traffic("weights", source, dest, per_step=each, per_validation=size, at_end=size) for dest in others]
    size -= VALUE_BYTES * ranks.fact(source, "values_of_second_use")
    return [Traffic("weights", source, dest, once=size, per_step=size) for dest in others]
