"""Export the model of a checkpoint, with its tokenizer, as a folder that transformers loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.app.find_start import search_checkpoint
from ttlaunch.app.serve import find_alphabet, find_named_tokenizer, read_section, whole_weights
from ttlaunch.diagnostics import Diagnostic, LaunchError, file_error, shown, usage_error
from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.running.checkpoints.resume import Checkpoint
    from ttlaunch.running.checkpoints.tensor_file import FiledTensor


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        step: The step of the checkpoint.
        tensors: The number of tensors in the model's file.
        warnings: What is to be said about the checkpoint.
    """

    step: int
    tensors: int
    warnings: tuple[Diagnostic, ...]


def export_folder(run: str, folder: Path, *, averaged: bool, runs_dir: Path, working_folder: Path) -> Exported:
    """Write the newest checkpoint's model as a folder of transformers' `GPT2LMHeadModel` or `LlamaForCausalLM`.

    Args:
        run: `latest`, a run, or the path of a checkpoint.
        folder: The folder to write, which must not exist.
        averaged: Take the average over the training.
        runs_dir: The folder of runs.
        working_folder: The folder to which relative paths are relative.

    Raises:
        LaunchError: There is no such checkpoint, transformers has no model like it, or the folder cannot be written.
    """
    from ttlaunch.running.pretrained.write_folder import write_model_folder

    checkpoint, found = search_checkpoint(run, runs_dir=working_folder / runs_dir, working_folder=working_folder)
    if checkpoint is None:
        raise LaunchError(found)
    kind, weights, sizes = _model_of(checkpoint, averaged=averaged)
    vocabulary = weights["embedding.token.weight"].shape[0]
    texts, more = _texts_of_tokenizer(checkpoint, working_folder, vocabulary=vocabulary)
    try:
        write_model_folder(folder, weights, model_type=kind, sizes=sizes, texts=texts, more=more)
    except OSError as error:
        source = next((one.path for one in weights.values() if str(one.path) == error.filename), None)
        raise file_error(source or folder, error, verb="read" if source else "written") from error
    return Exported(checkpoint.step, len(weights), tuple(found))


def _model_of(checkpoint: "Checkpoint", *, averaged: bool) -> "tuple[str, dict[str, FiledTensor], Mapping[str, Any]]":
    """Return the type of a model that transformers has, its weights by name, and its sizes.

    Raises:
        LaunchError: It has no such model, or the checkpoint lacks a part of it.
    """
    from ttlaunch.running.checkpoints.tensor_difference import read_weights
    from ttlaunch.running.pretrained.gpt2 import gpt2_names
    from ttlaunch.running.pretrained.llama import llama_names

    config = checkpoint.manifest["config"]
    kind, sizes = read_section(config, "training_config")["model_type"], read_section(config, "transformer_config")
    if kind not in {"gpt", "llama"}:
        message = f"the checkpoint's model is of `model_type: {shown(kind)}`, and transformers has no model like it"
        raise usage_error(message, "without `--as hf`, a file with the weights under their own names is written")
    if averaged and not read_weights(checkpoint.path, averaged=True):
        hint = "`sync_ps` keeps one with `--set sync_ps_config.polyak_interval=10`"
        raise usage_error(f"the checkpoint of step {checkpoint.step} has no average of the weights", hint)
    weights = whole_weights(checkpoint, blocks=sizes["num_blocks"], averaged=averaged)
    names_of = llama_names if kind == "llama" else gpt2_names
    names = names_of(sizes["num_blocks"], tied=sizes["tie_embeddings"])
    missing = [name for name in names if name not in weights]
    if missing:
        message = f"the checkpoint has no whole model: it lacks `{missing[0]}`"
        raise usage_error(message, "`ttlaunch weights show` lists what it has")
    return kind, {name: weights[name] for name in names}, sizes


def _texts_of_tokenizer(
    checkpoint: "Checkpoint", working_folder: Path, *, vocabulary: int
) -> "tuple[dict[str, Mapping[str, Any] | bytes], dict[str, Mapping[str, Any]]]":
    """Return the files of the tokenizer by name, that came with the model or is ours, and by file what is said of its tokens.

    Raises:
        LaunchError: As `_tokenizer_of`; or the tokenizer of the training is gone or has changed.
    """
    training = read_section(checkpoint.manifest["config"], "training_config")
    found = find_named_tokenizer(training, working_folder)
    if found is None:
        return {"tokenizer.json": _tokenizer_of(checkpoint, working_folder, vocabulary=vocabulary)}, {}
    try:
        content = found.path.read_bytes()
    except OSError as error:
        raise file_error(found.path, error, verb="read") from error
    texts: dict[str, Mapping[str, Any] | bytes] = {"tokenizer.json": content}
    if found.template is not None:
        texts["chat_template.jinja"] = found.template.encode()
    ends: dict[str, Any] = {"eos_token_id": found.ends[0]} if found.ends else {}
    return texts, {"tokenizer_config.json": found.special, "generation_config.json": ends, "config.json": ends}


def _tokenizer_of(checkpoint: "Checkpoint", working_folder: Path, *, vocabulary: int) -> dict[str, Any]:
    """Return the content of `tokenizer.json`.

    Raises:
        LaunchError: The text whose characters are the tokens is gone, or the model has another number of tokens.
    """
    from ttlaunch.running.pretrained.tokenizer_json import tokenizer_json

    config = checkpoint.manifest["config"]
    training = read_section(config, "training_config")
    # A model of generated sequences has ids, whatever the key of texts says.
    drawn = read_section(config, "data_config")["source"] == "markov"
    kind = "ids" if drawn else training["tokenizer_type"]
    alphabet = find_alphabet(checkpoint, training, working_folder) if kind == "char" else []
    try:
        return tokenizer_json(kind, vocabulary=vocabulary, alphabet=alphabet)
    except ValueError as error:
        raise usage_error(f"the checkpoint has no tokenizer to write: {error}", "leave `--as hf` out") from error
