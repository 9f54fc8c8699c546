"""What serving a model takes, by formula; the launcher checks it before anything starts. No torch."""

from itertools import accumulate, pairwise

from ttlaunch.spec.recipe.sections import TrainingFile

KEYS = 512
"""Keys of a slot are allocated in multiples of so many tokens, or for the length of a whole sequence."""

MOST_TRANSPOSED_BYTES = 96 << 20
"""What transposed copies of matrices may take of a rank's memory, on CPUs with AVX-512; a rank whose matrices take more has none."""

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def cache_bytes_of_token(cfg: TrainingFile) -> int:
    """Return the bytes of one token's keys and values in all blocks; 0 for a model without attention."""
    sizes = cfg.transformer_config
    heads = {"gpt": sizes.num_heads, "llama": sizes.kv_heads}.get(cfg.training_config.model_type, 0)
    width = sizes.embedding_dim // sizes.num_heads
    return 2 * sizes.num_blocks * heads * width * _BYTES[cfg.training_config.precision]


def blocks_of_stages(cfg: TrainingFile, *, vocabulary: int, count: int) -> list[range]:
    """Divide a model's blocks among stages so that the stage with the most values has as few as possible.

    The first stage also has the embedding, and its matrix serves as a tied head there; another head is in the last stage.

    Args:
        cfg: The model.
        vocabulary: Rows of the embedding.
        count: Stages, at most as many as blocks.
    """
    sizes = cfg.transformer_config
    matrix, block = vocabulary * sizes.embedding_dim, _values_of_block(cfg)
    held = [block + matrix * (place == 0) for place in range(count)]
    held[-1] += 0 if sizes.tie_embeddings else matrix
    counts = [1] * count
    for _ in range(sizes.num_blocks - count):
        place = held.index(min(held))
        held[place] += block
        counts[place] += 1
    ends = list(accumulate(counts, initial=0))
    return [range(start, end) for start, end in pairwise(ends)]


def _values_of_block(cfg: TrainingFile) -> int:
    """Return the values of a block's matrices."""
    sizes, kind = cfg.transformer_config, cfg.training_config.model_type
    width = sizes.embedding_dim
    if kind == "llama":
        keys = sizes.kv_heads * width // sizes.num_heads
        return width * (2 * width + 2 * keys + 3 * sizes.inner_width)
    return (8 if kind == "mlp" else 12) * width**2


def gathered_of_row(cfg: TrainingFile) -> int:
    """Return how many values of a row the blocks of a model gather, where ranks share matrices by columns."""
    sizes = cfg.transformer_config
    width = sizes.embedding_dim
    kind = cfg.training_config.model_type
    if kind == "mlp":  # the embedding gathers, too
        return 5 * width * sizes.num_blocks + width
    if kind != "llama":
        return 7 * width * sizes.num_blocks
    keys = sizes.kv_heads * width // sizes.num_heads
    return (3 * width + 2 * keys + sizes.inner_width) * sizes.num_blocks


def header_numbers(slots: int) -> int:
    """Return how many numbers announce a step to another rank: what it is, and room for a copy and a span of every slot."""
    return 5 + 7 * slots


def told_numbers(ranks: int) -> int:
    """Return how many numbers a rank tells the head of itself: two times, and the bytes sent to each rank."""
    return 2 + ranks


def cache_bytes(cfg: TrainingFile, *, slots: int, context: int, shares: int = 1) -> int:
    """Return the bytes of the cache, over all ranks that have a part of it.

    Args:
        cfg: The model.
        slots: Streams at the same time.
        context: Tokens of each.
        shares: Ranks that share matrices by columns; each has all keys and values of a llama.
    """
    copies = shares if cfg.training_config.model_type == "llama" else 1
    keys = min(cfg.transformer_config.max_sequence_length, -(-context // KEYS) * KEYS)
    return copies * slots * keys * cache_bytes_of_token(cfg)
