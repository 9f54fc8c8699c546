"""Digests of the tensors that a rank holds, which the launcher compares with those of other ranks by name.

A rank computes a digest on the device of the tensor and writes it to its own records; it sends no message and waits for nobody.
Several ranks that hold a tensor under the same name must report the same digest; `ttlaunch/running/replicas.py` compares them.

Shapes: N = values of a tensor, seen as 32-bit integers; C = values of a block.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.runtime.telemetry.records import ProgressWriter
from ttlaunch.spec.recipe.sections import ConfigFile, TrainingFile

_BLOCK = 2**20
"""The values of a block; digests depend on it."""
_PIECE = 2**16
"""The most values that are multiplied at a time on a CPU: what that takes in addition stays in the processor's cache."""
_SMALL, _TOGETHER = 2**12, 2**15
"""Tensors with at most so many values are multiplied together, until they have the second number of values: a model has
hundreds of them, and a few operations on each take longer than the arithmetic."""
_ODD = 0x2545F4914F6CDD1D
_WORD_BYTES = 4


class ReplicaDigests:
    """Writes the digests of this rank's tensors after each step that is compared.

    Attributes:
        interval: The number of steps from one comparison to the next; None: only at checkpoints.
    """

    def __init__(self, interval: int | None, *, write: Callable[..., None]) -> None:
        """Write nothing yet.

        Args:
            interval: `training_config.verify_interval`.
            write: Writes a record; called with `step`, `digests`, and with `names` if these have changed.
        """
        self.interval = interval
        self._write = write
        self._names: list[str] = []
        self._last_step = -1
        self._digests = TensorDigests()

    def report(self, step: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the digests of tensors as they are after a step, unless this was already done for the step.

        Cost: one pass over the tensors on their device, and 16 bytes of a file for each.
        """
        if step <= self._last_step:
            return
        tensors = dict(named_tensors)
        if not tensors:
            return
        self._last_step = step
        names, digests = list(tensors), self._digests.of(tensors.values())
        changed = {} if names == self._names else {"names": names}
        self._names = names
        self._write(step=step, digests="".join(f"{digest % 2**64:016x}" for digest in digests), **changed)


class TensorDigests:
    """Computes digests of tensors on their devices."""

    def __init__(self) -> None:
        """Compute the factors when they are first needed."""
        self._factors: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def of(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the digest of each tensor, a signed whole number of 64 bits, after a single wait for each device."""
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for place, words in enumerate(map(as_words, tensors)):
            by_device.setdefault(words.device, []).append((place, words))
        found: dict[int, int] = {}
        for device, some in by_device.items():
            groups = _grouped(some)
            factors = self._factors_for(max(words.numel() for _, words in some), device)
            sums = torch.cat([_digests([words for _, words in group], factors) for group in groups])
            found |= zip((place for group in groups for place, _ in group), sums.tolist(), strict=True)
        return [found[place] for place in range(len(found))]

    def _factors_for(self, longest: int, device: torch.device) -> Tensor:
        known, wanted = self._factors.get(device), min(_BLOCK, longest)
        if known is None or known.numel() < wanted:
            known = self._factors[device] = odd_factors(wanted, device)
        return known


def _grouped(placed: Sequence[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
    """Group small tensors whose digests are computed together; every other one is alone."""
    groups: list[list[tuple[int, Tensor]]] = []
    room = 0
    for place, words in placed:
        count = words.numel()
        if not 0 < count <= _SMALL or words.dtype != torch.int32:
            groups.insert(0, [(place, words)])
        elif count <= room:
            groups[-1].append((place, words))
            room -= count
        else:
            groups.append([(place, words)])
            room = _TOGETHER - count
    return groups


def _digests(words: Sequence[Tensor], factors_C: Tensor) -> Tensor:
    """Compute the digests of the tensors of a group, shape `(tensors,)`: differences of the sums up to the end of each."""
    if len(words) == 1:
        return digest(words[0], factors_C).view(1)
    counts = [one.numel() for one in words]
    products_N = torch.cat([factors_C[:count] for count in counts]).mul_(torch.cat(list(words)))
    sums_N = torch.cumsum(products_N, 0, out=products_N)
    ends = torch.tensor([end - 1 for end in accumulate(counts)], device=sums_N.device)
    return torch.diff(sums_N[ends], prepend=sums_N.new_zeros(1))


def make_digests(cfg: ConfigFile, records: ProgressWriter) -> ReplicaDigests | None:
    """Make what writes a rank's digests, also for a single rank, whose replay is compared with them; None if the recipe trains nothing."""
    if not isinstance(cfg, TrainingFile):
        return None
    return ReplicaDigests(cfg.training_config.verify_interval, write=partial(records.write, contract.KIND_DIGESTS))


def factor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return what the factors for digests of these tensors take; they are kept from the first comparison on."""
    longest = max((len(as_words(tensor)) for tensor in tensors), default=0)
    return torch.int64.itemsize * min(_BLOCK, longest)


def as_words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as 32-bit integers, shape `(N,)`; as bytes if their number is no multiple of four."""
    values = tensor.detach().reshape(-1)
    if values.element_size() == _WORD_BYTES:
        return values.view(torch.int32)
    bits = values.view(torch.uint8)
    return bits if bits.numel() % _WORD_BYTES else bits.view(torch.int32)


def digest(words_N: Tensor, factors_C: Tensor) -> Tensor:
    """Compute a 64-bit digest as a tensor without dimensions, int64.

    The digest is the sum of all values, each multiplied by an odd number of its own, modulo 2**64. An odd number has an inverse
    there, so a change of one value, such as any flipped bits of one float32, always changes the digest. The numbers follow no
    pattern, so a change of several values keeps the digest with a probability of about 2**-64, unless somebody has computed
    the change for this purpose. Integers are added exactly: the digest depends neither on the order nor on the device.

    Args:
        words_N: The values, from `as_words`.
        factors_C: `odd_factors`, at least as many as there are values or as a block has.
    """
    first, *rest = words_N.split(_BLOCK) if words_N.numel() > _BLOCK else (words_N,)
    total = _sum_of_products(first, factors_C)
    for block in rest:
        total = total * _ODD + _sum_of_products(block, factors_C)
    return total


def _sum_of_products(block_C: Tensor, factors_C: Tensor) -> Tensor:
    pieces = zip(_pieces(block_C), _pieces(factors_C[: block_C.numel()]), strict=True)
    sums = [(piece * factors).sum() for piece, factors in pieces]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _pieces(values_C: Tensor) -> Sequence[Tensor]:
    """Cut values into pieces; not on an accelerator, where every operation has its own cost."""
    return values_C.split(_PIECE) if values_C.device.type == "cpu" and values_C.numel() > _PIECE else (values_C,)


def odd_factors(count: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, int64, shape `(count,)`; equal on all machines.

    Source: the mixing steps are those of G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
        OOPSLA 2014, with signed shifts.
    """
    factors = torch.arange(1, count + 1, device=device)
    for mixed in _pieces(factors):
        mixed.mul_(-0x61C8864680B583EB)
        mixed.bitwise_xor_(mixed >> 30).mul_(-0x40A7B892E31B1A47)
        mixed.bitwise_xor_(mixed >> 27).mul_(-0x6B2FB644ECCEEE15)
        mixed.bitwise_xor_(mixed >> 31).bitwise_or_(1)
    return factors
