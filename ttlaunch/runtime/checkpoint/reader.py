"""Read tensors back by their names, whichever ranks of whichever layout once wrote them.

A file is read only if it holds a tensor that this rank needs, and then its SHA-256 is compared first.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttlaunch.errors import TtlaunchError


class CheckpointReadError(TtlaunchError):
    """What a run is to begin from is not there any more, or does not fit the model."""

    says_all = True


@torch.no_grad()
def read_tensors(
    files: Sequence[Mapping[str, Any]],
    *,
    into: Mapping[str, Tensor],
    known: Collection[str] | None = None,
    optional: Collection[str] = (),
) -> None:
    """Overwrite tensors with those of the same names.

    Args:
        files: `path` and `sha256` of each, as the launcher found them.
        into: By name; on any device. Nothing is converted but the dtype of weights, which may be stored in a shorter one.
        known: Names that the files may have, whichever rank needs them; None: any.
        optional: Names that they may lack; then the tensor stays as it is.

    Raises:
        CheckpointReadError: A file is not what the launcher found, or lacks a name, or has another shape for it, or has
            a name that nobody knows.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only ranks that begin from files need it

    missing, strangers = set(into), set[str]()
    for entry in files:
        path = Path(entry["path"])
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                wanted = sorted(missing & names)
                strangers |= names - set(names if known is None else known)
                if wanted:
                    _verify(path, entry["sha256"])
                for key in wanted:
                    _copy(file.get_tensor(key), into[key], name=key, path=path)
        except (OSError, SafetensorError) as error:
            raise CheckpointReadError(f"{path} cannot be read: {error}") from error
        missing -= set(wanted)
    paths = ", ".join(str(entry["path"]) for entry in files)
    _check_complete(missing - set(optional), strangers, paths)


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


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointReadError(
            f"{path} differs from what the launching machine found: SHA-256 {found[:12]}…, expected {expected[:12]}…"
        )


def _copy(stored: Tensor, target: Tensor, *, name: str, path: Path) -> None:
    if stored.shape != target.shape or not stored.is_floating_point():
        found, expected = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (stored, target))
        raise CheckpointReadError(f"`{name}` of {path} is {found}, this model's is {expected}")
    target.copy_(stored)
