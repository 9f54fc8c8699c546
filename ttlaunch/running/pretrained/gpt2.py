"""GPT-2 in a folder of Hugging Face's transformers: what its configuration says, and how it names and turns our tensors.

`model_type: gpt` is GPT-2 but for two things, and the configuration can say both: GELU is the exact one (`gelu`, not
`gelu_new`), and the head has a matrix of its own unless `tie_embeddings` says otherwise. The matrices inside blocks are
transposed, because transformers computes them with `Conv1D`, whose weight has a row for each input.

Source: transformers, `models/gpt2/modeling_gpt2.py` and `configuration_gpt2.py`.
"""

from collections.abc import Mapping
from typing import Any

from ttlaunch.running.checkpoints.tensor_file import FiledTensor, Transposed

NORM_EPSILON = 1e-5
"""What a layer norm adds to a variance; torch's default, with which models of ours are trained."""

_HEAD = "head.output.weight"
_AROUND_BLOCKS = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    _HEAD: "lm_head.weight",
}
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


def as_gpt2(weights: Mapping[str, FiledTensor], *, num_blocks: int, tied: bool) -> dict[str, FiledTensor | Transposed]:
    """Return the tensors of a model under the names and in the shapes of `GPT2LMHeadModel`.

    Raises:
        KeyError: A parameter is missing; it says which.
    """
    return {
        theirs: Transposed(weights[ours]) if turned else weights[ours]
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
        "activation_function": "gelu",
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
