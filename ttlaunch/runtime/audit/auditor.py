"""A rank's part in an audit: compute the micro-batches of another rank, compare digests, and compute again if two ranks disagree.

    audit = ctx.auditor.begin(cfg, step)            # None in a step without an audit
    if audit is not None:
        audit.found = compute(audit.block)          # what another rank computes in this step, too
    ...                                             # this rank's own micro-batches; audit.own gets their gradients
    if audit is not None:
        audit.settle(again=compute)                 # before any weight changes

All ranks audit in the same step, so nobody waits for a single auditor, and all still have the weights of the step if two disagree.
Nothing that the training uses is changed: the bits of a run are those without audits.

Shapes: W = ranks that take part.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.errors import TtlaunchError
from ttlaunch.runtime.audit.schedule import audited_place
from ttlaunch.runtime.checkpoint.digests import TensorDigests
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.elastic.member import ElasticMember
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank, World
from ttlaunch.spec.recipe.sections import TrainingFile

_TAG = 30_080
_DIGEST, _SHORT = 32, 8
MICRO_BATCH, LAYER = "micro-batch", "layer"


class AuditError(TtlaunchError):
    """Two ranks have computed different gradients of the same micro-batches."""

    message_is_complete = True


class BlockDigest:
    """The digest of the gradients of a block of micro-batches: 32 bytes of all, and 8 bytes of each part of them."""

    def __init__(self, digests: TensorDigests) -> None:
        """Begin with nothing; `digests` computes those of tensors."""
        self._digests = digests
        self._all = hashlib.sha256()
        self.parts: list[bytes] = []

    def add(self, tensors: Iterable[Tensor], *, loss: float = 0.0, tokens: int = 0) -> None:
        """Enter the next part: the gradients of a micro-batch with its loss and tokens, or the sums of a layer.

        Cost: one pass over the tensors on their device, and one wait for it.
        """
        values = [one % 2**64 for one in self._digests.of(tensors)]
        part = hashlib.sha256(struct.pack(f"<{len(values)}Qdq", *values, loss, tokens)).digest()
        self._all.update(part)
        self.parts.append(part[:_SHORT])

    @property
    def sha256(self) -> bytes:
        return self._all.digest()


class HasRole(Communicator, Protocol):
    """The part of a rank's context that an auditor needs."""

    @property
    def role(self) -> str: ...

    @property
    def elastic(self) -> ElasticMember | None: ...


class Auditor:
    """Takes part in the audits of a run, with all ranks of the same role.

    Attributes:
        is_on: Whether it takes part in any; not in a replay, which is compared with the digests of its run.
        is_computing: Whether this rank computes for an audit right now, and not for its training.
        among: The ranks that take part in the audit that began last.
        numbers, hosts: Their numbers in records, which in an elastic run are those of workers; and their hosts.
    """

    def __init__(self, ctx: HasRole, *, world: World, device: torch.device, write: Callable[..., None]) -> None:
        """Send nothing yet; `write` writes a record of a kind."""
        self.ctx, self.write = ctx, write
        self.is_on, self.is_computing = True, False
        self.digests = TensorDigests()
        self._world, self._device = world, device
        self.among: Sequence[Rank] = ()
        self.numbers: Sequence[int] = ()
        self.hosts: Sequence[str] = ()

    @property
    def place(self) -> int:
        """The place of this rank among those that take part, in the order of their blocks."""
        return self.among.index(self.ctx.rank)

    @property
    def computes(self) -> str:
        """What may make two machines round in different ways: vector instructions, or the kind of device."""
        if self._device.type == "cuda":
            return str(torch.cuda.get_device_name(self._device))
        return str(torch.backends.cpu.get_cpu_capability())

    def begin(self, cfg: TrainingFile, step: int) -> "Audit | None":
        """Begin the audit of a step, if one is due: on all ranks of a role alike, every `training_config.audit_interval` steps.

        Raises:
            EpochOverError: The members of an elastic run change.
        """
        interval, member = cfg.training_config.audit_interval, self.ctx.elastic
        if interval is None or not self.is_on:
            return None
        if member is not None:
            return self._begin_among_members(member, step, interval=interval)
        if step % interval:
            return None
        self.among = self.numbers = self._world.ranks(self.ctx.role)
        self.hosts = [self._world.hosts[rank] for rank in self.among]
        blocks = contiguous_blocks(cfg.training_config.micro_batches, len(self.among))
        return Audit(self, step, number=step // interval, blocks=blocks)

    def _begin_among_members(self, member: ElasticMember, step: int, *, interval: int) -> "Audit | None":
        """Begin the audit of a step among the members of an epoch that compute micro-batches.

        In the first step of an epoch, members complete what others have begun, in no blocks; its audit is that of the second step.
        """
        if member.follows or member.is_first_step():
            return None
        order = member.begin
        is_put_off = (step - 1) % interval == 0 and step == order.applied + 2
        places = [Rank(place) for place, (first, stop) in enumerate(order.blocks) if first < stop]
        if (step % interval and not is_put_off) or len(places) < 2:  # noqa: PLR2004 - one computes, another one compares
            return None
        self.among = places
        self.numbers = [order.numbers[place] for place in places]
        self.hosts = [order.seats[place].host for place in places]
        blocks = [range(*order.blocks[place]) for place in places]
        return Audit(self, step, number=step // interval, blocks=blocks)

    def all_gather(self, own: bytes) -> list[bytes]:
        """Send some bytes to every other rank that takes part, and return those of all, in order.

        Cost: one message to each of the W - 1 others.
        Order: all receives begin before the sends, and end in the order of places; nothing is added up.
        """
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        buffers = {place: torch.empty_like(sent) for place in range(len(self.among)) if place != self.place}
        with operation(self.ctx, "audit"):
            arriving = [self.ctx.irecv(buffer, source=self.among[place], tag=_TAG) for place, buffer in buffers.items()]
            sending = [self.ctx.isend(sent, dest=self.among[place], tag=_TAG) for place in buffers]
            for message in (*arriving, *sending):
                message.wait()
        return [own if place == self.place else bytes(buffers[place].tolist()) for place in range(len(self.among))]


class Audit:
    """The audit of one step on one rank.

    Attributes:
        step: The step.
        block: The micro-batches of another rank, which this one computes, too.
        own_block: Those of this rank.
        own: The digest of this rank's own gradients, to be filled.
        found: That of the gradients of `block`; None until it is known.
    """

    def __init__(self, auditor: Auditor, step: int, *, number: int, blocks: Sequence[range]) -> None:
        self.step = step
        self._auditor, self._blocks = auditor, blocks
        places = range(len(blocks))
        self._audited = [audited_place(place, hosts=auditor.hosts, number=number) for place in places]
        self.block = blocks[self._audited[auditor.place]]
        self.own_block = blocks[auditor.place]
        self.own = self.digest()
        self.found: BlockDigest | None = None

    def digest(self) -> BlockDigest:
        """Return an empty digest."""
        return BlockDigest(self._auditor.digests)

    @contextmanager
    def computing(self, model: Model) -> Iterator[None]:
        """Compute for an audit in this block: a loss that is no number is not reported as this rank's own, and nothing counts as trained."""
        report, model.report_not_finite = model.report_not_finite, None
        member = self._auditor.ctx.elastic
        self._auditor.is_computing = True
        try:
            yield
        finally:
            self._auditor.is_computing = False
            model.report_not_finite = report
            if member is not None:
                member.take_trained()

    def each(self, block: range) -> Iterable[int]:
        """Go through micro-batches; a member of an elastic run stops when the members change, and shows that it makes progress."""
        member = self._auditor.ctx.elastic
        return block if member is None else member.each(block)

    def settle(self, again: Callable[[range], BlockDigest], *, unit: str = MICRO_BATCH) -> None:
        """Compare what all ranks have found; every rank that takes part calls it in the same step, before weights change.

        If two ranks disagree, all compute the block in question, and record what they find: the launcher decides which rank is
        wrong.

        Args:
            again: Computes a block with the weights of this step.
            unit: What a part of a digest is, `MICRO_BATCH` or `LAYER`.

        Raises:
            AuditError: Two ranks disagree; on all ranks.

        Cost: `AUDIT_BYTES` to each of the W - 1 others; if two ranks disagree, the passes of a block and 32 bytes more.
        """
        auditor, found = self._auditor, self.found
        assert found is not None  # noqa: S101 - whoever settles an audit has computed its block
        own, other = self.own.sha256, found.sha256
        self._write(
            contract.KIND_AUDIT,
            of=self._audited[auditor.place],
            workers=len(auditor.among),
            own=own.hex(),
            found=other.hex(),
            computes=auditor.computes,
        )
        computes = hashlib.sha256(auditor.computes.encode()).digest()[:_SHORT]
        rows = auditor.all_gather(own + other + computes)
        disputed = self._first_disputed([(row[:_DIGEST], row[_DIGEST : 2 * _DIGEST]) for row in rows])
        if disputed is None:
            return
        self._vote(disputed, again, unit=unit)
        by = self._audited.index(disputed)
        ranks = f"rank {auditor.numbers[disputed]} and rank {auditor.numbers[by]}"
        raise AuditError(f"{ranks} computed different gradients of the same micro-batches")

    def _first_disputed(self, claims: Sequence[tuple[bytes, bytes]]) -> int | None:
        """Return the first place whose own digest is not what its auditor has found; None if there is none."""
        by = {audited: place for place, audited in enumerate(self._audited)}
        return next((place for place, (own, _) in enumerate(claims) if claims[by[place]][1] != own), None)

    def _vote(self, disputed: int, again: Callable[[range], BlockDigest], *, unit: str) -> None:
        """Compute a block once more on all ranks, and wait until all have recorded what they found."""
        auditor, block = self._auditor, self._blocks[disputed]
        vote, first = again(block), None
        if auditor.place == disputed:
            first = self.own
        elif self._audited[auditor.place] == disputed:
            first = self.found
        self._write(
            contract.KIND_AUDIT_VOTE,
            of=disputed,
            digest=vote.sha256.hex(),
            parts=b"".join(vote.parts).hex(),
            first="" if first is None else b"".join(first.parts).hex(),
            unit=unit,
            begin=block.start if unit == MICRO_BATCH else len(vote.parts) - 1,
        )
        auditor.all_gather(vote.sha256)

    def _write(self, kind: str, *, of: int, **values: object) -> None:
        self._auditor.write(kind, step=self.step, of=self._auditor.numbers[of], **values)
