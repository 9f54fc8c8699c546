"""Judge replicas: which tensors that several ranks hold have different bits, and which ranks the majority contradicts.

Ranks report digests of their tensors by name. Ranks that report the same name hold the same tensor, so their digests must be
equal. This module knows digests only; `failures/difference.py` makes the failure.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Tensors that several ranks hold with different bits.

    Attributes:
        name: The first tensor that differs, in the order in which ranks list theirs; if possible, one with a majority.
        sides: The ranks that hold this tensor, those with equal bits together; the side with most ranks comes first.
        others: All further tensors that differ.
    """

    name: str
    sides: tuple[tuple[int, ...], ...]
    others: tuple[str, ...] = ()

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that more than half of the copies contradict; empty if no side has more than half."""
        first, *rest = self.sides
        copies = sum(map(len, self.sides))
        return tuple(sorted(rank for side in rest for rank in side)) if 2 * len(first) > copies else ()


def find_difference(tables: Mapping[int, Mapping[str, Hashable]]) -> Difference | None:
    """Find the tensors whose digests differ between ranks; None if all ranks that hold a tensor agree.

    Args:
        tables: For each rank, its digests by the name of the tensor.
    """
    first: dict[str, Hashable] = {}
    differing = dict.fromkeys(
        name for table in tables.values() for name, digest in table.items() if first.setdefault(name, digest) != digest
    )
    found = [Difference(name, _sides(tables, name)) for name in differing]
    if not found:
        return None
    chosen = next((one for one in found if one.odd), found[0])
    return Difference(chosen.name, chosen.sides, tuple(name for name in differing if name != chosen.name))


def _sides(tables: Mapping[int, Mapping[str, Hashable]], name: str) -> tuple[tuple[int, ...], ...]:
    sides: dict[Hashable, list[int]] = {}
    for rank, table in sorted(tables.items()):
        if name in table:
            sides.setdefault(table[name], []).append(rank)
    return tuple(tuple(side) for side in sorted(sides.values(), key=lambda side: (-len(side), side)))
