"""Rules about `model_type: llama`: how its heads share keys and values, and keys that only such a model reads."""

from collections.abc import Iterator

from ttlaunch.diagnostics.suggest import listed
from ttlaunch.spec.recipe.declare import Layout, Problem
from ttlaunch.spec.recipe.sections import TrainingFile, TransformerConfig

_SIZES = "transformer_config"
_TYPE = "training_config.model_type"
_OF_LLAMA = ("num_kv_heads", "mlp_dim", "norm_epsilon", "rope_theta", "rope_scaling", "max_position_embeddings")


def llama_heads_fit(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Equally many heads share each head of keys and values, and a head has pairs of values for its position to turn."""
    sizes = config.transformer_config
    if config.training_config.model_type != "llama":
        return
    if sizes.num_heads % sizes.kv_heads:
        fitting = listed(
            [str(count) for count in range(1, sizes.num_heads + 1) if sizes.num_heads % count == 0], quote=""
        )
        yield Problem(
            "C026",
            f"`num_heads` {sizes.num_heads} is not a multiple of `num_kv_heads` {sizes.kv_heads}",
            f"{_SIZES}.num_kv_heads",
            f"{sizes.num_heads} / {sizes.kv_heads} leaves {sizes.num_heads % sizes.kv_heads}",
            others=((f"{_SIZES}.num_heads", "share them"),),
            hints=(f"{fitting} divide {sizes.num_heads}",),
        )
    width, rest = divmod(sizes.embedding_dim, sizes.num_heads)
    if width % 2 and not rest:
        yield Problem(
            "C026",
            f"a head of a llama is {width} wide, and positions turn pairs of values",
            f"{_SIZES}.num_heads",
            f"{sizes.embedding_dim} / {sizes.num_heads} = {width}, expected an even number",
            others=((f"{_SIZES}.embedding_dim", "shared by the heads"),),
        )


def llama_positions_fit(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Require `low_freq_factor` to be below `high_freq_factor`: between these bounds, Llama 3 stretches positions."""
    scaling = config.transformer_config.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        yield Problem(
            "C091",
            f"`low_freq_factor` is {low:g}, which is not below `high_freq_factor` {high:g}",
            f"{_SIZES}.rope_scaling.low_freq_factor",
            f"expected less than {high:g}",
            others=((f"{_SIZES}.rope_scaling.high_freq_factor", "the other bound"),),
        )


def keys_of_llama_need_one(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Refuse keys that only a llama reads if the model is another one, and the activation that a llama does not have."""
    kind, sizes, none = config.training_config.model_type, config.transformer_config, TransformerConfig()
    keys = ("activation",) if kind == "llama" else _OF_LLAMA
    for key in keys:
        if getattr(sizes, key) == getattr(none, key):
            continue
        what = (
            "is not read by a llama, which has silu"
            if kind == "llama"
            else f"is about a llama, and `model_type` is `{kind}`"
        )
        yield Problem(
            "C089",
            f"`{key}` {what}",
            f"{_SIZES}.{key}",
            others=((_TYPE, "the model"),),
            hints=("remove the key", *(() if kind == "llama" else (f"`--set {_TYPE}=llama`",))),
        )
