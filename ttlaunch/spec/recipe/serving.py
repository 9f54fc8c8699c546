"""What serving a model takes, by formula; the launcher checks it before anything starts. No torch."""

from ttlaunch.spec.recipe.sections import TrainingFile

KEYS = 512
"""Keys of a slot are allocated in multiples of so many tokens, or for the length of a whole sequence."""

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def cache_bytes_of_token(cfg: TrainingFile) -> int:
    """Return the bytes of one token's keys and values in all blocks; 0 for a model without attention."""
    sizes = cfg.transformer_config
    if cfg.training_config.model_type != "gpt":
        return 0
    return 2 * sizes.num_blocks * sizes.embedding_dim * _BYTES[cfg.training_config.precision]


def cache_bytes(cfg: TrainingFile, *, slots: int, context: int) -> int:
    """Return the bytes of the cache, over all ranks that have a part of it.

    Args:
        cfg: The model.
        slots: Streams at the same time.
        context: Tokens of each.
    """
    keys = min(cfg.transformer_config.max_sequence_length, -(-context // KEYS) * KEYS)
    return slots * keys * cache_bytes_of_token(cfg)
