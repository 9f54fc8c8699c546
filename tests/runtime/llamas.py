"""Random Llamas of transformers, and models of ours with their weights."""

import torch

from ttlaunch.recipe import TrainingFile
from ttlaunch.runtime.model.model import Model

VOCABULARY = 96
SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
SCALED |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def random_llama(**changes):
    """A model of transformers whose norms are not the ones of a new one."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - every process of pytest would import it

    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    torch.manual_seed(3)
    llama = LlamaForCausalLM(LlamaConfig(**{**sizes, "initializer_range": 0.1} | changes)).eval()
    for name, parameter in llama.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn(parameter.shape) * 0.1
    return llama


def ours_with_weights_of(llama):
    """Our model, and by our names what transformers has: matrices that ours joins stand one behind the other."""
    theirs = llama.config
    rope = theirs.rope_parameters
    sizes = {
        "embedding_dim": theirs.hidden_size,
        "mlp_dim": theirs.intermediate_size,
        "num_blocks": theirs.num_hidden_layers,
        "num_heads": theirs.num_attention_heads,
        "num_kv_heads": theirs.num_key_value_heads,
        "max_sequence_length": theirs.max_position_embeddings,
        "norm_epsilon": theirs.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "tie_embeddings": theirs.tie_word_embeddings,
    }
    if rope["rope_type"] == "llama3":
        sizes["rope_scaling"] = {key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        sizes["rope_scaling"]["original_length"] = rope["original_max_position_embeddings"]
    cfg = TrainingFile.model_validate({"training_config": {"model_type": "llama"}, "transformer_config": sizes})
    blocks = range(theirs.num_hidden_layers)
    model = Model(cfg, vocabulary=theirs.vocab_size, blocks=blocks, has_embedding=True, has_head=True)
    model.flatten(torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(theirs_of(llama, name, lambda one: one))
    return cfg, model


def theirs_of(llama, name, get):
    """What transformers has for a parameter of ours: the values, or what `get` makes of each of its own parameters."""
    within = {
        "attention_norm": ["input_layernorm"],
        "attention_in": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention_out": ["self_attn.o_proj"],
        "feed_forward_norm": ["post_attention_layernorm"],
        "feed_forward_in": ["mlp.gate_proj", "mlp.up_proj"],
        "feed_forward_out": ["mlp.down_proj"],
    }
    around = {
        "embedding.token.weight": "model.embed_tokens",
        "head.norm.weight": "model.norm",
        "head.output.weight": "lm_head",
    }
    if name in around:
        return get(llama.get_parameter(f"{around[name]}.weight"))
    _, block, layer, _ = name.split(".")
    return torch.cat([get(llama.get_parameter(f"model.layers.{block}.{one}.weight")) for one in within[layer]])
