"""Turn a run or a checkpoint that is to be served into the specification of a serving run, or say why it cannot be served.

A serving run is a run of the recipe `serve`: everything that ttlaunch does for a run holds for it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ttlaunch.app.find_start import search_checkpoint
from ttlaunch.app.run_spec import LOCAL, RunSpec
from ttlaunch.app.serve_folder import (
    find_folder,
    folder_of_spec,
    is_model_of_others,
    keys_of_tokenizer,
    sections_of,
    weights_of_folder,
)
from ttlaunch.diagnostics import Diagnostic, LaunchError, counted, shown, usage_error
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.running.checkpoints.resume import Checkpoint
    from ttlaunch.running.checkpoints.tensor_file import AnyTensor, FiledTensor
    from ttlaunch.running.pretrained.read_tokenizer import FoundTokenizer

RECIPE = "serve"
HANG_TIMEOUT_S = 15.0
"""Ranks of a serving run pass a message around every second, so one that stands still is noticed soon."""

_EMBEDDING = "embedding.token.weight"
_LONG_ID, _MOST_SHOWN = 10, 40
_OF_MODEL = ("embedding.", "blocks.", "head.")
_DTYPES = {"F32": "float32"}
_LONGEST = 300
_LEAST_COLUMNS = 16
_OF_TRAINING = ("seed", "model_type", "tokenizer_type", "precision")
"""The least columns of a matrix that a rank may have, if its products are to have the bits of whole ones."""


@dataclass(frozen=True)
class ServeOptions:
    """How a model is served.

    Attributes:
        on: The cluster.
        ranks: The number of ranks.
        split: What each rank has: blocks, or columns of matrices; None to choose.
        max_streams: Streams that are computed at once.
        max_waiting: Streams that may wait.
        max_context: Tokens of a stream; None for what the model was trained with.
        exact: Whether equal bits to training are needed: `auto`, `on` or `off`.
        until_left: Whether the run ends when everybody who has connected has left.
        guesses: Whether idle rows compute guessed tokens.
        overrides: Further values of the configuration, as `KEY=VALUE`.
    """

    on: str = LOCAL
    ranks: int = 1
    split: Literal["stages", "columns"] | None = None
    max_streams: int = 8
    max_waiting: int = 32
    max_context: int | None = None
    exact: str = "auto"
    until_left: bool = False
    guesses: bool = True
    overrides: tuple[str, ...] = ()


def find_served(
    where: str, options: ServeOptions, *, runs_dir: Path, working_folder: Path
) -> tuple[RunSpec, list[Diagnostic]]:
    """Find a model, check that it can be served, and return the specification of the run that does, with warnings.

    Args:
        where: `latest`, a run, the path of a checkpoint, or a folder of transformers.
        options: How it is served.
        runs_dir: The folder of runs.
        working_folder: The folder to which relative paths are relative.

    Raises:
        LaunchError: There is no such checkpoint or folder, or its model cannot be served.
    """
    _check_overrides(options.overrides)
    place = where if working_folder == Path.cwd() else str(working_folder / where)
    if is_model_of_others(place):
        return _serve_folder(place, options, runs_dir=runs_dir), []
    checkpoint, found = search_checkpoint(where, runs_dir=working_folder / runs_dir, working_folder=working_folder)
    if checkpoint is None:
        raise LaunchError(found)
    config = checkpoint.manifest["config"]
    training, sizes = read_section(config, "training_config"), read_section(config, "transformer_config")
    _check_model(training, config, options.overrides)
    weights = whole_weights(checkpoint, blocks=int(sizes["num_blocks"]))
    served = {**sizes, "max_sequence_length": _length(sizes, options)}
    _check_stages(served, options)
    if options.split == "columns":
        check_shares(served, options.ranks, kind=training["model_type"], vocabulary=weights[_EMBEDDING].shape[0])
    asked = _asked(checkpoint, training, sizes, weights=weights, working_folder=working_folder)
    overrides = _overrides(config, options, sizes=served, serve={**asked, **_chosen(options)})
    spec = RunSpec(
        RECIPE,
        on=options.on,
        overrides=overrides,
        ranks=options.ranks,
        resume=str(checkpoint.path.resolve()),
        runs_dir=runs_dir,
    )
    return spec, found


def _asked(
    checkpoint: "Checkpoint",
    training: Mapping[str, Any],
    sizes: Mapping[str, Any],
    *,
    weights: "Mapping[str, AnyTensor]",
    working_folder: Path,
) -> dict[str, Any]:
    """Return the keys of `serve_config` that follow from a checkpoint."""
    from ttlaunch.running.runs.provenance import hash_of_provenance

    return {
        "model": _name(checkpoint, checkpoint.path.resolve()),
        "weights_sha256": hash_of_weights(weights),
        "provenance_sha256": hash_of_provenance(checkpoint.manifest),
        "vocabulary": weights[_EMBEDDING].shape[0],
        "training_rows": training["micro_batch_size"] * sizes["max_sequence_length"],
        "alphabet": find_alphabet(checkpoint, training, working_folder) if training["tokenizer_type"] == "char" else [],
        **_tokenizer_of(training, working_folder),
    }


def _serve_folder(where: str, options: ServeOptions, *, runs_dir: Path) -> RunSpec:
    """Return the specification of the run that serves a folder of transformers.

    Raises:
        LaunchError: Its model cannot be served.
    """
    found = find_folder(where, max_context=options.max_context)
    model, sizes = found.model, found.model.sizes
    _check_stages(sizes, options)
    if options.split == "columns":
        check_shares(sizes, options.ranks, kind=model.model_type, vocabulary=model.vocabulary)
    serve = {
        "model": shown(found.path.name, longest=120),
        "weights_sha256": hash_of_weights(model.weights),
        "vocabulary": model.vocabulary,
        **found.tokenizer["serve_config"],
        **_chosen(options),
    }
    sections = {**sections_of(found), "serve_config": serve}
    texts = [f"{name}={json.dumps(values)}" for name, values in sections.items()]
    return RunSpec(
        RECIPE, on=options.on, overrides=(*texts, *options.overrides), ranks=options.ranks, runs_dir=runs_dir
    )


def weights_served_by(spec: RunSpec) -> str:
    """Return the hash of the weights that a specification made by `find_served` serves."""
    return str(section_of(spec, "serve_config")["weights_sha256"])


def most_context(spec: RunSpec) -> int:
    """Return how many tokens a text may have that the model of a specification made by `find_served` continues."""
    return longest_text(section_of(spec, "transformer_config"))


def longest_text(sizes: Mapping[str, Any]) -> int:
    """Return how many tokens a text of a model may have: a llama's positions need no weights, so its training may have had shorter ones.

    Args:
        sizes: `transformer_config`.
    """
    return int(max(sizes["max_sequence_length"], sizes.get("max_position_embeddings") or 0))


def section_of(spec: RunSpec, name: str) -> dict[str, Any]:
    """Return a section of the configuration, as `find_served` has written it into a specification."""
    text = next(one for one in spec.overrides if one.startswith(f"{name}="))
    section: dict[str, Any] = json.loads(text.removeprefix(f"{name}="))
    return section


def check_prompt(spec: RunSpec, text: str) -> None:
    """Refuse, before anything starts, a text that a model without a tokenizer of others cannot continue.

    Raises:
        LaunchError: It is empty, or the tokens are numbers and it is none.
    """
    served, kind = section_of(spec, "serve_config"), section_of(spec, "training_config")["tokenizer_type"]
    if served.get("tokenizer_file") is not None:
        return  # which may begin each text with a token of its own
    if not (text.split() if kind == "ids" else text):
        raise usage_error("TEXT is empty, and the model needs a token to continue", "give it a word to begin with")
    if kind != "ids":
        return
    vocabulary = served["vocabulary"]
    wrong = next((one for one in text.split() if not (one.isascii() and one.isdigit() and len(one) < _LONG_ID)), None)
    wrong = wrong or next((one for one in text.split() if int(one) >= vocabulary), None)
    if wrong is not None:
        message = f"`{shown(wrong, longest=_MOST_SHOWN)}` is no token id from 0 to {vocabulary - 1}"
        raise usage_error(f"{message}, and the model has no tokenizer", "TEXT is token ids, such as `5 17 3`")


def weights_of(spec: RunSpec) -> "Mapping[str, AnyTensor]":
    """Return the weights that a specification made by `find_served` serves.

    Raises:
        LaunchError: The checkpoint, or the folder, cannot be read any more.
    """
    from ttlaunch.running.checkpoints.tensor_difference import read_weights

    folder = folder_of_spec(spec)
    if folder is not None:
        return weights_of_folder(folder)
    found = read_weights(Path(spec.resume or ""))
    return {name: one for name, one in found.items() if name.startswith(_OF_MODEL)}


def _check_overrides(overrides: Sequence[str]) -> None:
    """Check that nobody sets what follows from the checkpoint, such as its hash, or has an option, which is what predictions know.

    Raises:
        LaunchError: Somebody does.
    """
    for one in overrides:
        key = one.partition("=")[0].strip()
        if key.partition(".")[0] == "serve_config" and key != "serve_config.guesses":
            raise usage_error(
                f"`--set {shown(key)}` is not for users: its values follow from the checkpoint and the options",
                "`ttlaunch serve --help` lists the options",
            )


def _chosen(options: ServeOptions) -> dict[str, Any]:
    """Return the keys of `serve_config` that say how a model is served."""
    return {
        "shares" if options.split == "columns" else "stages": options.ranks - 1,
        "max_streams": options.max_streams,
        "max_waiting": options.max_waiting,
        "max_context": options.max_context,
        "exact": options.exact,
        "guesses": options.guesses,
        "until_left": options.until_left,
    }


def _overrides(
    config: Mapping[str, Any], options: ServeOptions, *, sizes: Mapping[str, Any], serve: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the overrides that make a serving run's configuration from that of the training."""
    training, data = read_section(config, "training_config"), read_section(config, "data_config")
    device = read_section(config, "device_config")
    sections: dict[str, Mapping[str, Any]] = {
        "training_config": {name: training[name] for name in _OF_TRAINING},
        "transformer_config": {**sizes, "dropout_prob": 0.0},
        "device_config": {name: device[name] for name in ("device", "threads_per_rank", "deterministic")},
        "serve_config": serve,
    }
    if _is_drawn(config):
        sections["data_config"] = {"source": "markov", "vocabulary": data["vocabulary"]}
    socket = "grpc" if read_section(config, "multihost_config").get("socket_type") == "grpc" else "mpi"
    texts = [f"{name}={json.dumps(values)}" for name, values in sections.items()]
    return (*texts, f"multihost_config.socket_type={socket}", *options.overrides)


def hash_of_weights(weights: "Mapping[str, AnyTensor]") -> str:
    """Return the hash over all parameters that the report of their training has.

    Raises:
        LaunchError: A file cannot be read.
    """
    from ttlaunch.diagnostics import file_error
    from ttlaunch.running.checkpoints.tensor_file import pieces_of
    from ttlaunch.running.report import combine_digests

    digests = {}
    try:
        for name, tensor in weights.items():
            about = f"{name}\n{tuple(tensor.shape)}\n{_DTYPES.get(tensor.dtype, tensor.dtype.lower())}\n"
            digest = hashlib.sha256(about.encode())
            for piece in pieces_of(tensor):
                digest.update(piece)
            digests[name] = digest.hexdigest()
    except OSError as error:
        raise file_error(error.filename or "the checkpoint", error, verb="read") from error
    return str(combine_digests([digests])[0])


def read_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the checkpoint's configuration, which somebody else may have written.

    Raises:
        LaunchError: The checkpoint has no such section.
    """
    from ttlaunch.spec.recipe.sections import TrainingFile

    section = config.get(name)
    if not isinstance(section, dict):
        raise usage_error(f"the checkpoint's configuration has no `{name}`, so it holds no model to serve")
    try:
        checked = TrainingFile.model_validate({name: section})
    except ValueError as error:
        first = str(error).splitlines()[2:3]
        message = f"the checkpoint's `{name}` cannot be used"
        raise usage_error(message, notes=tuple(shown(line.strip()) for line in first)) from error
    dumped: Mapping[str, Any] = getattr(checked, name).model_dump(mode="json")
    return dumped


def _check_model(training: Mapping[str, Any], config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Check that the model continues texts, in a number format that the device has.

    Raises:
        LaunchError: It does not.
    """
    kind = training["model_type"]
    if kind == "conv":
        message = "the checkpoint's model classifies images (`model_type: conv`), so there is no text to continue"
        raise usage_error(message, "serve a run with `model_type: gpt`")
    given = dict(one.partition("=")[::2] for one in overrides)
    precision = given.get("training_config.precision", training["precision"])
    device = given.get("device_config.device", read_section(config, "device_config")["device"])
    if precision == "fp16" and device == "cpu":
        message = "the checkpoint was trained with `precision: fp16`, in which no CPU computes products as in training"
        raise usage_error(
            message, "`--set training_config.precision=fp32` serves it, with other bits than the training's"
        )


def whole_weights(checkpoint: "Checkpoint", *, blocks: int, averaged: bool = False) -> "Mapping[str, FiledTensor]":
    """Return the weights of a checkpoint, or with `averaged` their average over the training.

    Raises:
        LaunchError: It has no whole model.
    """
    from ttlaunch.running.checkpoints.tensor_difference import read_weights

    found = read_weights(checkpoint.path, averaged=averaged)
    weights = {name: one for name, one in found.items() if name.startswith(_OF_MODEL)}
    missing = [name for name in (_EMBEDDING, "head.norm.weight") if name not in weights]
    missing += [name for name in weights if "~" in name or "[" in name]
    known = {".".join(name.split(".")[:2]) for name in weights}
    missing += [block for block in (f"blocks.{at}" for at in range(blocks)) if block not in known]
    if missing or len(weights[_EMBEDDING].shape) != 2:  # noqa: PLR2004 - a matrix
        recipe = shown(checkpoint.manifest.get("recipe") or "its recipe")
        what = f"`{shown(missing[0])}`" if missing else f"`{_EMBEDDING}` as a matrix"
        message = f"the checkpoint of `{recipe}` has no whole model: it lacks {what}"
        raise usage_error(message, "`ttlaunch weights show` lists what it has")
    return weights


def _length(sizes: Mapping[str, Any], options: ServeOptions) -> int:
    """Return the tokens of a text for which logits are those of the training's forward pass: those of the training, or more if asked for.

    Raises:
        LaunchError: The model was made for shorter texts.
    """
    trained, most = int(sizes["max_sequence_length"]), longest_text(sizes)
    if options.max_context is not None and options.max_context > most:
        what = "that the model was trained with" if most == trained else "for which the model was made"
        message = f"`--max-context {options.max_context}` exceeds the {counted(most, 'token')} {what}"
        raise usage_error(message, f"`--max-context {most}` is the most")
    return max(trained, options.max_context or 0)


def _check_stages(sizes: Mapping[str, Any], options: ServeOptions) -> None:
    """Check that the ranks can share the model by blocks, unless they share it by columns.

    Raises:
        LaunchError: There are more ranks than blocks.
    """
    if options.split != "columns" and options.ranks > sizes["num_blocks"]:
        message = f"{counted(options.ranks, 'rank')} cannot share {counted(sizes['num_blocks'], 'block')} as stages"
        raise usage_error(message, f"`--ranks {sizes['num_blocks']}` is the most, or `--split columns`")


def check_shares(sizes: Mapping[str, Any], ranks: int, *, kind: str, vocabulary: int) -> None:
    """Check that each rank has enough columns of every matrix, and a head of attention where heads are shared.

    Raises:
        LaunchError: It has not.
    """
    heads = sizes["num_heads"]
    if kind == "gpt" and heads < ranks:
        message = f"{counted(ranks, 'rank')} cannot share {counted(heads, 'head')} of attention"
        raise usage_error(message, f"`--ranks {heads}` is the most, or `--split stages`")
    widths = {"columns": sizes["embedding_dim"], "columns of the head, one for each token,": vocabulary}
    if kind == "llama":
        widths["columns inside of a feed-forward layer"] = sizes["mlp_dim"] or 4 * sizes["embedding_dim"]
    what = min(widths, key=lambda name: widths[name])
    if (width := widths[what]) // ranks < _LEAST_COLUMNS:
        most = max(1, width // _LEAST_COLUMNS)
        message = (
            f"{width} {what} over {counted(ranks, 'rank')} are less than {_LEAST_COLUMNS} each, and products of fewer "
            "columns have other bits than whole ones"
        )
        raise usage_error(message, f"`--ranks {most}` is the most, or `--split stages`")


def _is_drawn(config: Mapping[str, Any]) -> bool:
    return bool(read_section(config, "data_config")["source"] == "markov")


def find_named_tokenizer(training: Mapping[str, Any], working_folder: Path) -> "FoundTokenizer | None":
    """Return the tokenizer whose tokens a model was trained on; None if it has one of ours, or only numbers.

    Raises:
        LaunchError: Its file is gone, has changed, or is not taken.
    """
    from ttlaunch.app.tokenized_data import EXTRA, named_tokenizer
    from ttlaunch.running.pretrained.read_folder import PretrainedError

    where = training.get("tokenizer_path")  # checkpoints of before have none
    if training["tokenizer_type"] != "ids" or not isinstance(where, str):
        return None
    sha256 = training.get("tokenizer_sha256")
    try:
        return named_tokenizer(where, sha256 if isinstance(sha256, str) else None, working_folder)
    except (OSError, ValueError, PretrainedError) as error:
        reason = system_reason(error)
        message = f"the tokenizer of the training, {shown(where, longest=_LONGEST)}, cannot be used: {reason}"
        hint = EXTRA if "not installed" in reason else "put the file back as it was in the training"
        raise usage_error(message, hint) from error


def _tokenizer_of(training: Mapping[str, Any], working_folder: Path) -> dict[str, Any]:
    """Return the keys of `serve_config` that name a tokenizer and a chat template of others."""
    found = find_named_tokenizer(training, working_folder)
    return {} if found is None else keys_of_tokenizer(found)


def find_alphabet(checkpoint: "Checkpoint", training: Mapping[str, Any], working_folder: Path) -> list[int]:
    """Return the code points that are the tokens of a model of characters, from the text on which it was trained.

    Raises:
        LaunchError: The text is gone, or has changed.
    """
    from ttlaunch.errors import TtlaunchError
    from ttlaunch.spec.recipe.data import read_data

    given = training["data_path"]
    path = None if given is None else working_folder / given
    name = "the text of the training" if given is None else shown(given)
    try:
        text = read_data(path)
    except TtlaunchError as error:
        message = f"{name} is needed, because its characters are the model's tokens: {error}"
        raise usage_error(message, "run this where the training was started, or put the text back") from error
    if text.sha256 != checkpoint.manifest.get("text_sha256"):
        message = f"{name} is not the text of the training any more, and its characters are the model's tokens"
        raise usage_error(message, "put the text back as it was")
    return sorted({ord(character) for character in text.characters})


def _name(checkpoint: "Checkpoint", path: Path) -> str:
    """Name what is served: the recipe of the training, its run, and the step."""
    run = checkpoint.manifest.get("run")
    words = (checkpoint.manifest.get("recipe") or "model", run if isinstance(run, str) else path.name)
    return shown(" ".join(str(word) for word in words), longest=120)
