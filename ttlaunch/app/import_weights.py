"""Import a model that another library saved, as weights with which a training of ours can begin."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.diagnostics import (
    Diagnostic,
    LaunchError,
    Severity,
    counted,
    did_you_mean,
    file_error,
    listed,
    shown,
    usage_error,
    usage_mistake,
)
from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.running.checkpoints.tensor_file import AnyTensor, FiledTensor
    from ttlaunch.running.pretrained.gguf import GgufModel
    from ttlaunch.running.pretrained.read_folder import PretrainedError, PretrainedFolder
    from ttlaunch.untrusted.child import UntrustedError

_KNOWN = ("gpt2", "llama")
_FILES = ("model.safetensors", "model.safetensors.index.json")
_HEAD = "lm_head.weight"
_MOST_REASONS = 20
_NOT_OURS = {
    "qwen2": "its queries, keys and values have biases, which a llama of ours has not",
    "mistral": "its attention may slide a window over a text, which ours does not",
    "mixtral": "it is a mixture of experts, which ours is not",
    "qwen2_moe": "it is a mixture of experts, which ours is not",
    "qwen3": "it normalises queries and keys, which ours does not",
}
"""By the type of a model that is much like a llama, what makes it another one."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LONGEST = 300
_PLAIN = "take a model whose `config.json` has one of these types, without parts or code of its own"
_HINT = "a folder has `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`"


@dataclass(frozen=True)
class Pretrained:
    """A model that can be imported.

    Attributes:
        weights: Its tensors under our names, in our shapes.
        model_type: What it is with us, as in `training_config.model_type`.
        sizes: The keys of `transformer_config` that describe it.
        vocabulary: Rows of its embedding.
        context: Tokens of the longest text for which it was made.
        gguf: The file that it comes from, if that is a GGUF.
    """

    weights: "Mapping[str, AnyTensor]"
    model_type: str
    sizes: Mapping[str, Any]
    vocabulary: int
    context: int
    gguf: "GgufModel | None" = None


def find_pretrained(where: str) -> Pretrained:
    """Read a folder in the layout of Hugging Face, a safetensors file beside its `config.json`, or a GGUF; check every tensor.

    Raises:
        LaunchError: It has no model that ours can be; every reason, up to a limit.
    """
    from ttlaunch.running.pretrained.gguf import is_gguf, read_gguf
    from ttlaunch.running.pretrained.read_folder import PretrainedError, PretrainedFolder, read_pretrained

    if not where.strip():
        raise usage_error("an empty text names no folder and no file", _HINT)
    try:
        if is_gguf(Path(where)):
            gguf = read_gguf(Path(where))
            return replace(_as_ours(PretrainedFolder(gguf.config, gguf.tensors)), gguf=gguf)
        return _as_ours(read_pretrained(Path(where)))
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError):  # a NUL in the path
            raise usage_error(f"{shown(where, longest=_LONGEST)} names no folder and no file", _HINT) from error
        name = Path(str(error.filename or where)).name
        raise file_error(f"{where}: {name}" if name != Path(where).name else where, error, verb="read") from error
    except PretrainedError as error:
        raise _refuse(where, error) from error


def write_pretrained(model: Pretrained, to: Path, *, source: str, wrote: Callable[[int], object]) -> str:
    """Write the weights of a model as one safetensors file under our names, and return the file's SHA-256.

    Args:
        model: The model.
        to: The file to write, which must not exist.
        source: The folder or file that the model came from, as it was typed.
        wrote: Called with the number of bytes of each piece that was written.

    Cost: a piece of a tensor is in memory at a time, of a transposed one all of it.

    Raises:
        LaunchError: The model's files cannot be read any more, or the file cannot be written.
    """
    from ttlaunch.running.checkpoints.tensor_file import write_tensors
    from ttlaunch.untrusted.child import UntrustedError

    try:
        with model.gguf.reader if model.gguf else nullcontext():
            write_tensors(to, model.weights, wrote=wrote)
        with to.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except UntrustedError as error:
        raise refuse_untrusted(source, error) from error
    except OSError as error:
        was_read = error.filename in {str(one.path) for one in model.weights.values()}
        raise file_error(source if was_read else to, error, verb="read" if was_read else "written") from error


def write_pretrained_folder(
    model: Pretrained, to: Path, *, source: str, wrote: Callable[[int], object]
) -> tuple[str, list[Diagnostic]]:
    """Write the model of a GGUF as a folder of transformers, and return the SHA-256 of its tensors, with warnings.

    Args:
        model: The model.
        to: The folder to write, which must not exist.
        source: The file that the model came from, as it was typed.
        wrote: Called with the number of bytes of each piece that was written.

    Cost: as that of `write_pretrained`.

    Raises:
        LaunchError: The model comes from a folder, its file cannot be read any more, or the folder cannot be written.
    """
    from ttlaunch.running.pretrained.write_folder import write_folder
    from ttlaunch.untrusted.child import UntrustedError

    if model.gguf is None:
        path = shown(source, longest=_LONGEST)
        raise usage_error(f"{path} is in the layout of transformers already", "leave `--as hf` out, or copy the folder")
    try:
        texts, warnings = _texts_of(model, model.gguf, source=source)
        with model.gguf.reader:
            write_folder(to, model.gguf.tensors, texts, wrote=wrote)
        with (to / "model.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), warnings
    except UntrustedError as error:
        raise refuse_untrusted(source, error) from error
    except OSError as error:
        was_read = error.filename in {str(one.path) for one in model.weights.values()}
        raise file_error(source if was_read else to, error, verb="read" if was_read else "written") from error


def _texts_of(
    model: Pretrained, gguf: "GgufModel", *, source: str
) -> "tuple[dict[str, Mapping[str, Any] | bytes], list[Diagnostic]]":
    """Return the files beside the tensors by name; a tokenizer that is not converted is left out with a warning.

    Raises:
        OSError: The file of the model cannot be read.
    """
    from ttlaunch.running.pretrained.gguf import read_gguf_tokenizer
    from ttlaunch.untrusted.child import UntrustedError

    texts: dict[str, Mapping[str, Any] | bytes] = {"config.json": gguf.config}
    special: dict[str, str] = {}
    warnings: list[Diagnostic] = []
    try:
        special, texts["tokenizer.json"] = read_gguf_tokenizer(Path(source))
    except UntrustedError as error:
        message = f"{shown(source, longest=_LONGEST)}: the tokenizer is left out: {shown(error, longest=_LONGEST)}"
        warnings.append(replace(usage_mistake(message), severity=Severity.WARNING))
    texts["tokenizer_config.json"] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
    }
    if gguf.template is not None:
        texts["chat_template.jinja"] = gguf.template.encode()
    return texts, warnings


def refuse_untrusted(where: str, error: "UntrustedError") -> LaunchError:
    """Return the refusal of a file whose limited child ended without an answer."""
    from ttlaunch.untrusted.child import MissingLibraryError

    message = f"{shown(where, longest=_LONGEST)} cannot be imported: {shown(error, longest=_LONGEST)}"
    hints = ("`pip install 'ttlaunch[pretrained]'`",) if isinstance(error, MissingLibraryError) else ()
    return usage_error(message, *hints)


def is_pretrained(where: str) -> bool:
    """Whether a folder has the weights of a model in the layout of Hugging Face."""
    return any(os.path.isfile(os.path.join(where, name)) for name in _FILES)  # noqa: PTH113, PTH118 - never raise


def pretrained_tensors(folder: str, *, verb: str) -> "Mapping[str, FiledTensor]":
    """Return the tensors of a folder by the names that they have there.

    Raises:
        LaunchError: The files are not what their names say.
    """
    from ttlaunch.running.pretrained.read_folder import PretrainedError, read_folder_tensors

    try:
        return read_folder_tensors(Path(folder))
    except OSError as error:
        raise file_error(folder, error, verb="read") from error
    except PretrainedError as error:
        raise _refuse(folder, error, verb=verb) from error


def _as_ours(folder: "PretrainedFolder") -> Pretrained:
    """Return a model under our names.

    Raises:
        PretrainedError: Ours cannot be it; every reason.
    """
    from ttlaunch.running.pretrained.read_folder import PretrainedError

    reasons = list(_other_model(folder.config))
    if reasons:
        raise PretrainedError(*reasons, repair=_PLAIN)
    return (_as_llama if folder.config["model_type"] == "llama" else _as_gpt)(folder)


def _as_gpt(folder: "PretrainedFolder") -> Pretrained:
    from ttlaunch.running.pretrained import gpt2

    config = gpt2.parse_gpt2_config(folder.config)
    _check_blocks(folder.tensors, key="n_layer", blocks=config.n_layer, within="h")
    tensors, shapes = gpt2.without_buffers(folder.tensors), gpt2.gpt2_shapes(config)
    _account(tensors, shapes, tied_to="transformer.wte.weight" if config.tie_word_embeddings else None)
    weights, sizes = gpt2.from_gpt2(tensors, config), gpt2.sizes_of_gpt2(config)
    return Pretrained(weights, "gpt", sizes, config.vocab_size, config.n_positions)


def _as_llama(folder: "PretrainedFolder") -> Pretrained:
    from ttlaunch.running.pretrained import llama

    config, positions = llama.parse_llama_config(folder.config)
    _check_blocks(folder.tensors, key="num_hidden_layers", blocks=config.num_hidden_layers, within="layers")
    tensors, shapes = llama.without_llama_buffers(folder.tensors), llama.llama_shapes(config)
    tied_to = "model.embed_tokens.weight" if config.tie_word_embeddings else None
    _account(tensors, shapes, tied_to=tied_to, others=llama.mixed_types(tensors, config))
    weights, sizes = llama.from_llama(tensors, config), llama.sizes_of_llama(config, positions)
    return Pretrained(weights, "llama", sizes, config.vocab_size, config.max_position_embeddings)


def _account(
    tensors: "dict[str, AnyTensor]",
    shapes: Mapping[str, tuple[int, ...]],
    *,
    tied_to: str | None,
    others: Iterable[str] = (),
) -> None:
    """Check that a model has all of its tensors and no others; a second copy of a tied head's matrix is left out.

    Raises:
        PretrainedError: It has not; every reason, `others` included.
    """
    from ttlaunch.running.pretrained.account import account_for
    from ttlaunch.running.pretrained.read_folder import PretrainedError

    reasons: list[str] = []
    if tied_to is not None:
        reasons += _second_head(tensors, tied_to)
        tensors.pop(_HEAD, None)
    reasons += [*account_for(tensors, shapes), *others]
    if reasons:
        raise PretrainedError(*reasons)


def _other_model(config: Mapping[str, Any]) -> Iterator[str]:
    from ttlaunch.running.pretrained.read_folder import CONFIG

    kind = config.get("model_type")
    if kind not in _KNOWN:
        nearest = "".join(did_you_mean(kind, _KNOWN)) if isinstance(kind, str) else ""
        said = f"`model_type` is {shown(repr(kind))}" if "model_type" in config else "`model_type` is missing"
        other = f"; {_NOT_OURS[kind]}" if isinstance(kind, str) and kind in _NOT_OURS else ""
        near = f"; {nearest}" if nearest and not other else ""
        yield f"{CONFIG}: {said}, and only {listed(_KNOWN, last='and')} are imported{other or near}"
    if "auto_map" in config:
        yield f"{CONFIG}: `auto_map` asks for code that comes with the weights, which is never run"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        yield f"{CONFIG}: `sliding_window` is {shown(config['sliding_window'])}, and ours attends to the whole text"
    for key in _EXPERTS:
        if config.get(key):
            yield f"{CONFIG}: `{key}` is {shown(config[key])}, and ours is no mixture of experts"
    if config.get("quantization_config") is not None:
        yield f"{CONFIG}: `quantization_config` says that values are quantised, and only plain values are read"


def _check_blocks(tensors: "Mapping[str, AnyTensor]", *, key: str, blocks: int, within: str) -> None:
    """Compare the number of blocks with the files before anything is made for each block: the number may be any.

    Raises:
        PretrainedError: The files have tensors of another number of blocks.
    """
    from ttlaunch.running.pretrained.read_folder import CONFIG, PretrainedError

    name_of_block = re.compile(rf"(?:transformer\.|model\.)?{within}\.([0-9]{{1,9}})\.")
    numbers = {int(match[1]) for name in tensors if (match := name_of_block.match(name))}
    if len(numbers) != blocks:
        raise PretrainedError(f"{CONFIG}: `{key}` is {blocks}, and the files have {counted(len(numbers), 'block')}")


def _second_head(tensors: "Mapping[str, AnyTensor]", tied_to: str) -> Iterator[str]:
    """Yield what is wrong with a head's matrix that is stored although it is that of the embedding."""
    from ttlaunch.running.checkpoints.tensor_difference import compare
    from ttlaunch.running.checkpoints.tensor_file import ComputedTensor

    head, embedding = tensors.get(_HEAD), tensors.get(tied_to)
    if isinstance(head, ComputedTensor) or isinstance(embedding, ComputedTensor):
        return  # a GGUF whose head is stored has one of its own
    if head and embedding and compare(head, embedding):
        yield (f"tensor `{_HEAD}` differs from `{tied_to}`, and `tie_word_embeddings` says that both are one matrix")


def _refuse(where: str, error: "PretrainedError", *, verb: str = "imported") -> LaunchError:
    """Return the error for every reason up to a limit; the repair stands at the last one."""
    path, reasons = shown(where, longest=_LONGEST), list(error.reasons[:_MOST_REASONS])
    if more := len(error.reasons) - len(reasons):
        reasons.append(f"{more} reasons more")
    *before, last = reasons
    found = [usage_mistake(f"{path} cannot be {verb}: {reason}") for reason in before]
    return LaunchError([*found, usage_mistake(f"{path} cannot be {verb}: {last}", error.repair)])
