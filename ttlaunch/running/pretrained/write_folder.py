"""Write a folder with a model that Hugging Face's transformers loads."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttlaunch.running.checkpoints.tensor_file import AnyTensor, FiledTensor, write_tensors
from ttlaunch.running.pretrained.gpt2 import as_gpt2, gpt2_config
from ttlaunch.running.pretrained.llama import as_llama, llama_config

_FOLDER_MODE = 0o755
_EMBEDDING = "embedding.token.weight"


def write_model_folder(
    folder: Path,
    weights: Mapping[str, FiledTensor],
    *,
    model_type: str,
    sizes: Mapping[str, Any],
    texts: Mapping[str, Mapping[str, Any] | bytes],
    more: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Write configuration, weights, tokenizer and settings of generation; the folder appears complete or not at all.

    Args:
        folder: It must not exist.
        weights: Every parameter of the model by its name.
        model_type: `gpt` or `llama`.
        sizes: `transformer_config`.
        texts: Further files by name: `tokenizer.json`, and the chat template if there is one.
        more: By the name of a file keys that it has besides.

    Cost: one matrix is in memory at a time.

    Raises:
        OSError: A file of a tensor cannot be read, or the folder cannot be written.
        KeyError: A parameter is missing; it says which.
    """
    vocabulary = weights[_EMBEDDING].shape[0]
    if model_type == "llama":
        config, tensors = llama_config(sizes, vocabulary=vocabulary), as_llama(weights, sizes)
    else:
        config = gpt2_config(sizes, vocabulary=vocabulary)
        tensors = as_gpt2(weights, num_blocks=sizes["num_blocks"], tied=sizes["tie_embeddings"])
    generation = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "do_sample": False}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sizes["max_sequence_length"],
        "clean_up_tokenization_spaces": False,
    }
    own = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer_config}
    write_folder(
        folder, tensors, {**texts, **{name: {**content, **more.get(name, {})} for name, content in own.items()}}
    )


def write_folder(
    folder: Path,
    tensors: Mapping[str, AnyTensor],
    texts: Mapping[str, Mapping[str, Any] | bytes],
    *,
    wrote: Callable[[int], object] = lambda _: None,
) -> None:
    """Write tensors and texts as a folder, which appears complete or not at all.

    Args:
        folder: It must not exist.
        tensors: By their names in the folder.
        texts: By the name of a file its content: bytes, or what JSON writes.
        wrote: Called with the number of bytes of each piece of a tensor that was written.

    Raises:
        OSError: A file of a tensor cannot be read, or the folder cannot be written.
    """
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(_FOLDER_MODE)
        write_tensors(unfinished / "model.safetensors", tensors, metadata={"format": "pt"}, wrote=wrote)
        for name, content in texts.items():
            data = content if isinstance(content, bytes) else _json(content)
            (unfinished / name).write_bytes(data)
        unfinished.rename(folder)
    except BaseException:  # also an interruption
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
