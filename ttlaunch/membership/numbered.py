"""Values that never change, of which the next one is made in little time: a mapping from the numbers of workers, and `changed`.

The state of a coordinator is a value. With a plain dictionary, each report of a worker would copy the entries of all.
"""

from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, ValuesView
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar, overload

V = TypeVar("V")
T = TypeVar("T")
_make, _set = object.__new__, object.__setattr__
_MANY = 16  # a look into blocks takes as long as copying so many values out of them
_BITS = 7  # a block has 128 numbers: with 10,000 workers, it is about as long as the list of blocks


def changed(value: T, **fields: object) -> T:
    """Do what `dataclasses.replace` does, in a fifth of its time; for classes without `__post_init__` and slots."""
    new = _make(type(value))
    _set(new, "__dict__", value.__dict__ | fields)  # the class itself refuses assignments
    return new


_NONE: dict[int, Any] = {}


class Numbers(tuple[int, ...]):  # noqa: SLOT001 - it keeps the set of its numbers
    """The numbers of some workers, sorted, among which each is found in the same time however many they are."""

    @cached_property
    def _found(self) -> frozenset[int]:
        return frozenset(self)

    def __contains__(self, number: object) -> bool:
        return number in self._found


class Numbered(Mapping[int, V]):
    """Values by the number of a worker; two are equal if they have equal values, and a dictionary is equal to one, too.

    Cost: a change copies the blocks of 128 entries that it touches, and the references to all blocks.
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
        return self.put_all({number: value})

    def put_all(self, values: Mapping[int, V]) -> "Numbered[V]":
        """Do what a `put` for each of the values does, and copy each block once; return the same mapping if there are none."""
        if not values:
            return self
        blocks, size = self._blocks.copy(), self._size
        copied: dict[int, dict[int, V]] = {}
        for number, value in values.items():
            place = number >> _BITS
            block = copied.get(place)
            if block is None:
                block = copied[place] = blocks[place] = blocks.get(place, _NONE).copy()
            size += number not in block
            block[number] = value
        return self._with(blocks, size)

    def drop(self, number: int) -> "Numbered[V]":
        """Return a mapping without this number; the same one if it has none."""
        if number not in self:
            return self
        blocks = self._blocks.copy()
        block = blocks[number >> _BITS] = blocks[number >> _BITS].copy()
        del block[number]
        return self._with(blocks, self._size - 1)

    def _with(self, blocks: dict[int, dict[int, V]], size: int) -> "Numbered[V]":
        new: Numbered[V] = _make(Numbered)
        new._blocks, new._size = blocks, size
        return new

    def among(self, numbers: Collection[int]) -> list[V]:
        """Return the values of those of the numbers that have one, in the order of the numbers."""
        values = self._for_looks(len(numbers))
        return [values[number] for number in numbers if number in values]

    def lacks(self, numbers: Collection[int]) -> list[int]:
        """Return those of the numbers that have no value."""
        values = self._for_looks(len(numbers))
        return [number for number in numbers if number not in values]

    def _for_looks(self, count: int) -> Mapping[int, V]:
        """Return what is faster to look at so many times: these blocks, or a dictionary that is made of them."""
        return self if _MANY * count < self._size else self._in_one()

    def _in_one(self) -> dict[int, V]:
        values: dict[int, V] = {}
        for block in self._blocks.values():
            values.update(block)
        return values

    def items(self) -> ItemsView[int, V]:
        """Return all numbers with their values, in a fraction of the time in which `Mapping` would."""
        return self._in_one().items()

    def values(self) -> ValuesView[V]:
        """Return the values of all numbers."""
        return self._in_one().values()

    @overload
    def get(self, number: int, /) -> V | None: ...

    @overload
    def get(self, number: int, /, default: V | T) -> V | T: ...

    def get(self, number: int, /, default: Any = None) -> Any:
        """Return the value of a number, or another one if it has none."""
        return self._blocks.get(number >> _BITS, _NONE).get(number, default)

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
