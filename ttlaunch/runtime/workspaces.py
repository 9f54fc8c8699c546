"""What the libraries that compute take beside tensors: found by computing, in the process that predicts, because it depends on the processor.

A library of matrix products copies its operands to memory of its own, in the order in which it reads them, and keeps that memory. How much that
is follows from the shapes, above all from the number of columns of the result, and from the order of the products.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.training.optimizers import build_optimizer, global_norm
from ttlaunch.runtime.training.passes import differentiate
from ttlaunch.spec.recipe.sections import TrainingFile

_MATRICES_AT = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}
_INNER, _ROWS, _COLUMNS, _RESULT = 256, 512, 2**16, 4 * 2**20
"""The largest product that is computed, and the most values of its result: libraries divide longer sums and columns into pieces of at most so many."""
_LONGEST_S = 60.0
_TINY = {"embedding_dim": 32, "num_heads": 2, "num_blocks": 1, "max_sequence_length": 16}


@dataclass(frozen=True)
class Resident:
    """Memory of this process: its own, and pages of files, which all processes of a host share."""

    own: int
    shared: int

    def __sub__(self, other: "Resident") -> "Resident":
        return Resident(max(0, self.own - other.own), max(0, self.shared - other.shared))

    @property
    def together(self) -> int:
        return self.own + self.shared


def resident() -> Resident:
    """Return what this process has in memory now."""
    _, whole, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    page = os.sysconf("SC_PAGE_SIZE")
    return Resident((whole - shared) * page, shared * page)


def grown_by(action: Callable[[], object]) -> Resident:
    """Return by how much this process is larger after an action than before."""
    before = resident()
    action()
    return resident() - before


def take_small_step() -> None:
    """Do once all that a step of training does in one process, with values: afterwards, torch has loaded what a step needs."""
    cfg = TrainingFile.model_validate({"transformer_config": _TINY})
    model = Model(cfg, vocabulary=64, blocks=range(1), has_embedding=True, has_head=True)
    model.flatten(torch.device("cpu"))
    optimizer = build_optimizer(cfg, model, total_steps=1)
    tokens_BT = torch.zeros((2, _TINY["max_sequence_length"]), dtype=torch.int64)
    differentiate(model, tokens_BT, tokens_BT, masks=model.masks(1, 0))
    model.take_gradients()
    optimizer.step(1, norm=global_norm(optimizer.squared_norms()))


@dataclass(frozen=True)
class Product:
    """A matrix product of `rows × inner` by `inner × columns`, either of which may lie in memory by columns."""

    rows: int
    inner: int
    columns: int
    first_by_columns: bool
    second_by_columns: bool
    dtype: torch.dtype

    def shortened(self) -> "Product":
        """Return one that is quickly computed, and for which a library keeps as much."""
        columns = min(self.columns, _COLUMNS)
        rows = min(self.rows, _ROWS, max(1, _RESULT // columns))
        return replace(self, rows=rows, inner=min(self.inner, _INNER), columns=columns)

    def compute(self) -> None:
        """Compute it, of whatever values: nobody reads the result."""
        first = _matrix(self.rows, self.inner, self.dtype, by_columns=self.first_by_columns)
        torch.mm(first, _matrix(self.inner, self.columns, self.dtype, by_columns=self.second_by_columns))


def _matrix(rows: int, columns: int, dtype: torch.dtype, *, by_columns: bool) -> Tensor:
    return torch.empty(columns, rows, dtype=dtype).t() if by_columns else torch.empty(rows, columns, dtype=dtype)


class Products:
    """The different matrix products that a rank computes, in the order in which it first does."""

    def __init__(self) -> None:
        self._found: dict[Product, None] = {}

    def note(self, func: Any, args: tuple[Any, ...], _kwargs: Mapping[str, Any], *, out: Any) -> None:
        """Note an operation if it is one; `Hollow` calls it."""
        at = _MATRICES_AT.get(func._overloadpacket)  # noqa: SLF001
        if at is not None and out is not None:
            first, second = args[at], args[at + 1]
            (rows, inner), columns = first.shape[-2:], second.shape[-1]
            found = Product(rows, inner, columns, _by_columns(first), _by_columns(second), out.dtype)
            self._found.setdefault(found.shortened())

    def __iter__(self) -> Iterator[Product]:
        return iter(self._found)


def _by_columns(matrix: Tensor) -> bool:
    return matrix.stride(-2) == 1 and matrix.stride(-1) != 1


def kept_by(products: Sequence[Product], *, threads: int) -> int:
    """Return how many bytes the library of matrix products keeps once it has computed these; in a fork, because it keeps them.

    It is 0 if the fork does not answer in time: where a trainer has computed with several threads as it was imported, those do not
    exist in the fork, and a library may wait for them for ever.

    Args:
        products: In the order in which they are computed.
        threads: With how many threads a rank computes.
    """
    if not products:
        return 0
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(threads)
            os.write(write, str(grown_by(partial(_compute, products)).own).encode("ascii"))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        said = answer.read() if select.select([answer], [], [], _LONGEST_S)[0] else b""
    os.kill(child, signal.SIGKILL)  # it has ended, unless it does not answer
    os.waitpid(child, 0)
    return int(said or 0)


def _compute(products: Sequence[Product]) -> None:
    for one in products:
        one.compute()
