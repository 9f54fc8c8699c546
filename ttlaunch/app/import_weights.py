"""Import a model that another library saved, as weights with which a training of ours can begin."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.diagnostics import LaunchError, counted, did_you_mean, file_error, shown, usage_error, usage_mistake
from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.running.checkpoints.tensor_file import FiledTensor, Transposed
    from ttlaunch.running.pretrained.read_folder import PretrainedFolder

_KNOWN = ("gpt2",)
_FILES = ("model.safetensors", "model.safetensors.index.json")
_MOST_REASONS = 20
_BLOCK = re.compile(r"(?:transformer\.)?h\.([0-9]{1,9})\.")
_LONGEST = 300
_HINT = "a folder has `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`"


@dataclass(frozen=True)
class Pretrained:
    """A model that can be imported.

    Attributes:
        weights: Its tensors under our names, in our shapes.
        sizes: The keys of `transformer_config` that describe it.
        vocabulary: Rows of its embedding.
    """

    weights: "Mapping[str, FiledTensor | Transposed]"
    sizes: Mapping[str, Any]
    vocabulary: int


def find_pretrained(where: str) -> Pretrained:
    """Read a folder in the layout of Hugging Face, or a safetensors file beside its `config.json`, and check every tensor.

    Raises:
        LaunchError: It has no model that ours can be; every reason, up to a limit.
    """
    from ttlaunch.running.pretrained.read_folder import PretrainedError, read_pretrained

    if not where.strip():
        raise usage_error("an empty text names no folder and no file", _HINT)
    try:
        folder = read_pretrained(Path(where))
        return _as_ours(folder)
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError):  # a NUL in the path
            raise usage_error(f"{shown(where, longest=_LONGEST)} names no folder and no file", _HINT) from error
        name = Path(str(error.filename or where)).name
        raise file_error(f"{where}: {name}" if name != Path(where).name else where, error, verb="read") from error
    except PretrainedError as error:
        raise _refuse(where, list(error.reasons)) from error


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

    try:
        write_tensors(to, model.weights, wrote=wrote)
        with to.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        was_read = error.filename in {str(one.path) for one in model.weights.values()}
        raise file_error(source if was_read else to, error, verb="read" if was_read else "written") from error


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
        raise _refuse(folder, list(error.reasons), verb=verb) from error


def _as_ours(folder: "PretrainedFolder") -> Pretrained:
    """Return a model under our names.

    Raises:
        PretrainedError: Ours cannot be it; every reason.
    """
    from ttlaunch.running.pretrained.account import account_for
    from ttlaunch.running.pretrained.gpt2 import (
        from_gpt2,
        gpt2_shapes,
        parse_gpt2_config,
        sizes_of_gpt2,
        without_buffers,
    )
    from ttlaunch.running.pretrained.read_folder import PretrainedError

    reasons = list(_other_model(folder.config))
    if reasons:
        raise PretrainedError(*reasons)
    config = parse_gpt2_config(folder.config)
    _check_blocks(config.n_layer, folder.tensors)
    tensors, shapes = without_buffers(folder.tensors), gpt2_shapes(config)
    if config.tie_word_embeddings:
        reasons += _second_head(tensors)
        tensors.pop("lm_head.weight", None)
    reasons += account_for(tensors, shapes)
    if reasons:
        raise PretrainedError(*reasons)
    return Pretrained(from_gpt2(tensors, config), sizes_of_gpt2(config), config.vocab_size)


def _other_model(config: Mapping[str, Any]) -> Iterator[str]:
    from ttlaunch.running.pretrained.read_folder import CONFIG

    kind = config.get("model_type")
    if kind not in _KNOWN:
        nearest = "".join(did_you_mean(kind, _KNOWN)) if isinstance(kind, str) else ""
        said = f"`model_type` is {shown(repr(kind))}" if "model_type" in config else "`model_type` is missing"
        yield f"{CONFIG}: {said}, and only `gpt2` is imported" + (f"; {nearest}" if nearest else "")
    if "auto_map" in config:
        yield f"{CONFIG}: `auto_map` asks for code that comes with the weights, which is never run"
    if config.get("quantization_config") is not None:
        yield f"{CONFIG}: `quantization_config` says that values are quantised, and only plain values are read"


def _check_blocks(blocks: int, tensors: "Mapping[str, FiledTensor]") -> None:
    """Compare the number of blocks with the files before anything is made for each block: the number may be any.

    Raises:
        PretrainedError: The files have tensors of another number of blocks.
    """
    from ttlaunch.running.pretrained.read_folder import CONFIG, PretrainedError

    numbers = {int(match[1]) for name in tensors if (match := _BLOCK.match(name))}
    if len(numbers) != blocks:
        raise PretrainedError(f"{CONFIG}: `n_layer` is {blocks}, and the files have {counted(len(numbers), 'block')}")


def _second_head(tensors: "Mapping[str, FiledTensor]") -> Iterator[str]:
    """Yield what is wrong with a head's matrix that is stored although it is that of the embedding."""
    from ttlaunch.running.checkpoints.tensor_difference import compare

    head, embedding = tensors.get("lm_head.weight"), tensors.get("transformer.wte.weight")
    if head and embedding and compare(head, embedding):
        yield (
            "tensor `lm_head.weight` differs from `transformer.wte.weight`, and `tie_word_embeddings` says that both are "
            "one matrix"
        )


def _refuse(where: str, reasons: list[str], *, verb: str = "imported") -> LaunchError:
    path = shown(where, longest=_LONGEST)
    found = [usage_mistake(f"{path} cannot be {verb}: {reason}") for reason in reasons[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        found.append(usage_mistake(f"{path} cannot be {verb}: {len(reasons) - _MOST_REASONS} reasons more"))
    return LaunchError(found)
