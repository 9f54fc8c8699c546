"""Declare a recipe's messages: how many bytes each pair of ranks moves for each operation, as a closed formula.

    def traffic(config: Config, ranks: Ranks) -> list[Traffic]:
        server = ranks.sole("server")
        return [
            Traffic("gradients", worker, server, per_step=ranks.weight_bytes(worker)) for worker in ranks.of("worker")
        ]

At the end of a run the formula is compared with what ranks have counted; see `docs/how-to/read-a-report.md`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ttlaunch.spec.recipe.blocks import aligned_subtrees, contiguous_blocks
from ttlaunch.spec.recipe.sections import TrainingFile

VALUE_BYTES = 4
"""The size of a weight or a gradient, float32."""

NUMBER_BYTES = 8
"""The size of a loss, a count or a norm, float64 or int64."""

_MOST_TRIALS = 20
"""The largest number of steps in which sizes of buckets are tried."""


class Traffic(NamedTuple):
    """The bytes that go from one rank to another for one operation; a tuple, because a thousand ranks have a million pairs.

    Attributes:
        operation: The name of the operation in the ranks' telemetry.
        source, dest: The ranks.
        per_step: Bytes of every step.
        per_validation: Bytes of every validation, including the one before the first step, which a resumed run has too.
        once: Bytes before the first step.
        in_first_step: Bytes of the first step alone, on top of `per_step`.
        at_end: Bytes after the last step, in a run that completes.
        slack: How many more bytes are correct too, because the run decides the number of some messages.
        late: Bytes that are sent only after the step to which they belong; a run that is cut short may not have sent them.
        every: `per_step` applies only to steps divisible by this number, and to the last step of a complete training.
        at_last: Whether it applies to that last step, too, if the number does not divide it.
        is_measured: False for bytes that another library sends, such as torch's own collectives: no traffic counter sees
            them.
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
    at_last: bool = True
    is_measured: bool = True


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run: their roles, and the sizes that each has reported.

    Attributes:
        roles: The role of each rank.
        facts: The numbers that each rank reported: `values`, the length of the flat vector of its part of the model with
            padding; `tensors`, how many parameters it has; `validation_micro_batches` and `validation_sequences`, how many
            one validation has.
        blocks: The first micro-batch of each rank's block of a step, and one past its last, in an elastic run, where slow workers get
            smaller ones; None: blocks are as equal as possible.
    """

    roles: Sequence[str]
    facts: Sequence[Mapping[str, int]]
    blocks: Sequence[tuple[int, int]] | None = None

    def of(self, *roles: str) -> list[int]:
        """Return the ranks that have one of the roles, in order."""
        return [rank for rank, role in enumerate(self.roles) if role in roles]

    def sole(self, *roles: str) -> int:
        """Return the one rank that has one of the roles.

        Raises:
            LookupError: No rank has such a role, or several have.
        """
        found = self.of(*roles)
        if len(found) != 1:
            raise LookupError(f"{len(found)} ranks have a role of {', '.join(roles)}, expected 1")
        return found[0]

    def weight_bytes(self, rank: int) -> int:
        """Return S, the bytes of the weights that a rank holds.

        Raises:
            LookupError: The rank has not reported it.
        """
        return VALUE_BYTES * self.facts[rank]["values"]

    def tensors(self, rank: int) -> int:
        """Return how many parameters a rank holds.

        Raises:
            LookupError: The rank has not reported it.
        """
        return self.facts[rank]["tensors"]

    def fact(self, rank: int, name: str) -> int:
        """Return the number that a rank has reported under a name that the recipe defines.

        Raises:
            LookupError: The rank has not reported it.
        """
        return self.facts[rank][name]

    @property
    def validation_micro_batches(self) -> int:
        """Return V, the micro-batches of one validation.

        Raises:
            LookupError: No rank has reported it.
        """
        return self.facts[0]["validation_micro_batches"]

    @property
    def validation_sequences(self) -> int:
        """Return the sequences of one validation.

        Raises:
            LookupError: No rank has reported it.
        """
        return self.facts[0]["validation_sequences"]


Formula = Callable[[Any, Ranks], Sequence[Traffic] | None]
"""Returns the traffic for a configuration and its ranks; None if the bytes depend on what the run measures.

Raises `LookupError` if a rank has not reported a number that the formula needs.
"""


AUDIT_BYTES = 72
"""What a worker sends to each other one in an audit: two digests of 32 bytes, and one of how it computes."""


def audit_traffic(config: TrainingFile, workers: Sequence[int]) -> list[Traffic]:
    """Return the traffic of audits between workers: `AUDIT_BYTES` in each audited step; none if there are no audits."""
    interval = config.training_config.audit_interval
    if interval is None:
        return []
    return [
        Traffic("audit", one, other, per_step=AUDIT_BYTES, every=interval, at_last=False)
        for one in workers
        for other in workers
        if one != other
    ]


def agreed_buckets(source: int, dest: int) -> Traffic:
    """Return the traffic to agree on the size of buckets: two numbers in the first step, or in each step that tries a size."""
    each = 2 * NUMBER_BYTES
    return Traffic("bucket_size", source, dest, in_first_step=each, slack=each * _MOST_TRIALS)


def agreed_stop(config: TrainingFile, source: int, dest: int) -> list[Traffic]:
    """Return the traffic to agree after a validation whether training ends early: three numbers; none if it cannot."""
    if config.training_config.early_stop_patience is None:
        return []
    return [Traffic("early_stop", source, dest, per_validation=3 * NUMBER_BYTES)]


def agreed_scale(config: TrainingFile, source: int, dest: int) -> list[Traffic]:
    """Return the traffic of the loss scale, three numbers sent with the weights; none if the precision has no scale."""
    if config.training_config.precision != "fp16":
        return []
    return [Traffic("loss_scale", source, dest, per_step=3 * NUMBER_BYTES, once=3 * NUMBER_BYTES)]


def sums_of_blocks(micro_batches: int, parts: int) -> list[int]:
    """Return how many sums each rank sends for its block of micro-batches: 1 if the block is a subtree, otherwise more.

    >>> sums_of_blocks(8, 2), sums_of_blocks(8, 3)
    ([1, 1], [2, 2, 1])
    """
    return sums_of(_blocks(micro_batches, parts))


def sums_of(blocks: Iterable[range]) -> list[int]:
    """Return how many sums each rank sends for its block.

    >>> sums_of([range(0, 2), range(2, 8)])
    [1, 2]
    """
    return [len(list(aligned_subtrees(block))) for block in blocks]


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
