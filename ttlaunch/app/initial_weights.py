"""Find the weights that a configuration names to begin with: a safetensors file, or `hf:` and a folder of transformers.

A folder also says the sizes of its model, so nobody has to copy them into the configuration. Its files are checked here,
before anything starts, and read by the ranks in place: each rank opens the shards that have tensors of its own.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ttlaunch.app.tokenized_data import EXTRA, folder_of, tokenizer_keys
from ttlaunch.diagnostics import Diagnostic, Label, LaunchError, shown
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.app.import_weights import Pretrained
    from ttlaunch.diagnostics import Span
    from ttlaunch.planning.recipe_plan import RecipeChoice
    from ttlaunch.running.checkpoints.tensor_file import AnyTensor, StoredTensor
    from ttlaunch.running.pretrained.read_folder import PretrainedError
    from ttlaunch.spec.recipe.config import LoadedConfig
    from ttlaunch.spec.recipe.declare import Recipe

_SIZES = "transformer_config"
_TYPE, _LENGTH = "training_config.model_type", f"{_SIZES}.max_sequence_length"
_KEY = "checkpoint_config.initial_weights"
_TOKENS = "training_config.tokenizer_type"
_OPTION = "--set"
"""The name of the source of values that an option gave."""
_LONGEST = 300
_BYTES = 256


def take_sizes(
    recipe: "Recipe", loaded: "LoadedConfig", working_folder: Path, *, is_own_file: bool
) -> "tuple[LoadedConfig, list[Diagnostic]]":
    """Return the configuration with the sizes of the folder's model, if it begins with one.

    A size that the user gave must be the folder's. With a mistake there is no configuration, as with one in a file.

    Args:
        recipe: The recipe of the configuration.
        loaded: The configuration as files and options say it.
        working_folder: The folder to which relative paths are relative.
        is_own_file: Whether the file is the recipe's own; then only options are the user's.
    """
    from ttlaunch.app.import_weights import find_pretrained
    from ttlaunch.running.pretrained.read_folder import PretrainedError
    from ttlaunch.spec.recipe.config import override_config

    folder = folder_of(loaded, working_folder)
    if folder is None:
        return loaded, []
    try:
        model = find_pretrained(str(folder))
    except LaunchError as error:
        return replace(loaded, config=None), _at_the_key(error, loaded)
    if model.gguf is not None:
        return replace(loaded, config=None), [_refused_gguf(folder, loaded)]
    keys = {_TYPE: model.model_type, **{f"{_SIZES}.{key}": value for key, value in model.sizes.items()}}
    given = _given(loaded, {*keys, _LENGTH, _TOKENS}, is_own_file=is_own_file)
    found = [*_contradictions(loaded, keys, given, folder=folder), *_too_long(loaded, model, given, folder=folder)]
    if found:
        return replace(loaded, config=None), found
    if _LENGTH not in given and _value(loaded, _LENGTH) > model.context:
        keys[_LENGTH] = model.context
    others = [f"{key}={_said(value)}" for key, value in keys.items() if key not in given]
    try:
        if _TOKENS not in given and _value(loaded, "data_config.source") == "file":
            others += tokenizer_keys(folder)
    except PretrainedError as error:
        return replace(loaded, config=None), [_refused_tokenizer(folder, error, loaded)]
    return override_config(recipe, loaded, others, option=_KEY), []


def _refused_gguf(folder: Path, loaded: "LoadedConfig") -> Diagnostic:
    path = shown(folder, longest=_LONGEST)
    message = f"{path} is a GGUF file, and ranks read the tensors of a folder of transformers"
    hint = f"`ttlaunch weights import {path} DIR --as hf` makes one, which `hf:DIR` names"
    return Diagnostic("C042", message, loaded.label(_KEY), hints=(hint,))


def _refused_tokenizer(folder: Path, error: "PretrainedError", loaded: "LoadedConfig") -> Diagnostic:
    message = f"{shown(folder, longest=_LONGEST)} has a tokenizer that is not taken: {error}"
    hints = (EXTRA,) if "not installed" in message else ()
    without = f"`--set {_TOKENS}=ids` with a file of tokens as `data_path` does without it"
    return Diagnostic("C042", message, loaded.label(_KEY), hints=(*hints, without))


def _given(loaded: "LoadedConfig", keys: Iterable[str], *, is_own_file: bool) -> "dict[str, Span]":
    """Return where the user gave each key; those of the recipe's own file are nobody's wish."""
    spans = {key: loaded.span(key) for key in keys}
    return {key: span for key, span in spans.items() if span and not (is_own_file and span.source.name != _OPTION)}


def _value(loaded: "LoadedConfig", key: str) -> Any:
    section, _, name = key.partition(".")
    return loaded.checked.model_dump()[section][name]


def _contradictions(
    loaded: "LoadedConfig", keys: Mapping[str, Any], given: "Mapping[str, Span]", *, folder: Path
) -> Iterator[Diagnostic]:
    path, hint = shown(folder, longest=_LONGEST), "leave the key out: the folder says it"
    for key, span in given.items():
        now, name = _value(loaded, key), key.partition(".")[2]
        if key == _TYPE and now != keys[key]:
            message = f"`{name}` is `{now}`, and the model in {path} is a `{keys[key]}`"
            yield Diagnostic("C042", message, Label(span), hints=(hint,))
        elif key in keys and now != keys[key]:
            message = f"`{name}` is {_said(now)}, and the model in {path} has {_said(keys[key])}"
            yield Diagnostic("C042", message, Label(span), hints=(hint,))


def _too_long(
    loaded: "LoadedConfig", model: "Pretrained", given: "Mapping[str, Span]", *, folder: Path
) -> Iterator[Diagnostic]:
    """Report sequences that are longer than the texts for which a llama was made; shorter ones need no other weights."""
    length = _value(loaded, _LENGTH)
    if _LENGTH in given and "max_sequence_length" not in model.sizes and length > model.context:
        path = shown(folder, longest=_LONGEST)
        message = f"`max_sequence_length` is {length}, and the model in {path} was made for texts of up to {model.context} tokens"
        yield Diagnostic("C042", message, Label(given[_LENGTH]))


def find_initial_weights(
    choice: "RecipeChoice", weights: str, working_folder: Path
) -> tuple[dict[str, Any] | None, list[Diagnostic]]:
    """Return the start of a run from weights, as `find_start` does; None with the mistakes if they cannot be used."""
    folder = folder_of(choice.loaded, working_folder)
    if folder is not None:
        return _from_folder(choice, folder)
    return _from_file(choice, working_folder / os.path.expanduser(weights))  # noqa: PTH111 - never raises


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _at_the_key(error: LaunchError, loaded: "LoadedConfig") -> list[Diagnostic]:
    label = loaded.label(_KEY)
    return [Diagnostic("C042", one.message, label, notes=one.notes, hints=one.hints) for one in error.diagnostics]


def _from_folder(choice: "RecipeChoice", folder: Path) -> tuple[dict[str, Any] | None, list[Diagnostic]]:
    from ttlaunch.app.import_weights import find_pretrained

    try:
        model = find_pretrained(str(folder))
        wrong = _other_vocabulary(choice, folder, model.vocabulary)
        return (None, [wrong]) if wrong else (_start(folder, model.weights), [])
    except LaunchError as error:  # it was whole when the sizes were taken: somebody has changed it since
        return None, _at_the_key(error, choice.loaded)
    except OSError as error:
        message = f"{shown(folder, longest=_LONGEST)} cannot be used as initial weights: {system_reason(error)}"
        return None, [Diagnostic("C042", message, choice.loaded.label(_KEY))]


def _start(folder: Path, weights: "Mapping[str, AnyTensor]") -> dict[str, Any]:
    """Return origin and files, each with the names of its tensors: ours, theirs, and whether the matrix is transposed.

    A matrix that is some rows of ours has the name of this part.

    Raises:
        OSError: A file cannot be read.
    """
    from ttlaunch.running.checkpoints.derived_tensors import Transposed

    names: dict[Path, dict[str, list[str | bool]]] = {}
    for ours, tensor in weights.items():
        for name, part in _parts(ours, tensor):
            # A folder has no other tensors than stored ones.
            stored = cast("StoredTensor", part.source if isinstance(part, Transposed) else part)
            names.setdefault(stored.path, {})[name] = [stored.name, stored is not part]
    files = [{**_described(path), "names": its} for path, its in names.items()]
    return {"origin": str(folder.resolve()), "step": 0, "files": files}


def _parts(name: str, tensor: "AnyTensor") -> "Iterator[tuple[str, AnyTensor]]":
    """Yield a tensor, or the matrices that are its rows, each with its name as a part."""
    from ttlaunch.running.checkpoints.derived_tensors import StackedRows
    from ttlaunch.stored_parts import Part

    if not isinstance(tensor, StackedRows):
        yield name, tensor
        return
    start = 0
    for part in tensor.parts:
        rows = range(start, start + part.shape[0])
        others = (range(length) for length in tensor.shape[1:])
        yield str(Part(name, (rows, *others), tensor.shape)), part
        start = rows.stop


def _described(path: Path) -> dict[str, Any]:
    """Return path, SHA-256 and size of a file.

    Raises:
        OSError: It cannot be read.
    """
    from ttlaunch.records.regular_files import open_regular

    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"path": str(path), "sha256": digest, "bytes": file.tell()}


def _other_vocabulary(choice: "RecipeChoice", folder: Path, vocabulary: int) -> Diagnostic | None:
    """Report a model that has another number of tokens than the training data."""
    config = choice.loaded.checked.model_dump()
    tokens = _tokens_of(choice, config)
    if tokens in (None, vocabulary):
        return None
    kind = config["training_config"]["tokenizer_type"]
    path = shown(folder, longest=_LONGEST)
    message = f"the model in {path} has {vocabulary:,} tokens, and the training data with `tokenizer_type` `{kind}` has {tokens:,}"
    made = f"`ttlaunch data TEXT tokens.txt --tokenizer {path}/tokenizer.json` writes the tokens of a text"
    if not (folder / "tokenizer.json").exists():
        made = f"{path} has no `tokenizer.json`: put that of the model there, or its path behind `ttlaunch data TEXT tokens.txt --tokenizer`"
    used = f"`--set {_TOKENS}=ids --set training_config.data_path=tokens.txt` trains on them"
    return Diagnostic("C042", message, choice.loaded.label(_TOKENS) or choice.loaded.label(_KEY), hints=(made, used))


def _tokens_of(choice: "RecipeChoice", config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the training data has; None if it is drawn, or could not be read, which is said elsewhere."""
    from ttlaunch.spec.recipe.data import read_data

    if choice.data is None or config["data_config"]["source"] != "file":
        return None
    kind = config["training_config"]["tokenizer_type"]
    if kind == "byte":
        return _BYTES
    corpus = read_data(Path(choice.data["path"]) if choice.data["path"] else None)
    return corpus.vocabulary_of_ids if kind == "ids" else len(set(corpus.characters))


def _from_file(choice: "RecipeChoice", path: Path) -> tuple[dict[str, Any] | None, list[Diagnostic]]:
    from ttlaunch.app.import_weights import is_pretrained
    from ttlaunch.records.regular_files import open_regular
    from ttlaunch.running.checkpoints.tensor_file import TensorFileError, parse_header

    span = choice.loaded.span(_KEY)
    try:
        with open_regular(
            path, follow=True
        ) as file:  # the user named this path, and caches of weights are full of links
            parse_header(file, path)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except (OSError, ValueError, TensorFileError) as error:
        message = f"{shown(path, longest=_LONGEST)} cannot be used as initial weights: {system_reason(error)}"
        hints = ("`ttlaunch weights export RUN FILE` writes a file that fits",)
        if is_pretrained(str(path)):
            hints = (f"`hf:{shown(path, longest=_LONGEST)}` is a folder of transformers",)
        return None, [Diagnostic("C042", message, Label(span) if span else None, hints=hints)]
    files = [{"path": str(path.resolve()), "sha256": digest, "bytes": size}]
    return {"origin": str(path.resolve()), "step": 0, "files": files}, []
