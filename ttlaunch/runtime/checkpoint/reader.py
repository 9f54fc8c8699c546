"""Read tensors by their names from a checkpoint, regardless of the layout and ranks that wrote it.

A file is read only if it holds a tensor that this rank needs, and then its SHA-256 is compared first.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttlaunch.errors import TtlaunchError
from ttlaunch.runtime.checkpoint.image import DTYPE_NAMES
from ttlaunch.stored_parts import Part, name_of_whole, parse_part, whole_tensor

_LONG = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPE_NAMES.items()}


class CheckpointReadError(TtlaunchError):
    """The checkpoint or weights file that a run should begin from has gone, or does not fit the model."""

    message_is_complete = True


@torch.no_grad()
def read_tensors(
    files: Sequence[Mapping[str, Any]],
    *,
    into: Mapping[str, Tensor],
    known: Collection[str] | None = None,
    optional: Collection[str] = (),
) -> None:
    """Overwrite tensors of the same names from files that hold whole tensors or parts of them.

    Args:
        files: `path` and `sha256` of each, as the launcher found them. One of another library also has `names`: by our name of
            a tensor its name there, and whether that matrix is transposed; its other tensors are left alone.
        into: The tensors to overwrite, by name, on any device. A name may be that of a part. Weights may be stored in a
            shorter dtype and are then converted; nothing else is.
        known: The names that files may contain, also for other ranks; None: any.
        optional: Names that they may lack; then the tensor stays as it is.

    Raises:
        CheckpointReadError: A file is not what the launcher found, or lacks a name, or has another shape for it, or has
            a name that nobody knows.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only ranks that begin from files need it

    targets, strangers = _Targets(into), set[str]()
    for entry in files:
        path = Path(entry["path"])
        try:
            with safe_open(path, framework="pt") as opened:
                file = _Renamed(opened, entry["names"]) if "names" in entry else opened
                names = sorted(file.keys())
                found = {name_of_whole(name) for name in names}
                strangers |= found - set(found if known is None else known)
                wanted = [name for name in names if targets.lack(name)]
                if wanted:
                    _verify(path, entry["sha256"])
                for name in wanted:
                    targets.fill(name, file, path=path)
        except (OSError, SafetensorError) as error:
            raise CheckpointReadError(f"{path} cannot be read: {error}") from error
    missing = set(targets.missing) - set(optional)
    _check_complete(missing, strangers, ", ".join(str(entry["path"]) for entry in files))


def _check_complete(missing: set[str], strangers: set[str], paths: str) -> None:
    if missing:
        first, more = min(missing), len(missing) - 1
        others = f" nor {more} other tensors of this rank" if more else ""
        raise CheckpointReadError(f"no `{first}`{others} in {paths}")
    if strangers:
        first, more = min(strangers), len(strangers) - 1
        others = (
            f", nor are {more} others of its tensors" if more > 1 else ", nor is another tensor of it" if more else ""
        )
        raise CheckpointReadError(f"`{first}` of {paths} is no parameter of this model{others}")


class _Renamed:
    """An open file of another library, with our names of its tensors and its matrices as ours are."""

    def __init__(self, file: Any, names: Mapping[str, tuple[str, bool]]) -> None:
        self._file, self._names = file, names

    def keys(self) -> list[str]:
        return list(self._names)

    def get_slice(self, name: str) -> Any:
        theirs, is_transposed = self._names[name]
        stored = self._file.get_slice(theirs)
        return _Transposed(stored) if is_transposed else stored


class _Transposed:
    """A stored matrix of which rows are read as columns."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        return list(reversed(self._stored.get_shape()))

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        found: Tensor = self._stored[tuple(reversed(places))]
        return found.T


class _Targets:
    """Tensors that are to be filled, and how much of each is still missing."""

    def __init__(self, into: Mapping[str, Tensor]) -> None:
        self._into = into
        self._parts = {name: parse_part(name) or whole_tensor(name, tensor.shape) for name, tensor in into.items()}
        self._missing = {name: part.size for name, part in self._parts.items()}
        self._filled: dict[str, set[tuple[range, ...]]] = {name: set() for name in into}
        self._names: dict[str, list[str]] = {}
        for name, part in self._parts.items():
            self._names.setdefault(part.name, []).append(name)

    @property
    def missing(self) -> list[str]:
        return [name for name, values in self._missing.items() if values]

    def lack(self, stored: str) -> list[str]:
        """Return the incomplete targets that a stored tensor may help to fill."""
        part = parse_part(stored)
        names = self._names.get(name_of_whole(stored), [])
        return [
            name
            for name in names
            if self._missing[name]
            and (part is None or part.shape != self._parts[name].shape or self._places_to_fill(name, part))
        ]

    def _places_to_fill(self, name: str, part: Part) -> tuple[range, ...] | None:
        """Return where a stored part has values that a target lacks; None if it has none of them."""
        places = self._parts[name].overlap(part)
        return places if all(places) and places not in self._filled[name] else None

    def fill(self, stored: str, file: Any, *, path: Path) -> None:
        """Copy what a file has under a name to all targets that lack some of it."""
        for name in self.lack(stored):
            target, target_part, found = self._into[name], self._parts[name], file.get_slice(stored)
            part = parse_part(stored) or whole_tensor(stored, found.get_shape())
            if part.shape != target_part.shape or not found.get_dtype().startswith(("F", "BF")):
                told = (found.get_dtype(), part.shape), (DTYPE_NAMES[target.dtype], target_part.shape)
                is_now, expected = (f"{_LONG.get(dtype, dtype)} {shape}" for dtype, shape in told)
                raise CheckpointReadError(f"`{part.name}` of {path} is {is_now}, this model's is {expected}")
            places = self._places_to_fill(name, part)
            if places is not None:
                target[target_part.within(places)].copy_(found[part.within(places)])
                self._filled[name].add(places)
                self._missing[name] -= Part(name, places, part.shape).size


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointReadError(
            f"{path} differs from what the launching machine found: SHA-256 {found[:12]}…, expected {expected[:12]}…"
        )
