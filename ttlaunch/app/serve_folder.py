"""Turn a folder that transformers saved into the specification of a serving run, as `app/serve.py` does with a checkpoint.

Nobody has trained the model here, so the training that a serving run's configuration describes is the one that would begin
with the folder: in float32, with texts of as many tokens as are served. Ranks read the folder's files in place.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import counted, shown, usage_error
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.app.import_weights import Pretrained
    from ttlaunch.running.checkpoints.tensor_file import AnyTensor
    from ttlaunch.running.pretrained.read_tokenizer import FoundTokenizer

MOST_UNASKED = 4096
"""Tokens of a text unless `--max-context` is given: the memory for keys and values grows with them, and some models take a million."""
_CONFIG = "config.json"
_PREFIX = "hf:"
_KEY = "checkpoint_config"
_LONGEST = 300


@dataclass(frozen=True)
class FoundFolder:
    """A folder that can be served.

    Attributes:
        path: Its absolute path.
        model: What it holds.
        context: Tokens of a text.
        tokenizer: Keys of `serve_config` and `training_config` that say what its tokens are, by section.
    """

    path: Path
    model: "Pretrained"
    context: int
    tokenizer: Mapping[str, Mapping[str, Any]]


def is_model_of_others(where: str) -> bool:
    """Whether a path is that of a model as other libraries save it: a folder with a `config.json`, or a GGUF file."""
    from ttlaunch.running.pretrained.gguf import is_gguf

    try:
        return os.path.isfile(os.path.join(where, _CONFIG)) or is_gguf(Path(where))  # noqa: PTH113, PTH118 - never raise
    except (OSError, ValueError):  # no file, or a NUL in the path
        return False


def find_folder(where: str, *, max_context: int | None) -> FoundFolder:
    """Check the model and the tokenizer of a folder.

    Args:
        where: Its path.
        max_context: Tokens of a text; None for as many as the model was made for, up to `MOST_UNASKED`.

    Raises:
        LaunchError: It has no model that can be served; every reason.
    """
    from ttlaunch.app.import_weights import find_pretrained

    model, path = find_pretrained(where), shown(where, longest=_LONGEST)
    if model.gguf is not None:
        hint = f"`ttlaunch weights import {path} DIR --as hf` makes a folder of it, which `ttlaunch serve DIR` serves"
        raise usage_error(f"{path} is a GGUF file, and ranks read the tensors of a folder of transformers", hint)
    context = max_context or min(model.context, MOST_UNASKED)
    if context > model.context:
        message = f"`--max-context {context}` exceeds the {counted(model.context, 'token')} for which the model in {path} was made"
        raise usage_error(message, f"`--max-context {model.context}` is the most")
    return FoundFolder(Path(where).resolve(), model, context, _tokenizer_of(Path(where), model))


def sections_of(found: FoundFolder) -> dict[str, Mapping[str, Any]]:
    """Return the sections of the configuration, besides `serve_config`, that describe a folder's model."""
    length = found.model.sizes.get("max_sequence_length", found.context)
    return {
        "training_config": {"model_type": found.model.model_type, **found.tokenizer["training_config"]},
        "transformer_config": {**found.model.sizes, "max_sequence_length": length},
        "device_config": {},
        _KEY: {"interval": None, "initial_weights": f"{_PREFIX}{found.path}"},
    }


def folder_of_spec(spec: RunSpec) -> Path | None:
    """Return the folder that a serving run's specification names; None if it serves a checkpoint."""
    start = f"{_KEY}="
    text = next((one for one in spec.overrides if one.startswith(start)), None)
    if text is None:
        return None
    return Path(str(json.loads(text.removeprefix(start))["initial_weights"]).removeprefix(_PREFIX))


def weights_of_folder(folder: Path) -> "Mapping[str, AnyTensor]":
    """Return the tensors of a folder under our names.

    Raises:
        LaunchError: It has changed, and has no model any more.
    """
    from ttlaunch.app.import_weights import find_pretrained

    return find_pretrained(str(folder)).weights


_WITHOUT = {
    "tokenizer": "copy `tokenizer.json` again from where the model comes from; without it, tokens are numbers",
    "chat template": "copy it again from where the model comes from; without it, chats are told in plain lines",
}


def _tokenizer_of(folder: Path, model: "Pretrained") -> dict[str, dict[str, Any]]:
    """Return the keys about a folder's tokenizer; without one, tokens are numbers.

    Raises:
        LaunchError: It has one that is not taken.
    """
    from ttlaunch.app.tokenized_data import EXTRA, is_byte_tokenizer
    from ttlaunch.running.pretrained.read_folder import PretrainedError
    from ttlaunch.running.pretrained.read_tokenizer import TEMPLATE, TOKENIZER, has_template, read_tokenizer

    try:
        if not (folder / TOKENIZER).exists():
            return {"training_config": {"tokenizer_type": "ids"}, "serve_config": {}}
        if is_byte_tokenizer(folder) and not has_template(folder):  # our own texts of chats need no template
            return {"training_config": {"tokenizer_type": "byte"}, "serve_config": {}}
        found = read_tokenizer(folder)
    except (OSError, PretrainedError) as error:
        reason = system_reason(error)
        part = "chat template" if TEMPLATE in reason or "chat template" in reason else "tokenizer"
        message = f"{shown(folder, longest=_LONGEST)} has a {part} that is not taken: {reason}"
        raise usage_error(message, EXTRA if "not installed" in reason else _WITHOUT[part]) from error
    if found.vocabulary > model.vocabulary:
        message = f"the tokenizer has {found.vocabulary:,} tokens, and the model {model.vocabulary:,}"
        raise usage_error(f"{shown(folder, longest=_LONGEST)}: {message}")
    return {"training_config": {"tokenizer_type": "ids"}, "serve_config": keys_of_tokenizer(found)}


def keys_of_tokenizer(found: "FoundTokenizer") -> dict[str, Any]:
    """Return the keys of `serve_config` that name a tokenizer and a chat template of others."""
    return {
        "tokenizer_file": str(found.path.resolve()),
        "tokenizer_sha256": found.sha256,
        "ends": list(found.ends),
        "chat_template": found.template,
        "special_tokens": dict(found.special),
    }
