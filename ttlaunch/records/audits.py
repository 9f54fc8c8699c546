"""Digests that a rank records: of tensors that it holds, and of gradients in audits. Python 3.9, standard library only."""

from __future__ import annotations

from ttlaunch import contract
from ttlaunch.records.parser import Count, Rank, Step, Text, Time, Word, record

FLIPPED = "chaos flipped"
"""How the note begins with which a rank says that it has flipped a bit, as `ttlaunch chaos` has ordered."""


@record
class Digests:
    """The digests of the tensors that the rank holds after a step, without gaps; without `names`, those of the record before."""

    time: Time
    step: Step
    digests: Text
    names: tuple[Word, ...] | None = None


@record
class AuditClaim:
    """What a rank has computed in an audited step.

    Attributes:
        of: The rank whose micro-batches it has computed, too.
        workers: How many ranks take part.
        own: The digest of its own gradients, 64 hexadecimal digits.
        found: That of the gradients that it has computed of the micro-batches of `of`.
        computes: How it computes: the vector instructions of its processor, or the kind of its device.
    """

    time: Time
    step: Step
    of: Rank
    workers: Count
    own: Word
    found: Word
    computes: Word


@record
class AuditVote:
    """What a rank has computed of a block of micro-batches on which two ranks disagree.

    Attributes:
        of: The rank that these micro-batches belong to.
        digest: The digest of their gradients, 64 hexadecimal digits.
        parts: The digest of each part, 16 digits each, without gaps.
        first: The parts as this rank has computed them at first, if it is one of the two; else empty.
        unit: What a part is: a micro-batch, or a layer.
        begin: The number of the first part; micro-batches come in order, layers in the order of a backward pass.
    """

    time: Time
    step: Step
    of: Rank
    digest: Word
    parts: Text
    first: Text
    unit: Word
    begin: Count


AUDITS = {contract.KIND_AUDIT: AuditClaim, contract.KIND_AUDIT_VOTE: AuditVote}
"""By kind of a progress record, its class."""
