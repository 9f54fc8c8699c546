"""Write a folder with a model of ours that Hugging Face's transformers loads as GPT-2."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttlaunch.running.checkpoints.tensor_file import FiledTensor, write_tensors
from ttlaunch.running.pretrained.gpt2 import as_gpt2, gpt2_config

_FOLDER_MODE = 0o755
_EMBEDDING = "embedding.token.weight"


def write_gpt2_folder(
    folder: Path, weights: Mapping[str, FiledTensor], *, sizes: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> None:
    """Write configuration, weights, tokenizer and settings of generation; the folder appears complete or not at all.

    Args:
        folder: It must not exist.
        weights: Every parameter of the model by its name.
        sizes: `transformer_config`.
        tokenizer: The content of `tokenizer.json`.

    Cost: one matrix is in memory at a time.

    Raises:
        OSError: A file of a tensor cannot be read, or the folder cannot be written.
        KeyError: A parameter is missing; it says which.
    """
    tensors = as_gpt2(weights, num_blocks=sizes["num_blocks"], tied=sizes["tie_embeddings"])
    generation = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "do_sample": False}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sizes["max_sequence_length"],
        "clean_up_tokenization_spaces": False,
    }
    texts = {
        "config.json": gpt2_config(sizes, vocabulary=weights[_EMBEDDING].shape[0]),
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(_FOLDER_MODE)
        write_tensors(unfinished / "model.safetensors", tensors, metadata={"format": "pt"})
        for name, content in texts.items():
            (unfinished / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
