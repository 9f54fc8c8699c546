"""Read what a run recorded of its bits step by step: digests of its tensors, and the numbers that its ranks reported."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.audits import Digests
from ttlaunch.records.ranks import StepDone
from ttlaunch.running.bad_records import progress_of

_DIGITS = 16
NUMBERS = ("loss", "grad_norm", "learning_rate")
"""The numbers of a step that are the same whenever it is computed again."""


@dataclass(frozen=True)
class StepDigests:
    """What a run recorded of its bits.

    Attributes:
        tables: By step, for each tensor the ranks that held it by the digest that they reported.
        numbers: By step and name, the number by the rank that reported it.
    """

    tables: Mapping[int, Mapping[str, Mapping[str, tuple[int, ...]]]]
    numbers: Mapping[int, Mapping[str, Mapping[int, float]]]

    @property
    def last_step(self) -> int:
        """The last step of which anything was recorded; 0 if nothing was."""
        return max((*self.tables, *self.numbers), default=0)


def read_step_digests(path: Path, ranks: Iterable[int]) -> StepDigests:
    """Read the digests and the numbers of a run from its folder; records that cannot be used are left out."""
    tables: dict[int, dict[str, dict[str, tuple[int, ...]]]] = {}
    numbers: dict[int, dict[str, dict[int, float]]] = {}
    for rank in ranks:
        names: tuple[str, ...] = ()
        for record in progress_of(path, rank):
            if isinstance(record, Digests):
                names = names if record.names is None else record.names
                if len(record.digests) != _DIGITS * len(names):
                    continue
                table = tables.setdefault(record.step, {})
                for at, name in enumerate(names):
                    holders = table.setdefault(name, {})
                    digest = record.digests[_DIGITS * at :][:_DIGITS]
                    holders[digest] = (*holders.get(digest, ()), rank)
            elif isinstance(record, StepDone):
                known = numbers.setdefault(record.step, {})
                for name in NUMBERS:
                    if name in record.values:
                        known.setdefault(name, {})[rank] = record.values[name]
    return StepDigests(tables, numbers)


@dataclass(frozen=True)
class Mismatch:
    """A tensor or a number that two recordings of a step have differently.

    Attributes:
        kind: `tensor` or `number`.
        ranks: The ranks of the first recording that have another value than the second.
    """

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Agreement:
    """How far two recordings agree over some steps.

    Attributes:
        tensors: By step, the number of tensors that both recorded, and that all have equal digests.
        numbers: By step, the number of equal numbers.
        mismatches: What differs, in the order of steps; empty if all that both recorded is equal.
    """

    tensors: Mapping[int, int]
    numbers: Mapping[int, int]
    mismatches: tuple[Mismatch, ...]

    @property
    def last_proven(self) -> int | None:
        """The last step whose digests are equal; None if no digests were compared."""
        wrong = {one.step for one in self.mismatches}
        return max((step for step, count in self.tensors.items() if count and step not in wrong), default=None)

    @property
    def first_mismatch(self) -> int | None:
        """The first step at which something differs."""
        return min((one.step for one in self.mismatches), default=None)


def compare_steps(one: StepDigests, other: StepDigests, steps: Iterable[int]) -> Agreement:
    """Compare what two recordings have of the same steps, by the names of tensors and numbers.

    Tensors are found by their names, so the recordings may come from other layouts of the same recipe. Numbers that each rank reports
    for itself, such as the losses of workers, are compared only where both have the same ranks.
    """
    tensors, numbers, wrong = dict[int, int](), dict[int, int](), list[Mismatch]()
    for step in steps:
        mine, theirs = one.tables.get(step, {}), other.tables.get(step, {})
        common = [name for name in mine if name in theirs]
        differing = [name for name in common if mine[name].keys() != theirs[name].keys()]
        tensors[step] = len(common) - len(differing)
        for name in differing:
            odd = sorted(rank for digest, ranks in mine[name].items() if digest not in theirs[name] for rank in ranks)
            wrong.append(Mismatch(step, "tensor", name, tuple(odd)))
        equal, different = _compare_numbers(one.numbers.get(step, {}), other.numbers.get(step, {}))
        numbers[step] = equal
        wrong += [Mismatch(step, "number", name) for name in different]
    return Agreement(tensors, numbers, tuple(wrong))


def _compare_numbers(
    mine: Mapping[str, Mapping[int, float]], theirs: Mapping[str, Mapping[int, float]]
) -> tuple[int, list[str]]:
    equal, different = 0, []
    for name in mine:
        if name not in theirs:
            continue
        a, b = mine[name], theirs[name]
        same_ranks = a.keys() == b.keys() or (len(a) == 1 and len(b) == 1)
        if not same_ranks:
            continue
        if sorted(map(repr, a.values())) == sorted(map(repr, b.values())):  # NaN is equal to NaN here
            equal += 1
        else:
            different.append(name)
    return equal, different
