"""GPT-2 in a folder of Hugging Face's transformers: what its configuration says, and how it names and turns our tensors.

`model_type: gpt` is GPT-2, and the configuration says what may differ: the activation, and whether the head has a matrix of
its own. The matrices inside blocks are
transposed, because transformers computes them with `Conv1D`, whose weight has a row for each input.

Source: transformers, `models/gpt2/modeling_gpt2.py` and `configuration_gpt2.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ttlaunch.diagnostics import listed, shown
from ttlaunch.records.parser import BadRecord, Count, Flag, Number, Word, parse, record
from ttlaunch.running.checkpoints.derived_tensors import transposed
from ttlaunch.running.checkpoints.tensor_file import AnyTensor, FiledTensor
from ttlaunch.running.pretrained.read_folder import CONFIG, PretrainedError

NORM_EPSILON = 1e-5
"""What a layer norm adds to a variance; torch's default, with which models of ours are trained."""

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
"""Our name of each activation of theirs; two of theirs are the same function."""

_HEAD = "head.output.weight"
_AROUND_BLOCKS = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    _HEAD: "lm_head.weight",
}
_BASE = "transformer."
"""What the names of all tensors but the head's begin with, unless the model was saved without its head."""
_BUFFER = re.compile(r"transformer\.h\.[0-9]+\.attn\.(bias|masked_bias)\Z")
"""Tables of the causal mask, which older files contain and which nothing needs."""
_IN_A_BLOCK = {
    "attention_norm": "ln_1",
    "attention_in": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward_in": "mlp.c_fc",
    "feed_forward_out": "mlp.c_proj",
}


def gpt2_names(num_blocks: int, *, tied: bool) -> dict[str, tuple[str, bool]]:
    """Return by each parameter of ours its name in transformers, and whether its matrix is transposed there.

    Args:
        num_blocks: Blocks of the model.
        tied: Whether the head uses the matrix of the embedding; it is then stored only once.
    """
    names = {ours: (theirs, False) for ours, theirs in _AROUND_BLOCKS.items() if not (tied and ours == _HEAD)}
    for block in range(num_blocks):
        for ours, theirs in _IN_A_BLOCK.items():
            for kind in ("weight", "bias"):
                turned = kind == "weight" and not ours.endswith("norm")
                names[f"blocks.{block}.{ours}.{kind}"] = (f"transformer.h.{block}.{theirs}.{kind}", turned)
    return names


def as_gpt2(weights: Mapping[str, FiledTensor], *, num_blocks: int, tied: bool) -> dict[str, AnyTensor]:
    """Return the tensors of a model under the names and in the shapes of `GPT2LMHeadModel`.

    Raises:
        KeyError: A parameter is missing; it says which.
    """
    return {
        theirs: transposed(weights[ours]) if turned else weights[ours]
        for ours, (theirs, turned) in gpt2_names(num_blocks, tied=tied).items()
    }


def gpt2_config(sizes: Mapping[str, Any], *, vocabulary: int) -> dict[str, Any]:
    """Return the content of `config.json` for a model of ours.

    Args:
        sizes: `transformer_config`.
        vocabulary: Rows of the embedding.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": sizes.get("activation", "gelu"),  # checkpoints of before have none
        "vocab_size": vocabulary,
        "n_positions": sizes["max_sequence_length"],
        "n_embd": sizes["embedding_dim"],
        "n_layer": sizes["num_blocks"],
        "n_head": sizes["num_heads"],
        "n_inner": None,
        "layer_norm_epsilon": NORM_EPSILON,
        "embd_pdrop": sizes["dropout_prob"],
        "resid_pdrop": sizes["dropout_prob"],
        "attn_pdrop": 0.0,
        "tie_word_embeddings": sizes["tie_embeddings"],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
        "use_cache": True,
    }


@record
class Gpt2Config:
    """The keys of `config.json` on which the values of a GPT-2 depend, with the values that it has where they are missing."""

    vocab_size: Count = 50257
    n_positions: Count = 1024
    n_embd: Count = 768
    n_layer: Count = 12
    n_head: Count = 12
    n_inner: Count | None = None
    activation_function: Word = "gelu_new"
    layer_norm_epsilon: Number = NORM_EPSILON
    resid_pdrop: Number = 0.1
    embd_pdrop: Number = 0.1
    attn_pdrop: Number = 0.1
    tie_word_embeddings: Flag = True
    scale_attn_weights: Flag = True
    scale_attn_by_inverse_layer_idx: Flag = False
    reorder_and_upcast_attn: Flag = False
    add_cross_attention: Flag = False


def parse_gpt2_config(content: Mapping[str, Any]) -> Gpt2Config:
    """Return the configuration of a GPT-2 that `model_type: gpt` computes.

    Raises:
        PretrainedError: A value is of another kind, or the model computes something else; every reason.
    """
    config = parse(Gpt2Config, dict(content))
    if isinstance(config, BadRecord):
        raise PretrainedError(f"{CONFIG}: {config.reason}")
    reasons = list(_other_computation(config))
    if reasons:
        raise PretrainedError(*reasons)
    return config


def _other_computation(config: Gpt2Config) -> Iterator[str]:
    """Yield each key by which a model computes other values than ours would with its weights."""
    if config.activation_function not in ACTIVATIONS:
        yield (
            f"{CONFIG}: `activation_function` is {shown(repr(config.activation_function))}, and ours has only "
            f"{listed(ACTIVATIONS)}"
        )
    if config.layer_norm_epsilon != NORM_EPSILON:
        yield f"{CONFIG}: `layer_norm_epsilon` is {config.layer_norm_epsilon}, and ours is {NORM_EPSILON}"
    if config.n_inner not in (None, 4 * config.n_embd):
        yield f"{CONFIG}: `n_inner` is {config.n_inner}, and ours is 4 times `n_embd`, {4 * config.n_embd}"
    if not config.n_head or config.n_embd % config.n_head:
        yield f"{CONFIG}: `n_head` is {config.n_head}, which does not divide `n_embd`, {config.n_embd}"
    if not config.scale_attn_weights:
        yield f"{CONFIG}: `scale_attn_weights` is false, and ours scales them"
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if getattr(config, key):
            yield f"{CONFIG}: `{key}` is true, and ours has no such thing"


def sizes_of_gpt2(config: Gpt2Config) -> dict[str, Any]:
    """Return the keys of `transformer_config` that make a model of these sizes; dropout is a matter of training."""
    return {
        "num_blocks": config.n_layer,
        "num_heads": config.n_head,
        "embedding_dim": config.n_embd,
        "max_sequence_length": config.n_positions,
        "tie_embeddings": config.tie_word_embeddings,
        "activation": ACTIVATIONS[config.activation_function],
    }


def gpt2_shapes(config: Gpt2Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name in transformers, as the configuration says."""
    width, wide = config.n_embd, 4 * config.n_embd
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config.vocab_size, width),
        "transformer.wpe.weight": (config.n_positions, width),
        "transformer.ln_f.weight": (width,),
        "transformer.ln_f.bias": (width,),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, width)
    matrices = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, wide),
        "mlp.c_proj": (wide, width),
    }
    for block in range(config.n_layer):
        for name in ("ln_1", "ln_2"):
            found |= {f"transformer.h.{block}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
        for name, shape in matrices.items():
            found[f"transformer.h.{block}.{name}.weight"] = shape
            found[f"transformer.h.{block}.{name}.bias"] = shape[1:]
    return found


def without_buffers(tensors: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
    """Return the parameters of a GPT-2 under the names that they have in the model with its head."""
    if not any(name.startswith(_BASE) for name in tensors):
        tensors = {name if name.startswith("lm_head.") else _BASE + name: one for name, one in tensors.items()}
    return {name: one for name, one in tensors.items() if not _BUFFER.match(name)}


def from_gpt2(tensors: Mapping[str, AnyTensor], config: Gpt2Config) -> dict[str, AnyTensor]:
    """Return the tensors of a GPT-2 under our names and in our shapes; they must be those of `gpt2_shapes`."""
    names = gpt2_names(config.n_layer, tied=config.tie_word_embeddings)
    return {
        ours: transposed(tensors[theirs]) if turned else tensors[theirs] for ours, (theirs, turned) in names.items()
    }
