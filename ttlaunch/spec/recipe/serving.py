"""What serving a model takes, by formula; the launcher checks it before anything starts. No torch."""

from ttlaunch.spec.recipe.sections import TrainingFile

KEYS = 512
"""Keys of a slot are allocated in multiples of so many tokens, or for the length of a whole sequence."""

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def cache_bytes_of_token(cfg: TrainingFile) -> int:
    """Return the bytes of one token's keys and values in all blocks; 0 for a model without attention."""
    sizes = cfg.transformer_config
    heads = {"gpt": sizes.num_heads, "llama": sizes.kv_heads}.get(cfg.training_config.model_type, 0)
    width = sizes.embedding_dim // sizes.num_heads
    return 2 * sizes.num_blocks * heads * width * _BYTES[cfg.training_config.precision]


def gathered_of_row(cfg: TrainingFile) -> int:
    """Return how many values of a row the blocks of a model gather, where ranks share matrices by columns."""
    sizes = cfg.transformer_config
    width = sizes.embedding_dim
    if cfg.training_config.model_type != "llama":
        return 7 * width * sizes.num_blocks
    keys = sizes.kv_heads * width // sizes.num_heads
    return (3 * width + 2 * keys + sizes.inner_width) * sizes.num_blocks


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
