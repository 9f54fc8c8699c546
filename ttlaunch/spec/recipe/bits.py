"""Mark how the bits of a training depend on a key, where the key is defined: `key: Annotated[int, Bits.FREE] = Field(…)`.

A key without a mark counts as one that changes the bits. If a developer forgets the mark, a run with another value of the key
refuses to resume from a checkpoint; it does not silently compute other numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ttlaunch.spec.located.schema import Section, section_in


class Bits(StrEnum):
    """How the numbers of a training depend on a key; `marks` of a section marks all its keys."""

    FREE = "free"  # not at all: the division of the work, reports, paths of files
    LENGTH = "length"  # only through the learning rate, since the key sets the number of steps
    SHAPE = "shape"  # another value makes another model, for which the weights do not fit
    SENDERS = "senders"  # only if gradients are compressed: the key decides whose sums are encoded
    DEVICE = "device"  # every number is rounded otherwise; a run may go on with another value, and is told so


@dataclass(frozen=True)
class ReadOnlyWith:
    """The key is read only if another key has this value; otherwise nothing depends on it."""

    key: str
    value: Any


def marked(model: type[Section], mark: Bits) -> tuple[str, ...]:
    """Return the dotted names of all keys, and of whole sections, that have the mark."""
    return tuple(path for path, marks in _marks(model) if mark in marks)


def deciders(model: type[Section]) -> list[tuple[str, ReadOnlyWith]]:
    """Return the dotted names of keys and sections that are read only with a value of another key, each with its condition."""
    return [(path, mark) for path, marks in _marks(model) for mark in marks if isinstance(mark, ReadOnlyWith)]


def _marks(model: type[Section], prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        section = section_in(field.annotation)
        yield path, (*field.metadata, *(section.marks if section else ()))
        if section is not None:
            yield from _marks(section, f"{path}.")
