"""Small GGUF files, made by the writer of the `gguf` package: GPT-2 and Llama with random values."""

import gguf
import numpy as np

WIDTH, BLOCKS, TOKENS, HEADS, WIDE = 64, 2, 300, 4, 256
LENGTH = 1024
"""What transformers expects of a GPT-2: it does not look at `context_length`."""
QUANTISED = {
    name: getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0")
}


def byte_characters():
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def add_tokenizer(writer, *, cut="gpt-2", model="gpt2", template=None):
    """A byte-pair encoding with a few merges, and special tokens at its end."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
    tokens = [*byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"unused{number}" for number in range(TOKENS - 2 - len(tokens))] + ["<|begin|>", "<|end|>"]
    writer.add_tokenizer_model(model)
    if cut is not None:
        writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([1] * (TOKENS - 2) + [3, 3])
    writer.add_bos_token_id(TOKENS - 2)
    writer.add_eos_token_id(TOKENS - 1)
    if template is not None:
        writer.add_chat_template(template)


def gpt2_arrays(draw):
    around = {"token_embd.weight": (TOKENS, WIDTH), "position_embd.weight": (LENGTH, WIDTH)}
    around |= {"output_norm.weight": (WIDTH,), "output_norm.bias": (WIDTH,)}
    inside = {
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        "attn_qkv": (3 * WIDTH, WIDTH),
        "attn_output": (WIDTH, WIDTH),
    }
    inside |= {"ffn_up": (4 * WIDTH, WIDTH), "ffn_down": (WIDTH, 4 * WIDTH)}
    for block in range(BLOCKS):
        for name, shape in inside.items():
            around |= {f"blk.{block}.{name}.weight": shape, f"blk.{block}.{name}.bias": shape[:1]}
    return {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in around.items()}


def llama_arrays(draw, *, shared=2):
    head = WIDTH // HEADS
    around = {"token_embd.weight": (TOKENS, WIDTH), "output_norm.weight": (WIDTH,), "output.weight": (TOKENS, WIDTH)}
    inside = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH)}
    inside |= {"attn_k": (head * shared, WIDTH), "attn_v": (head * shared, WIDTH)}
    inside |= {"ffn_up": (WIDE, WIDTH), "ffn_gate": (WIDE, WIDTH), "ffn_down": (WIDTH, WIDE)}
    around |= {f"blk.{block}.{name}.weight": shape for block in range(BLOCKS) for name, shape in inside.items()}
    return {name: draw.normal(0, 0.2, shape).astype(np.float32) for name, shape in around.items()}


def write_gguf(path, *, kind="gpt2", types=None, tokenizer=None, tokens=True, change=lambda writer: None, extra=None):
    """Write a model.

    Args:
        path: The file.
        kind: `gpt2` or `llama`.
        types: By the end of a matrix's name its type; others are F32.
        tokenizer: Arguments of `add_tokenizer`.
        tokens: Whether there is a tokenizer.
        change: Called with the writer before the file is written.
        extra: Further tensors.
    """
    draw = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_head_count(HEADS)
    if kind == "gpt2":
        writer.add_feed_forward_length(4 * WIDTH)
        writer.add_layer_norm_eps(1e-5)
        arrays = gpt2_arrays(draw)
    else:
        writer.add_feed_forward_length(WIDE)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_head_count_kv(2)
        writer.add_rope_dimension_count(WIDTH // HEADS)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(TOKENS)
        arrays = llama_arrays(draw)
    if tokens:
        add_tokenizer(writer, **(tokenizer or {}))
    change(writer)
    for name, values in {**arrays, **(extra or {})}.items():
        type_ = next((one for end, one in (types or {}).items() if end in name and values.ndim > 1), "F32")
        raw = gguf.quants.quantize(values, QUANTISED[type_])
        writer.add_tensor(name, raw, raw_dtype=QUANTISED[type_])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays
