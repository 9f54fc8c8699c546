"""A GGUF file as the folder of transformers that it was made from: its configuration, names and turned matrices, its tokenizer.

The file may come from anybody. Its header is read by a limited child, which checks every place in it against the file;
quantised values are computed by another one, a tensor at a time, when they are written.

Source: llama.cpp, `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py`; the format, ggml's `docs/gguf.md`.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from ttlaunch.diagnostics import closest, listed, shown
from ttlaunch.records.parser import BadRecord, Count, Size, Value, Word, load, parse, record
from ttlaunch.records.regular_files import open_regular
from ttlaunch.running.checkpoints.derived_tensors import Rows, Transposed
from ttlaunch.running.checkpoints.tensor_file import Extent, StoredTensor
from ttlaunch.running.pretrained.read_folder import PretrainedError
from ttlaunch.untrusted.child import CPU_S, Child, UntrustedError, read_limited

MAGIC = b"GGUF"
PLAIN = ("F32", "F16", "BF16")
"""Types whose values are taken with their bits; those of the others are computed."""
_LARGEST_TOKENIZER = 64 * 2**20
_BYTES_A_CPU_SECOND = 4 * 2**20
"""Bytes of quantised values that any machine computes in a second of processor time."""

_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_TURNED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
_LLAMA = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_A_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.([a-z_]+)\.(weight|bias)\Z")
_AROUND_BLOCKS = re.compile(r"([a-z_]+)\.(weight|bias)\Z")


@record
class _Header:
    """What the limited child says of a file."""

    values: dict[str, Value]
    lists: dict[str, Count]
    tensors: tuple[tuple[Word, tuple[Count, ...], Word, Size, Size], ...]


class ValueReader:
    """The child that computes the values of a file's quantised tensors; inside a `with` block, one for all of them."""

    def __init__(self, path: Path, *, quantised_bytes: int) -> None:
        self._path, self._cpu_s = path, CPU_S + quantised_bytes // _BYTES_A_CPU_SECOND
        self._child: Child | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._file = open_regular(self._path)
        try:
            self._child = Child("gguf-values", file=self._file, cpu_s=self._cpu_s)
        except OSError:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._child and self._file:
            self._child.close()
            self._file.close()
        self._child = self._file = None

    def values(self, kind: str, extents: list[Extent], *, size: int) -> Iterator[bytes]:
        """Yield the values of parts of the file as float32, `size` bytes of them.

        Raises:
            OSError: The file cannot be read, or not as a GGUF.
            UntrustedError: A limit was reached, or a library is missing.
        """
        if self._child is None:
            with self:
                yield from self.values(kind, extents, size=size)
            return
        self._child.send({"kind": kind, "parts": [[one.start, one.end] for one in extents]})
        yield from self._child.pieces(size)


@dataclass(frozen=True)
class Dequantised:
    """A quantised tensor, whose values are computed when they are wanted.

    Attributes:
        source: The stored blocks, in the order of the values; its type is that of the blocks.
        reader: Who computes them.
    """

    source: StoredTensor | Rows
    reader: ValueReader = field(compare=False)
    dtype: str = "F32"

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def size(self) -> int:
        """The number of bytes of the values."""
        return 4 * math.prod(self.shape)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the values.

        Raises:
            OSError: The file cannot be read.
            UntrustedError: The values cannot be computed.
        """
        return self.reader.values(self.source.dtype, self.source.extents(), size=self.size)


GgufTensor = StoredTensor | Rows | Dequantised | Transposed


@dataclass(frozen=True)
class GgufModel:
    """A model that a GGUF has, in the words of transformers.

    Attributes:
        config: The content of `config.json`.
        tensors: By their names in transformers; what no model of its kind has keeps its name.
        quantised: By type the number of tensors whose values are computed.
        reader: Who computes them; a context.
        template: The chat template; None without one.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    quantised: Mapping[str, int]
    reader: ValueReader
    template: str | None


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF does, or has the name of one.

    Raises:
        OSError: The file cannot be read.
    """
    if path.is_dir():
        return False
    with open_regular(path, follow=True) as file:
        return file.read(len(MAGIC)) == MAGIC or path.suffix == ".gguf"


def read_gguf(path: Path) -> GgufModel:
    """Read what a file says about its model; values stay in the file.

    Raises:
        OSError: The file cannot be read.
        PretrainedError: It is no GGUF, or its model is not known here.
    """
    place = Path(os.path.realpath(path))
    try:
        with open_regular(place) as file:
            header = parse(_Header, load(read_limited("gguf-header", {}, file=file)))
    except UntrustedError as error:
        raise PretrainedError(f"{path.name}: {error}") from error
    if isinstance(header, BadRecord):
        raise PretrainedError(f"{path.name}: {header.reason}")
    architecture = header.values.get("general.architecture")
    if architecture not in _KINDS:
        nearest = closest(architecture, list(_KINDS)) if isinstance(architecture, str) else None
        said = f"; did you mean `{nearest}`?" if nearest else ""
        known = "missing" if architecture is None else shown(repr(architecture))
        raise PretrainedError(
            f"{path.name}: `general.architecture` is {known}, and only {listed(_KINDS)} are read{said}",
            repair=f"take the GGUF file of a model whose architecture is {listed(_KINDS)}",
        )
    stored = {
        name: StoredTensor(place, kind, tuple(shape), start, end, name)
        for name, shape, kind, start, end in header.tensors
    }
    quantised = Counter(one.dtype for one in stored.values() if one.dtype not in PLAIN)
    total = sum(one.size for one in stored.values() if one.dtype not in PLAIN)
    reader = ValueReader(place, quantised_bytes=total)
    keys = _Keys(path.name, str(architecture), header=header, stored=stored)
    config, tensors = _KINDS[str(architecture)](keys, reader)
    template = header.values.get("tokenizer.chat_template")
    return GgufModel(config, tensors, quantised, reader, template if isinstance(template, str) else None)


def read_gguf_tokenizer(path: Path) -> tuple[dict[str, str], bytes]:
    """Return the special tokens of a file's tokenizer, and the content of its `tokenizer.json`.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: Its tokenizer is of a kind that is not converted.
    """
    with open_regular(path, follow=True) as file:
        answer = read_limited("gguf-tokenizer", {}, file=file, most=_LARGEST_TOKENIZER)
    first, _, content = answer.partition(b"\n")
    special: dict[str, str] = json.loads(first)
    return special, content


class _Keys:
    """The keys of a header that belong to its architecture."""

    def __init__(self, file: str, kind: str, *, header: _Header, stored: dict[str, StoredTensor]) -> None:
        self.file, self.kind, self.header, self.stored = file, kind, header, stored

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of the model."""
        return int(self._number(key, (int,), default))

    def decimal(self, key: str, default: float | None = None) -> float:
        """Return a decimal number as it was before it became a float32."""
        return shortest(float(self._number(key, (int, float), default)))

    def text(self, key: str) -> str | None:
        value = self.header.values.get(f"{self.kind}.{key}")
        return value if isinstance(value, str) else None

    def _number(self, key: str, kinds: tuple[type, ...], default: float | None) -> Any:
        name = f"{self.kind}.{key}"
        if name in self.header.lists:
            raise PretrainedError(f"{self.file}: `{name}` is a list, and one number for all blocks is taken")
        value = self.header.values.get(name, default)
        if value is None:
            raise PretrainedError(f"{self.file}: `{name}` is missing")
        if type(value) not in kinds or not 0 <= value <= 2**53:  # type: ignore[operator]  # it is a number
            raise PretrainedError(f"{self.file}: `{name}` is {shown(repr(value))}, and no number that a model has")
        return value

    def tokens(self) -> dict[str, int | None]:
        """Return the ids of the tokens that begin and end a text, by their keys in `config.json`."""
        names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        found = {name: self.header.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
        return {name: value if type(value) is int else None for name, value in found.items()}

    def vocabulary(self) -> int:
        """Return the rows of the embedding."""
        embedding = self.stored.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:  # noqa: PLR2004 - a matrix
            raise PretrainedError(f"{self.file}: tensor `token_embd.weight` is missing, or no matrix")
        return embedding.shape[0]


def shortest(value: float) -> float:
    """Return the decimal number with the fewest digits that is the same float32.

    >>> shortest(9.999999747378752e-06)
    1e-05
    """
    if not math.isfinite(value) or abs(value) > 1e38:  # noqa: PLR2004 - the largest float32 is 3.4e38
        return value
    bits = struct.pack("<f", value)
    return next(
        (short for digits in range(1, 10) if struct.pack("<f", short := float(f"{value:.{digits}g}")) == bits), value
    )


def _gpt2(keys: _Keys, reader: ValueReader) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    width, wide = keys.count("embedding_length"), keys.count("feed_forward_length", 0)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "vocab_size": keys.vocabulary(),
        "n_positions": keys.count("context_length"),
        "n_embd": width,
        "n_layer": keys.count("block_count"),
        "n_head": keys.count("attention.head_count"),
        "n_inner": None if wide in {0, 4 * width} else wide,
        "layer_norm_epsilon": keys.decimal("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in keys.stored,
        **keys.tokens(),
    }
    tensors: dict[str, GgufTensor] = {}
    for name, stored in keys.stored.items():
        theirs = _theirs(name, _GPT2, _GPT2_BLOCK, blocks="transformer.h")
        match = _IN_A_BLOCK.match(name)
        turned = match and match[2] in _GPT2_TURNED and match[3] == "weight" and len(stored.shape) == 2  # noqa: PLR2004
        tensor = _values_of(stored, reader)
        tensors[theirs] = Transposed(tensor) if turned else tensor
    return config, tensors


def _llama(keys: _Keys, reader: ValueReader) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if not heads:
        raise PretrainedError(f"{keys.file}: `llama.attention.head_count` is 0")
    shared, rotated = keys.count("attention.head_count_kv", heads), keys.count("rope.dimension_count", width // heads)
    reasons = list(_other_llama(keys, rotated, keys.count("attention.key_length", rotated)))
    if reasons:
        raise PretrainedError(*reasons)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": keys.vocabulary(),
        "max_position_embeddings": keys.count("context_length"),
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": rotated,
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.decimal("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in keys.stored,
        **keys.tokens(),
    }
    tensors: dict[str, GgufTensor] = {}
    for name, stored in keys.stored.items():
        theirs = _theirs(name, _LLAMA, _LLAMA_BLOCK, blocks="model.layers")
        match = _IN_A_BLOCK.match(name)
        exchanged = {"attn_q": heads, "attn_k": shared}.get(match[2]) if match and match[3] == "weight" else None
        rows = _in_halves(stored, exchanged, file=keys.file) if exchanged is not None else None
        tensors[theirs] = _values_of(Rows(stored, rows) if rows else stored, reader)
    return config, tensors


def _other_llama(keys: _Keys, rotated: int, width: int) -> Iterator[str]:
    """Yield why a model of this name computes something else than plain rotary attention and one feed-forward layer."""
    if keys.text("rope.scaling.type") not in {None, "none"}:
        yield f"{keys.file}: `llama.rope.scaling.type` is {shown(repr(keys.text('rope.scaling.type')))}, and scaled positions are not read"
    if "rope_freqs.weight" in keys.stored:
        yield f"{keys.file}: tensor `rope_freqs.weight` scales positions as Llama 3.1 does, and scaled positions are not read"
    if keys.count("expert_count", 0):
        yield f"{keys.file}: `llama.expert_count` is {keys.count('expert_count')}, and mixtures of experts are not read"
    if rotated != width:
        yield f"{keys.file}: `llama.rope.dimension_count` is {rotated}, and a head has {width} values; only whole heads are rotated"


def _in_halves(stored: StoredTensor, heads: int, *, file: str) -> tuple[int, ...]:
    """Return the order in which transformers has the rows: the two values that are rotated together are half a head apart.

    A GGUF has them side by side.
    """
    rows = stored.shape[0]
    if not heads or rows % (2 * heads):
        raise PretrainedError(
            f"{file}: tensor `{shown(stored.name)}` has {rows} rows, which are no {heads} heads of pairs"
        )
    head = rows // heads
    return tuple(at * head + 2 * pair + half for at in range(heads) for half in range(2) for pair in range(head // 2))


def _values_of(stored: StoredTensor | Rows, reader: ValueReader) -> StoredTensor | Rows | Dequantised:
    return stored if stored.dtype in PLAIN else Dequantised(stored, reader)


def _theirs(name: str, around: Mapping[str, str], block: Mapping[str, str], *, blocks: str) -> str:
    """Return the name of a tensor in transformers; one that the architecture does not have stays as it is."""
    match = _IN_A_BLOCK.match(name)
    if match and match[2] in block:
        return f"{blocks}.{int(match[1])}.{block[match[2]]}.{match[3]}"
    match = _AROUND_BLOCKS.match(name)
    return f"{around[match[1]]}.{match[2]}" if match and match[1] in around else name


_KINDS = {"gpt2": _gpt2, "llama": _llama}
