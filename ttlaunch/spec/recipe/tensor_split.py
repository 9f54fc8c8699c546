"""Rules and traffic of ranks that split a model's matrices: how many can split it, and the bytes that they exchange."""

from collections.abc import Iterator, Sequence

from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.suggest import listed
from ttlaunch.spec.recipe.blocks import contiguous_blocks
from ttlaunch.spec.recipe.checks import models_have_a_micro_batch
from ttlaunch.spec.recipe.collective_traffic import all_reduce_bytes
from ttlaunch.spec.recipe.declare import Check, Layout, Per, Problem
from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.recipe.traffic import NUMBER_BYTES, VALUE_BYTES, Ranks, Traffic

_INNER = {"mlp": 4, "conv": 1}  # how many times wider a block is inside than the residual stream


def split_models_fit(ranks: Per, replicas: Per) -> Check:
    """Return the rule that the ranks that split a model have equal shares, and that every model has a micro-batch.

    Args:
        ranks: The key for the number of ranks that split a model.
        replicas: The key for the number of models.
    """

    def check(config: TrainingFile, layout: Layout) -> Iterator[Problem]:
        if "worker" in layout.roles:
            yield from ranks_have_equal_shares(config, ranks=ranks(config), key=ranks.key)
            yield from models_have_a_micro_batch(config, replicas=replicas(config), key=replicas.key)

    return check


def devices_have_equal_shares(config: TrainingFile, layout: Layout) -> Iterator[Problem]:
    """The devices of a worker that split the model with `enable_tp` can have equal shares of it."""
    if "worker" in layout.roles and config.device_config.split_ranks > 1:
        yield from ranks_have_equal_shares(
            config, ranks=config.device_config.split_ranks, key="device_config.mesh_shape"
        )


def stages_have_equal_shares(config: TrainingFile, layout: Layout) -> Iterator[Problem]:
    """The ranks of each pipeline stage can have equal shares of its matrices."""
    pipeline = config.multihost_config.pipeline_parallel_config
    if "stage" in layout.roles and pipeline is not None and pipeline.ranks_per_stage > 1:
        key = "multihost_config.pipeline_parallel_config.ranks_per_stage"
        yield from ranks_have_equal_shares(config, ranks=pipeline.ranks_per_stage, key=key)


def ranks_have_equal_shares(config: TrainingFile, *, ranks: int, key: str) -> Iterator[Problem]:
    """Every rank that splits the matrices gets equally many attention heads, or an equal share of a block's inner width.

    Args:
        config: The configuration, with the sizes of the model.
        ranks: The number of ranks that split the model.
        key: The dotted key that sets this number.
    """
    model, kind = config.transformer_config, config.training_config.model_type
    if kind in _INNER:
        inner, layer = _INNER[kind] * model.embedding_dim, "feed-forward layer" if kind == "mlp" else "convolution"
        factors = f"{_INNER[kind]} × {model.embedding_dim} = {inner}"
        yield from _equal_widths(
            ranks, inner, layer=layer, key=key, others=(("transformer_config.embedding_dim", factors),)
        )
        return
    heads = {"num_heads": (model.num_heads, "attention head")}
    if kind == "llama" and model.num_kv_heads is not None:
        heads["num_kv_heads"] = (model.num_kv_heads, "head")
    for name, (count, noun) in heads.items():
        if not count % ranks:
            continue
        fitting = listed([str(fits) for fits in range(1, count + 1) if count % fits == 0], quote="")
        of = " of keys and values" if name == "num_kv_heads" else ""
        yield Problem(
            "C080",
            f"{counted(ranks, 'rank')} cannot have equal shares of {counted(count, noun)}{of}",
            key,
            f"{count} / {ranks} leaves {count % ranks}",
            others=((f"transformer_config.{name}", counted(count, "head")),),
            hints=(f"{count} heads can be shared by {fitting} ranks",),
        )
    if kind == "llama":
        inside = (("transformer_config.mlp_dim", f"{model.inner_width} wide inside"),)
        yield from _equal_widths(ranks, model.inner_width, layer="feed-forward layer", key=key, others=inside)


def _equal_widths(
    ranks: int, inner: int, *, layer: str, key: str, others: tuple[tuple[str, str], ...]
) -> Iterator[Problem]:
    if inner % ranks:
        message = f"{counted(ranks, 'rank')} cannot have equal shares of a {layer} that is {inner} wide"
        yield Problem("C080", message, key, f"{inner} / {ranks} leaves {inner % ranks}", others=others)


def split_model_traffic(
    config: TrainingFile,
    ranks: Ranks,
    among: Sequence[int],
    *,
    replica: int = 0,
    replicas: int = 1,
    blocks: int | None = None,
) -> list[Traffic]:
    """Return the traffic of a step whose ranks split one model: partial sums going forward, gradients coming back.

    A block of the feed-forward model, or of the classifier of images, has one such pair of layers. A validation
    has only the partial sums; with activation checkpointing, the backward pass makes them a second time.

    Args:
        config: The configuration, with the sizes of the model.
        ranks: The ranks, which have reported the number of sequences of a validation.
        among: The ranks that split one model, or one stage of it.
        replica, replicas: The index of this replica of the model, and the number of replicas, which share the
            micro-batches.
        blocks: The number of blocks that these ranks have; None for all blocks of the model.
    """
    training, model = config.training_config, config.transformer_config
    each, place = training.sequences_per_micro_batch, model.max_sequence_length * model.embedding_dim
    layers = (1 if training.model_type in _INNER else 2) * (model.num_blocks if blocks is None else blocks)
    passes = 2 if training.activation_checkpointing else 1
    found = []
    trained = _micro_batches(training.sequences_per_step, each, replica=replica, replicas=replicas)
    validated = _micro_batches(ranks.validation_sequences, each, replica=replica, replicas=replicas)
    for source, dest, size in _all_reduces(among, [place * count for count in trained]):
        found.append(Traffic("partial_sums", source, dest, per_step=layers * passes * size))
        found.append(Traffic("input_gradients", source, dest, per_step=layers * size))
    for source, dest, size in _all_reduces(among, [place * count for count in validated]):
        found.append(Traffic("partial_sums", source, dest, per_validation=layers * size))
    return found


def split_norm_traffic(
    config: TrainingFile, ranks: Ranks, among: Sequence[int], *, has_both_ends: bool = True
) -> list[Traffic]:
    """Return the traffic of a step that adds up the squared norm of each parameter over the ranks that share it.

    Args:
        config: The configuration, which says whether embedding and head share a matrix.
        ranks: The ranks, which have reported how many parameters each has.
        among: The ranks that share the parameters.
        has_both_ends: Whether these ranks have both the embedding and the head.
    """
    if len(among) < 2:  # noqa: PLR2004 - one rank sends nothing
        return []
    is_shared_here = has_both_ends and config.transformer_config.tie_embeddings
    tensors = ranks.tensors(among[0]) - is_shared_here  # the norm counts that matrix once
    shares = all_reduce_bytes(among, tensors, value_bytes=NUMBER_BYTES)
    return [Traffic("squared_norms", source, dest, per_step=size) for source, dest, size in shares]


def _micro_batches(sequences: int, each: int, *, replica: int, replicas: int) -> list[int]:
    """Return the sequences of each micro-batch of a replica's block; the last of all may be smaller."""
    block = contiguous_blocks(-(-sequences // each), replicas)[replica]
    return [min(each, sequences - index * each) for index in block]


def _all_reduces(among: Sequence[int], vectors: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for values in vectors:
        yield from all_reduce_bytes(among, values, value_bytes=VALUE_BYTES)
