"""Values that never change, of which the next one is made in little time: a mapping from the numbers of workers, and `changed`.

The state of a coordinator is a value. With a plain dictionary, each report of a worker would copy the entries of all.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

V = TypeVar("V")
T = TypeVar("T")
_BITS = 7  # a block has 128 numbers: with 10,000 workers, it is about as long as the list of blocks


def changed(value: T, **fields: object) -> T:
    """Do what `dataclasses.replace` does, in a fifth of its time; for classes without `__post_init__` and slots."""
    new = object.__new__(type(value))
    new.__dict__.update(value.__dict__)
    new.__dict__.update(fields)
    return new


class Numbered(Mapping[int, V]):
    """Values by the number of a worker; two are equal if they have equal values, and a dictionary is equal to one, too.

    Cost: `put` and `drop` copy one block of 128 entries, and the references to all blocks.
    """

    __slots__ = ("_blocks", "_size")

    def __init__(self, items: Mapping[int, V] | Iterable[tuple[int, V]] = ()) -> None:
        """Have these values."""
        self._blocks: dict[int, dict[int, V]] = {}
        for number, value in items.items() if isinstance(items, Mapping) else items:
            self._blocks.setdefault(number >> _BITS, {})[number] = value
        self._size = sum(map(len, self._blocks.values()))

    def put(self, number: int, value: V) -> "Numbered[V]":
        """Return a mapping with this value in the place of the one that the number had, if it had any."""
        block = self._blocks.get(number >> _BITS, {})
        return self._with_block(number, {**block, number: value})

    def drop(self, number: int) -> "Numbered[V]":
        """Return a mapping without this number; the same one if it has none."""
        if number not in self:
            return self
        block = self._blocks[number >> _BITS]
        return self._with_block(number, {other: value for other, value in block.items() if other != number})

    def _with_block(self, number: int, block: dict[int, V]) -> "Numbered[V]":
        key = number >> _BITS
        new: Numbered[V] = object.__new__(Numbered)
        new._blocks = {**self._blocks, key: block}
        new._size = self._size - len(self._blocks.get(key, ())) + len(block)
        return new

    def lacks(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the numbers that have no value."""
        blocks = self._blocks
        return [number for number in numbers if number not in blocks.get(number >> _BITS, ())]

    def __getitem__(self, number: int) -> V:
        return self._blocks[number >> _BITS][number]

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number in self._blocks.get(number >> _BITS, ())

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._blocks.values())

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Numbered({dict(self)})"
