"""Declare a recipe's messages: how many bytes each pair of ranks moves for each operation, as a closed formula.

    def traffic(config: Config, ranks: Ranks) -> list[Traffic]:
        server = ranks.sole("server")
        return [
            Traffic("gradients", worker, server, per_step=ranks.weight_bytes(worker)) for worker in ranks.of("worker")
        ]

At the end of a run the formula is compared with what ranks have counted; see `docs/how-to/read-a-report.md`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttlaunch.spec.recipe.blocks import aligned_subtrees, contiguous_blocks
from ttlaunch.spec.recipe.sections import TrainingFile

VALUE_BYTES = 4
"""The size of a weight or a gradient, float32."""

NUMBER_BYTES = 8
"""The size of a loss, a count or a norm, float64 or int64."""

_MOST_TRIALS = 20
"""Steps in which sizes of buckets are tried."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that go from one rank to another for one operation.

    Attributes:
        operation: As the ranks' telemetry call it.
        source, dest: Ranks.
        per_step: Bytes of every step.
        per_validation: Bytes of every validation, also that before the first step, which a resumed run has too.
        once: Bytes before the first step.
        in_first_step: Bytes of the first step alone, on top of `per_step`.
        at_end: Bytes after the last step, of a run that comes to its end.
        slack: Bytes more that are as right, of messages whose number is decided in the run.
        late: Bytes that leave in steps after the one that they belong to, and so may not have left in a run that was cut.
        every: `per_step` is of those steps only that this divides, and of the last one of a training that has come to its end.
        is_measured: False for what another library sends, such as torch's own collectives, which no traffic counter sees.
    """

    operation: str
    source: int
    dest: int
    per_step: int = 0
    per_validation: int = 0
    once: int = 0
    in_first_step: int = 0
    at_end: int = 0
    slack: int = 0
    late: int = 0
    every: int = 1
    is_measured: bool = True


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run: their roles, and the sizes that each has reported.

    Attributes:
        roles: The role of each rank.
        facts: For each rank: `values` of the flat vector of its part of the model, padding included; `tensors`: its
            parameters; `validation_micro_batches` and `validation_sequences` of a validation.
    """

    roles: Sequence[str]
    facts: Sequence[Mapping[str, int]]

    def of(self, *roles: str) -> list[int]:
        """Return the ranks that have one of the roles, in order."""
        return [rank for rank, role in enumerate(self.roles) if role in roles]

    def sole(self, *roles: str) -> int:
        """Return the one rank that has one of the roles.

        Raises:
            LookupError: None has, or several have.
        """
        found = self.of(*roles)
        if len(found) != 1:
            raise LookupError(f"{len(found)} ranks have a role of {', '.join(roles)}, expected 1")
        return found[0]

    def weight_bytes(self, rank: int) -> int:
        """Return S, the bytes of the weights that a rank holds.

        Raises:
            LookupError: The rank has not said so.
        """
        return VALUE_BYTES * self.facts[rank]["values"]

    def tensors(self, rank: int) -> int:
        """Return how many parameters a rank holds.

        Raises:
            LookupError: The rank has not said so.
        """
        return self.facts[rank]["tensors"]

    def fact(self, rank: int, name: str) -> int:
        """Return what a rank has reported under a name of the recipe's own.

        Raises:
            LookupError: The rank has not said so.
        """
        return self.facts[rank][name]

    @property
    def validation_micro_batches(self) -> int:
        """Return V, the micro-batches of one validation.

        Raises:
            LookupError: No rank has said so.
        """
        return self.facts[0]["validation_micro_batches"]

    @property
    def validation_sequences(self) -> int:
        """Return the sequences of one validation.

        Raises:
            LookupError: No rank has said so.
        """
        return self.facts[0]["validation_sequences"]


Formula = Callable[[Any, Ranks], Sequence[Traffic] | None]
"""Returns the traffic for a configuration and its ranks; None if the bytes depend on what the run measures.

Raises `LookupError` if a rank has not reported a number that the formula needs.
"""


def agreed_buckets(source: int, dest: int) -> Traffic:
    """Return the traffic for the size of buckets: two numbers in one step, or in each while sizes are tried."""
    each = 2 * NUMBER_BYTES
    return Traffic("bucket_size", source, dest, in_first_step=each, slack=each * _MOST_TRIALS)


def agreed_stop(config: TrainingFile, source: int, dest: int) -> list[Traffic]:
    """Return the traffic for whether training goes on after a validation, where it may end early: three numbers."""
    if config.training_config.early_stop_patience is None:
        return []
    return [Traffic("early_stop", source, dest, per_validation=3 * NUMBER_BYTES)]


def agreed_scale(config: TrainingFile, source: int, dest: int) -> list[Traffic]:
    """Return the traffic for the loss scale, sent with the weights, where it may change: three numbers."""
    if config.training_config.precision != "fp16":
        return []
    return [Traffic("loss_scale", source, dest, per_step=3 * NUMBER_BYTES, once=3 * NUMBER_BYTES)]


def sums_of_blocks(micro_batches: int, parts: int) -> list[int]:
    """Return how many sums each rank's block of micro-batches makes: 1 where it is a node of the tree, else more.

    >>> sums_of_blocks(8, 2), sums_of_blocks(8, 3)
    ([1, 1], [2, 2, 1])
    """
    return [len(list(aligned_subtrees(block))) for block in _blocks(micro_batches, parts)]


def shares(count: int, parts: int) -> list[int]:
    """Return the lengths of `contiguous_blocks`.

    >>> shares(7, 3)
    [3, 2, 2]
    """
    return [len(block) for block in _blocks(count, parts)]


def sequences_of_blocks(sequences: int, micro_batch: int, parts: int) -> list[int]:
    """Return the number of sequences in each block of micro-batches; the last micro-batch may be smaller.

    >>> sequences_of_blocks(7, 2, 3)
    [4, 2, 1]
    """
    blocks = _blocks(-(-sequences // micro_batch), parts)
    return [max(0, min(block.stop * micro_batch, sequences) - block.start * micro_batch) for block in blocks]


def _blocks(count: int, parts: int) -> list[range]:
    return contiguous_blocks(count, parts) if parts else []
