"""A Llama in a folder of Hugging Face's transformers: what its configuration says, and how it names and cuts our tensors.

`model_type: llama` is Llama, and the configuration says what may differ: how many heads share keys and values, the width of a
feed-forward layer, positions, and whether the head has a matrix of its own. Queries, keys and values are one matrix with us and
three with them, and so are the gate of a feed-forward layer and what it multiplies: each is some of the rows.

Source: transformers, `models/llama/modeling_llama.py`, `configuration_llama.py` and `modeling_rope_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ttlaunch.diagnostics import shown
from ttlaunch.records.parser import Amount, BadRecord, Count, Flag, Json, Word, parse, record
from ttlaunch.running.checkpoints.derived_tensors import Rows, StackedRows
from ttlaunch.running.checkpoints.tensor_file import AnyTensor, FiledTensor
from ttlaunch.running.pretrained.read_folder import CONFIG, PretrainedError

_HEAD = "head.output.weight"
_AROUND_BLOCKS = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_IN_A_BLOCK = {
    "attention_norm": ("input_layernorm",),
    "attention_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "feed_forward_in": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward_out": ("mlp.down_proj",),
}
_BASE = "model."
"""What the names of all tensors but the head's begin with, unless the model was saved without its head."""
_BUFFER = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq\Z")
"""Frequencies of positions, which older files contain and which the configuration says."""
_SCALED, _PLAIN = "llama3", "default"
_LONGEST_TEXT = 10**8


def llama_names(num_blocks: int, *, tied: bool) -> dict[str, tuple[str, ...]]:
    """Return by each parameter of ours the names of the matrices in transformers that are its rows, in their order.

    Args:
        num_blocks: Blocks of the model.
        tied: Whether the head uses the matrix of the embedding; it is then stored only once.
    """
    names: dict[str, tuple[str, ...]]
    names = {ours: (theirs,) for ours, theirs in _AROUND_BLOCKS.items() if not (tied and ours == _HEAD)}
    for block in range(num_blocks):
        for ours, theirs in _IN_A_BLOCK.items():
            names[f"blocks.{block}.{ours}.weight"] = tuple(f"model.layers.{block}.{one}.weight" for one in theirs)
    return names


def as_llama(weights: Mapping[str, FiledTensor], sizes: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """Return the tensors of a model under the names and in the shapes of `LlamaForCausalLM`.

    Args:
        weights: Every parameter of the model by its name.
        sizes: `transformer_config`.

    Raises:
        KeyError: A parameter is missing; it says which.
    """
    keys = _kv_heads(sizes) * (sizes["embedding_dim"] // sizes["num_heads"])
    found: dict[str, AnyTensor] = {}
    for ours, theirs in llama_names(sizes["num_blocks"], tied=sizes["tie_embeddings"]).items():
        rows = weights[ours].shape[0]
        cuts = {3: (0, rows - 2 * keys, rows - keys, rows), 2: (0, rows // 2, rows)}.get(len(theirs), (0, rows))
        for place, name in enumerate(theirs):
            is_whole = len(theirs) == 1
            found[name] = weights[ours] if is_whole else Rows(weights[ours], range(cuts[place], cuts[place + 1]))
    return found


def _kv_heads(sizes: Mapping[str, Any]) -> int:
    return int(sizes["num_kv_heads"] or sizes["num_heads"])


def llama_config(sizes: Mapping[str, Any], *, vocabulary: int) -> dict[str, Any]:
    """Return the content of `config.json` for a model of ours; positions are said as versions before 5 read them, too.

    Args:
        sizes: `transformer_config`.
        vocabulary: Rows of the embedding.
    """
    scaling = sizes["rope_scaling"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "max_position_embeddings": max(sizes["max_sequence_length"], sizes.get("max_position_embeddings") or 0),
        "hidden_size": sizes["embedding_dim"],
        "intermediate_size": sizes["mlp_dim"] or 4 * sizes["embedding_dim"],
        "num_hidden_layers": sizes["num_blocks"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": _kv_heads(sizes),
        "head_dim": sizes["embedding_dim"] // sizes["num_heads"],
        "rms_norm_eps": sizes["norm_epsilon"],
        "rope_theta": sizes["rope_theta"],
        "rope_scaling": scaling and _scaling_of(scaling),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": sizes["tie_embeddings"],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
        "use_cache": True,
    }


def _scaling_of(scaling: Mapping[str, Any]) -> dict[str, Any]:
    others = {key: scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
    return {"rope_type": _SCALED, **others, "original_max_position_embeddings": scaling["original_length"]}


@record
class LlamaConfig:
    """The keys of `config.json` on which the values of a Llama depend, with the values that it has where they are missing."""

    vocab_size: Count = 32000
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: Word = "silu"
    max_position_embeddings: Count = 2048
    rms_norm_eps: Amount = 1e-6
    tie_word_embeddings: Flag = False
    attention_bias: Flag = False
    mlp_bias: Flag = False
    rope_interleaved: Flag = False
    rope_theta: Amount | None = None
    rope_scaling: Json = None
    rope_parameters: Json = None


@record
class _Rope:
    """What `rope_parameters`, or `rope_scaling` of older versions, says about positions."""

    rope_type: Word | None = None
    type: Word | None = None
    rope_theta: Amount | None = None
    partial_rotary_factor: Amount = 1.0
    factor: Amount = 1.0
    low_freq_factor: Amount = 1.0
    high_freq_factor: Amount = 4.0
    original_max_position_embeddings: Count | None = None


def parse_llama_config(content: Mapping[str, Any]) -> tuple[LlamaConfig, dict[str, Any]]:
    """Return the configuration of a Llama that `model_type: llama` computes, with our keys of its positions.

    Raises:
        PretrainedError: A value is of another kind, or the model computes something else; every reason.
    """
    config = parse(LlamaConfig, dict(content))
    if isinstance(config, BadRecord):
        raise PretrainedError(f"{CONFIG}: {config.reason}")
    reasons = list(_other_computation(config))
    positions, others = _positions(config)
    if not 2 <= config.max_position_embeddings <= _LONGEST_TEXT:  # noqa: PLR2004 - the bounds of our key
        longest = config.max_position_embeddings
        reasons.append(f"{CONFIG}: `max_position_embeddings` is {longest}, expected 2 to {_LONGEST_TEXT}")
    if reasons or others:
        raise PretrainedError(*reasons, *others)
    return config, positions


def _other_computation(config: LlamaConfig) -> Iterator[str]:
    """Yield each key by which a model computes other values than ours would with its weights."""
    heads, width = config.num_attention_heads, config.hidden_size
    if config.hidden_act != "silu":
        yield f"{CONFIG}: `hidden_act` is {shown(repr(config.hidden_act))}, and ours has only silu"
    if not heads or width % heads:
        yield f"{CONFIG}: `num_attention_heads` is {heads}, which does not divide `hidden_size`, {width}"
    elif config.head_dim not in {None, width // heads}:
        yield f"{CONFIG}: `head_dim` is {config.head_dim}, and ours is `hidden_size` / `num_attention_heads`, {width // heads}"
    elif width // heads % 2:
        yield f"{CONFIG}: a head is {width // heads} wide, and positions turn pairs of values"
    shared = heads if config.num_key_value_heads is None else config.num_key_value_heads
    if heads and (not shared or heads % shared):
        yield f"{CONFIG}: `num_key_value_heads` is {shared}, which does not divide `num_attention_heads`, {heads}"
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key):
            yield f"{CONFIG}: `{key}` is true, and ours has no biases"
    if config.rope_interleaved:
        yield f"{CONFIG}: `rope_interleaved` is true, and ours turns a value with the one half a head away"
    if not 0 < config.rms_norm_eps < 1:
        yield f"{CONFIG}: `rms_norm_eps` is {config.rms_norm_eps}, expected a number between 0 and 1"


def _positions(config: LlamaConfig) -> tuple[dict[str, Any], list[str]]:
    """Return our keys of the positions, and why ours are others."""
    key = "rope_scaling" if config.rope_parameters is None else "rope_parameters"
    said = config.rope_scaling if config.rope_parameters is None else config.rope_parameters
    rope = _Rope() if said is None else parse(_Rope, said)
    if isinstance(rope, BadRecord):
        return {}, [f"{CONFIG}: `{key}`: {rope.reason}"]
    kind = rope.rope_type or rope.type or _PLAIN
    theta = next((one for one in (rope.rope_theta, config.rope_theta) if one is not None), 10_000.0)
    reasons = []
    if kind not in {_PLAIN, _SCALED}:
        reasons.append(f"{CONFIG}: `{key}` is of type {shown(repr(kind))}, and ours has only `default` and `llama3`")
    if rope.partial_rotary_factor != 1:
        reasons.append(f"{CONFIG}: `partial_rotary_factor` is {rope.partial_rotary_factor}, and ours turns whole heads")
    if not 1 <= theta <= 1e12:  # noqa: PLR2004 - the bounds of our key
        reasons.append(f"{CONFIG}: `rope_theta` is {theta}, expected a number from 1 to 1e12")
    positions: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": None}
    if kind == _SCALED:
        reasons += _wrong_scaling(rope, key)
        scaling = {name: float(getattr(rope, name)) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        length = rope.original_max_position_embeddings or config.max_position_embeddings
        positions["rope_scaling"] = {**scaling, "original_length": length}
    return positions, reasons


def _wrong_scaling(rope: _Rope, key: str) -> Iterator[str]:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if not 0 < low < high:
        yield f"{CONFIG}: `{key}` has `low_freq_factor` {low} and `high_freq_factor` {high}, expected the first to be smaller"
    if rope.factor < 1:
        yield f"{CONFIG}: `{key}` has `factor` {rope.factor}, expected at least 1"


def sizes_of_llama(config: LlamaConfig, positions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `transformer_config` that make a model of these sizes; how long its texts are is a matter of training."""
    return {
        "num_blocks": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "embedding_dim": config.hidden_size,
        "mlp_dim": config.intermediate_size,
        "tie_embeddings": config.tie_word_embeddings,
        "norm_epsilon": float(config.rms_norm_eps),
        "max_position_embeddings": config.max_position_embeddings,
        **positions,
    }


def llama_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name in transformers, as the configuration says."""
    width, inside = config.hidden_size, config.intermediate_size
    keys = (config.num_key_value_heads or config.num_attention_heads) * (width // config.num_attention_heads)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, width)
    matrices: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inside, width),
        "mlp.up_proj": (inside, width),
        "mlp.down_proj": (width, inside),
    }
    for block in range(config.num_hidden_layers):
        found |= {f"model.layers.{block}.{name}.weight": shape for name, shape in matrices.items()}
    return found


def without_llama_buffers(tensors: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
    """Return the parameters of a Llama under the names that they have in the model with its head."""
    if not any(name.startswith(_BASE) for name in tensors):
        tensors = {name if name.startswith("lm_head.") else _BASE + name: one for name, one in tensors.items()}
    return {name: one for name, one in tensors.items() if not _BUFFER.match(name)}


def mixed_types(tensors: Mapping[str, AnyTensor], config: LlamaConfig) -> Iterator[str]:
    """Yield each group of matrices that are one with us, and have values of different types."""
    for names in llama_names(config.num_hidden_layers, tied=config.tie_word_embeddings).values():
        types = sorted({tensors[name].dtype for name in names if name in tensors})
        if len(types) > 1:
            yield f"tensors {', '.join(f'`{name}`' for name in names)} are one matrix with us, and have types {', '.join(types)}"


def from_llama(tensors: Mapping[str, AnyTensor], config: LlamaConfig) -> dict[str, AnyTensor]:
    """Return the tensors of a Llama under our names and in our shapes; they must be those of `llama_shapes`."""
    names = llama_names(config.num_hidden_layers, tied=config.tie_word_embeddings)
    return {
        ours: tensors[theirs[0]] if len(theirs) == 1 else StackedRows(tuple(tensors[name] for name in theirs))
        for ours, theirs in names.items()
    }
