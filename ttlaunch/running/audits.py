"""Judge audits: which rank computed wrong, from what all ranks have computed of the same micro-batches.

In an audited step each rank records digests of its own gradients and of those that it computed of another rank's micro-batches. If two
ranks disagree, all ranks compute that block once more, and record what they found. This module knows digests only;
`failures/audited.py` makes the failure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.audits import AuditClaim, AuditVote

_SHORT = 16
_MOST_STEPS = 64
"""The most steps whose claims wait for those of other ranks; a rank that makes up steps cannot fill the memory."""


@dataclass(frozen=True)
class Block:
    """A block of micro-batches on which two ranks disagree in a step.

    Attributes:
        step: The step.
        owner: The rank to whose part of the step the block belongs.
        auditor: The rank that computed it, too.
        own: What the owner found, a digest.
        found: What the auditor found.
        computes: How each rank computes, by rank: vector instructions or the kind of a device.
    """

    step: int
    owner: int
    auditor: int
    own: str
    found: str
    computes: Mapping[int, str]


@dataclass(frozen=True)
class Judgement:
    """What an audit whose ranks disagree has shown about who computed wrong.

    Attributes:
        block: What was judged.
        wrong: One rank; or both if nothing shows which of them; none if they compute in different ways, and none of them is wrong.
        against: The other ranks whose results contradict the one that is wrong; empty if it contradicts itself only.
        contradicts_itself: Whether the rank that is wrong found something else when it computed again; None if it did not compute again,
            or if no single rank is wrong.
        part: Where the two differ first, such as `micro-batch 3`; None if that is not known.
    """

    block: Block
    wrong: tuple[int, ...]
    against: tuple[int, ...] = ()
    contradicts_itself: bool | None = None
    part: str | None = None


def judge(block: Block, votes: Mapping[int, AuditVote], *, hosts: Mapping[int, str]) -> Judgement:
    """Decide which of two ranks computed wrong.

    Other ranks decide, those on other hosts than the two if there are any, by their majority. Without others, or if they do not decide,
    the one of the two that finds something else when it computes again is wrong; else nothing shows which one is.

    Args:
        block: What the two have found.
        votes: What ranks found when they computed the block once more, by rank.
        hosts: The host of each rank.
    """
    part = _first_difference(block, votes)
    if block.computes.get(block.owner) != block.computes.get(block.auditor):
        return Judgement(block, (), part=part)
    claims = {block.owner: block.own, block.auditor: block.found}
    changed = {rank: votes[rank].digest != claim for rank, claim in claims.items() if rank in votes}
    decided = _decided_by_others(block, votes, hosts=hosts)
    for wrong, right in ((block.owner, block.found), (block.auditor, block.own)):
        if decided == right:
            against = tuple(sorted(rank for rank, vote in votes.items() if rank != wrong and vote.digest == right))
            return Judgement(block, (wrong,), against, changed.get(wrong), part)
    itself = [rank for rank, is_other in changed.items() if is_other]
    if decided is None and len(itself) == 1:
        return Judgement(block, (itself[0],), (), contradicts_itself=True, part=part)
    return Judgement(block, (block.owner, block.auditor), part=part)


def _decided_by_others(block: Block, votes: Mapping[int, AuditVote], *, hosts: Mapping[int, str]) -> str | None:
    """Return the digest that most of the other ranks found; None if there are none, or as many for another one."""
    two = {block.owner, block.auditor}
    others = [rank for rank in votes if rank not in two]
    elsewhere = [rank for rank in others if hosts.get(rank) not in {hosts.get(rank) for rank in two}]
    found = Counter(votes[rank].digest for rank in elsewhere or others).most_common(2)
    if not found or (len(found) > 1 and found[0][1] == found[1][1]):
        return None
    return found[0][0]


def _first_difference(block: Block, votes: Mapping[int, AuditVote]) -> str | None:
    """Return the first part of the block for which owner and auditor had other digests at first."""
    two = [votes[rank] for rank in (block.owner, block.auditor) if rank in votes]
    firsts = [[vote.first[at : at + _SHORT] for at in range(0, len(vote.first), _SHORT)] for vote in two]
    if len(firsts) < 2:  # noqa: PLR2004 - a difference is between two
        return None
    differing = (at for at, (one, other) in enumerate(zip(*firsts, strict=False)) if one != other)
    first = next(differing, None)
    if first is None:
        return None
    is_backward = two[0].unit == "layer"  # layers come in the order of a backward pass
    number = two[0].begin - first if is_backward else two[0].begin + first
    return f"{two[0].unit} {number}" if number >= 0 else None


class AuditWatch:
    """Compares what ranks have found in audited steps, as their records arrive.

    Attributes:
        clean: The last step whose audit all ranks have agreed in; None before the first.
        count: How many audits were clean.
        disputed: The first block on which two ranks disagree; None as long as there is none.
    """

    def __init__(self) -> None:
        """Begin without records."""
        self.clean: int | None = None
        self.count = 0
        self.disputed: Block | None = None
        self._claims: dict[int, dict[int, AuditClaim]] = {}
        self._votes: dict[tuple[int, int], dict[int, AuditVote]] = {}

    def take(self, rank: int, record: AuditClaim | AuditVote) -> None:
        """Enter a record; a step is compared when all that take part have recorded it."""
        if isinstance(record, AuditVote):
            if (self.disputed is not None and record.step == self.disputed.step) or (
                self.disputed is None and len(self._votes) < _MOST_STEPS
            ):
                self._votes.setdefault((record.step, record.of), {})[rank] = record
            return
        if self.disputed is not None:
            return
        claims = self._claims.setdefault(record.step, {})
        claims[rank] = record
        if len(claims) >= record.workers:
            self._compare(record.step, self._claims.pop(record.step))
        while len(self._claims) > _MOST_STEPS:
            self._claims.pop(min(self._claims))

    @property
    def unsettled(self) -> int | None:
        """The last step in which some ranks have said what they found, and others have not yet; None if there is none."""
        return max((step for step in self._claims if step > (self.clean or 0)), default=None)

    def judge(self, hosts: Mapping[int, str]) -> Judgement | None:
        """Decide who computed wrong, from the votes that have arrived; None if no two ranks disagree."""
        block = self.disputed
        if block is None:
            return None
        return judge(block, self._votes.get((block.step, block.owner), {}), hosts=hosts)

    def _compare(self, step: int, claims: Mapping[int, AuditClaim]) -> None:
        block = first_disputed(step, claims)
        if block is None:
            self.clean, self.count = max(step, self.clean or step), self.count + 1
        else:
            self.disputed = block


def first_disputed(step: int, claims: Mapping[int, AuditClaim]) -> Block | None:
    """Return the first block that its owner and its auditor computed differently; None if all agree."""
    computes = {rank: claim.computes for rank, claim in claims.items()}
    by = {claim.of: rank for rank, claim in claims.items()}
    for owner in sorted(set(by) & set(claims)):
        own, found = claims[owner].own, claims[by[owner]].found
        if own != found:
            return Block(step, owner, by[owner], own, found, computes)
    return None


def ranks_of(block: Block) -> Sequence[int]:
    """Return the two ranks that disagree, in order."""
    return sorted((block.owner, block.auditor))


def names_of(ranks: Iterable[int], hosts: Mapping[int, str]) -> list[str]:
    """Name the hosts of some ranks, each once, in order of the ranks."""
    return list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
