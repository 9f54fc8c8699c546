"""Which members keep the optimizer's state in an epoch, and which parts of the gradient each of them adds up.

    hierarchical_parallel   place 0: optimizer     place 1: aggregator     others: workers
    sync_ps, 1 server       place 0: server        place 1: worker, and the server's shadow
    sync_ps, 2 servers      place 0: server of part 0, shadow of part 1;  place 1: the other way round

The state of every part is at both *keepers*, the members at places 0 and 1. So each of them can go on alone.

Shapes: N = values of the flat vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.bucket_tuning import largest_of_several
from ttlaunch.runtime.parallel.gradients.buckets import Bucket, cut_buckets
from ttlaunch.runtime.world import Rank

KEEPERS = 2


@dataclass(frozen=True)
class Part:
    """Some parameters in a row, whose gradients one keeper adds up.

    Attributes:
        owner: The place of the member that adds up their gradients, and sends their new weights.
        buckets: Their buckets, in the order of a backward pass.
    """

    owner: Rank
    buckets: Sequence[Bucket]


@dataclass(frozen=True)
class Places:
    """The members of an epoch, from the point of view of one of them.

    Attributes:
        rank: The place of this member.
        keepers: The places of the members that keep the state.
        workers: The places of the members that differentiate micro-batches.
        parts: The parts of the gradient, in the order of a backward pass.
    """

    rank: Rank
    keepers: Sequence[Rank]
    workers: Sequence[Rank]
    parts: Sequence[Part]

    @property
    def is_keeper(self) -> bool:
        """Whether this member keeps the state."""
        return self.rank in self.keepers

    @property
    def works(self) -> bool:
        """Whether this member differentiates micro-batches."""
        return self.rank in self.workers

    @property
    def only_work(self) -> Sequence[Rank]:
        """The members that only differentiate, and get new weights from the owners."""
        return [rank for rank in self.workers if rank not in self.keepers]

    @property
    def owners(self) -> Sequence[Rank]:
        """The members that add up gradients."""
        return sorted({part.owner for part in self.parts})


def take_places(begin: Begin, number: int, *, servers: int, parts: Sequence[Part]) -> Places:
    """Return the places of the members of an epoch as the one with this number sees them; its first `servers` places differentiate nothing."""
    ranks = [Rank(place) for place in range(len(begin.seats))]
    return Places(Rank(begin.numbers.index(number)), ranks[:KEEPERS], ranks[servers:], parts)


def cut_parts(flat: FlatParameters, owners: Sequence[int]) -> list[Part]:
    """Cut the flat vectors into one part for each owner, of about equal size, and each part into buckets.

    Args:
        flat: The parameters.
        owners: The places of the owners, that of the last parameters first.

    Returns:
        The parts that have a parameter, in the order of a backward pass; the indices of their buckets go on from part to part.
    """
    whole_bytes = flat.grads_N.nbytes
    buckets = cut_buckets(
        flat.starts, bucket_bytes=min(largest_of_several(whole_bytes), -(-whole_bytes // len(owners)))
    )
    found: list[list[Bucket]] = [[] for _ in owners]
    for bucket in buckets:
        behind = flat.starts[-1] - bucket.values.stop  # how many values come before it in a backward pass
        found[behind * len(owners) // flat.starts[-1]].append(bucket)
    return [Part(Rank(owner), row) for owner, row in zip(owners, found, strict=True) if row]
