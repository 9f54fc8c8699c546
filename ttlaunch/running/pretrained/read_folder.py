"""Read what a folder of a model has in the layout of Hugging Face: its configuration, and where each tensor is stored.

The folder may come from anybody. Files are opened by their plain names inside it, read once and up to a limit; nothing in
it is executed, and pickles are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch.diagnostics import shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.records.parser import BadRecord, Word, load, parse, record
from ttlaunch.records.regular_files import open_regular
from ttlaunch.running.checkpoints.tensor_file import AnyTensor, StoredTensor, TensorFileError, parse_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_TEXT = 64 * 2**20
_PIECE = 1 << 16  # a read reserves all that it asks for
_MOST_SHARDS = 10_000
_COPY_AGAIN = (
    "copy `config.json` and all weights again from where they come from: they have to be whole, and of one model"
)
_SAVE = "`save_pretrained(DIR, safe_serialization=True)` of transformers writes a folder that can be read"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")


class PretrainedError(TtlaunchError):
    """A folder or file has no model that can be read.

    Attributes:
        reasons: Every reason, each a clause that names the file.
        repair: What to do about it; by default, what helps with files that are damaged or do not belong together.
    """

    def __init__(self, *reasons: str, repair: str = _COPY_AGAIN) -> None:
        super().__init__("; ".join(reasons))
        self.reasons, self.repair = reasons, repair


@dataclass(frozen=True)
class PretrainedFolder:
    """A model as its folder describes it.

    Attributes:
        config: The content of `config.json`.
        tensors: The stored tensors by their names in the folder.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, AnyTensor]


@record
class _Index:
    """The file that says in which shard each tensor is."""

    weight_map: dict[str, Word]


def read_pretrained(where: Path) -> PretrainedFolder:
    """Read the configuration and the places of all tensors of a folder, or of a safetensors file beside its `config.json`.

    Raises:
        OSError: A file cannot be read.
        PretrainedError: A file is missing, or is not what its name says.
    """
    if where.is_dir():
        return PretrainedFolder(read_object(where / CONFIG), read_folder_tensors(where))
    refuse_pickle(where)
    tensors = _read_shard(where)
    return PretrainedFolder(read_object(Path(os.path.realpath(where)).parent / CONFIG), tensors)


def read_folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name, whether one file has them or several.

    Raises:
        OSError: A file cannot be read.
        PretrainedError: The folder has no safetensors file, or a shard has other tensors than the index says.
    """
    if (folder / WEIGHTS).exists():
        return _read_shard(folder / WEIGHTS)
    if (folder / INDEX).exists():
        return _read_shards(folder)
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if pickles:
        raise PretrainedError(
            f"{pickles[0]} is a pickle, which could run any program; only safetensors files are read", repair=_SAVE
        )
    raise PretrainedError(f"the folder has neither {WEIGHTS} nor {INDEX}", repair=_SAVE)


def refuse_pickle(path: Path) -> None:
    """Refuse a file of torch's own format, which is a pickle, often inside a zip archive.

    Raises:
        OSError: The file cannot be read.
        PretrainedError: It is one.
    """
    with open_regular(path, follow=True) as file:
        first = file.read(2)
    if first == b"PK" or first[:1] == b"\x80":
        raise PretrainedError(
            f"{path.name} is a pickle, which could run any program; only safetensors files are read", repair=_SAVE
        )


def _read_shard(path: Path) -> dict[str, StoredTensor]:
    try:
        # Caches of downloaded models are full of links; the tensors are read later by the file's own name.
        with open_regular(path, follow=True) as file:
            return parse_header(file, Path(os.path.realpath(path)))
    except TensorFileError as error:
        raise PretrainedError(f"{path.name}: {error}") from error


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = parse(_Index, read_object(folder / INDEX))
    if isinstance(index, BadRecord):
        raise PretrainedError(f"{INDEX}: {index.reason}")
    places = index.weight_map
    names = sorted(set(places.values()))
    if len(names) > _MOST_SHARDS:
        raise PretrainedError(f"{INDEX} names {len(names)} files, more than {_MOST_SHARDS}")
    outside = [name for name in names if name != os.path.basename(name) or name in {"", ".", ".."} or "\0" in name]  # noqa: PTH119 - never raises
    if outside:
        raise PretrainedError(f"{INDEX} names `{shown(outside[0])}`, which is no plain name of a file in the folder")
    found: dict[str, StoredTensor] = {}
    reasons: list[str] = []
    for name in names:
        stored = _read_shard(folder / name)
        reasons += _misplaced(name, stored, places)
        found |= stored
    if reasons:
        raise PretrainedError(*reasons)
    return found


def _misplaced(shard: str, stored: Mapping[str, StoredTensor], places: Mapping[str, str]) -> Iterator[str]:
    for tensor in sorted(stored.keys() | {tensor for tensor, place in places.items() if place == shard}):
        if tensor not in stored:
            yield f"{INDEX} says that `{shown(tensor)}` is in `{shown(shard)}`, which does not have it"
        elif places.get(tensor) != shard:
            said = f"in `{shown(places[tensor])}`" if tensor in places else "nowhere"
            yield f"`{shown(shard)}` has `{shown(tensor)}`, which {INDEX} says is {said}"


def read_object(path: Path) -> dict[str, Any]:
    """Read an object of JSON, up to a limit.

    Raises:
        OSError: The file cannot be read.
        PretrainedError: It has none, or too much.
    """
    with open_regular(path, follow=True) as file:
        data = bytearray()
        while len(data) <= _LARGEST_TEXT and (piece := file.read(min(_PIECE, _LARGEST_TEXT + 1 - len(data)))):
            data += piece
    if len(data) > _LARGEST_TEXT:
        raise PretrainedError(f"{path.name} has more than {_LARGEST_TEXT >> 20} MiB")
    content = load(bytes(data))
    if not isinstance(content, dict):
        raise PretrainedError(f"{path.name}: {content.reason if isinstance(content, BadRecord) else 'it is no object'}")
    return content
