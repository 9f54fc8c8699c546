"""Judge replicas: which tensors that several ranks hold have different bits, and which ranks the majority contradicts.

Ranks report digests of their tensors by name. Ranks that report the same name hold the same tensor, so their digests must be
equal. This module knows digests only; `failures/difference.py` makes the failure.
"""

from collections.abc import Collection, Hashable, Mapping
from threading import Lock

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.audits import Digests

_DIGITS = 16
_MOST_STEPS = 128
"""The most steps whose digests wait for those of other ranks; a rank that makes up steps cannot fill the memory."""


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


@dataclass(frozen=True)
class _Table:
    """The digests of one rank after one step."""

    names: tuple[str, ...]
    digests: str

    def by_name(self) -> dict[str, str]:
        return {name: self.digests[_DIGITS * at :][:_DIGITS] for at, name in enumerate(self.names)}


class ReplicaWatch:
    """Compares the digests of all ranks, step by step, as their records arrive.

    The thread that completes checkpoints asks `has_agreed` while the supervisor enters records.

    Attributes:
        difference: The first difference; None as long as all digests agree. No later step is compared.
        step: The last step that was compared: that of the difference, if there is one.
        agreed: The last step whose digests agreed; None before the first.
    """

    def __init__(self) -> None:
        """Begin without records."""
        self.difference: Difference | None = None
        self.step: int | None = None
        self.agreed: int | None = None
        self._names: dict[int, tuple[str, ...]] = {}
        self._newest: dict[int, int] = {}
        self._waiting: dict[int, dict[int, _Table]] = {}
        self._reached: dict[int, int] = {}
        self._lock = Lock()

    def take(self, rank: int, record: Digests) -> None:
        """Enter a record; one whose digests do not fit its names, or whose step is not new, counts as missing."""
        with self._lock:
            names = self._names[rank] = self._names.get(rank, ()) if record.names is None else record.names
            is_new = record.step > max(self._newest.get(rank, -1), -1 if self.step is None else self.step)
            self._newest[rank] = max(record.step, self._newest.get(rank, -1))
            if is_new and len(record.digests) == _DIGITS * len(names):
                self._waiting.setdefault(record.step, {})[rank] = _Table(names, record.digests)

    def forget(self, ranks: Collection[int]) -> None:
        """Compare what these ranks have reported with nothing that others report from now on."""
        with self._lock:
            for tables in self._waiting.values():
                for rank in ranks:
                    tables.pop(rank, None)

    def settle(self, reached: Mapping[int, int]) -> None:
        """Compare the digests of every step for which no further digests can come.

        Args:
            reached: The last step that each rank has reported; a rank that is not in it has ended.
        """
        with self._lock:
            self._reached = dict(reached)
            for step in sorted(self._waiting):
                is_open = any(self._may_still_report(rank, step) for rank in self._newest)
                if self.difference is not None or (is_open and len(self._waiting) <= _MOST_STEPS):
                    return
                self._compare(step)

    def has_agreed(self, step: int, owners: Collection[int]) -> bool:
        """Whether the digests of a checkpoint's step have been compared and agree, and those of all steps before it.

        Args:
            step: The checkpoint's step.
            owners: The ranks that have written the checkpoint; each has reported its digests before.
        """
        with self._lock:
            if self.difference is not None and self.step is not None and self.step <= step:
                return False
            is_open = any(self._may_still_report(rank, step) for rank in {*self._newest, *owners})
            return not is_open and min(self._waiting, default=step + 1) > step

    def _may_still_report(self, rank: int, step: int) -> bool:
        # A rank reports a step before its digests, and these before the next step.
        return self._newest.get(rank, -1) < step and self._reached.get(rank, step + 1) <= step

    def _compare(self, step: int) -> None:
        tables = self._waiting.pop(step)
        # Nearly always all are equal, and it is enough to compare them as they are.
        self.difference = None
        if len(set(tables.values())) > 1:
            self.difference = find_difference({rank: table.by_name() for rank, table in tables.items()})
        self.step = step
        if self.difference is None:
            self.agreed = step
