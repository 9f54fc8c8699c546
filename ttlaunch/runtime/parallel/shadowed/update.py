"""Steps of an elastic run in which two members keep the optimizer's state, so that each of them may be lost.

    workers   -- nodes of the tree --> owners of the parts     each owner adds up, divides, and gives the other keeper the mean
    keeper 0  <-- mean, then "ready" --> keeper 1              an update begins when both have the whole mean
    workers   <-- new weights --------- owners of the parts

When a keeper is lost, the other one has the state of the step before, or of this one; or it has the whole mean, and makes the step by
itself. Workers keep their sums until the new weights are there, so a step that was interrupted goes on with them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.checkpoint.checkpoints import HasState
from ttlaunch.runtime.comm.agreement import agree
from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.comm.reduction import aligned_subtrees
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.elastic.member import INTERRUPTIONS, ElasticMember
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.gradients.bucket_messages import WEIGHTS, irecv_part, isend_part
from ttlaunch.runtime.parallel.gradients.buckets import Bucket
from ttlaunch.runtime.parallel.shadowed.kept_state import KeptState
from ttlaunch.runtime.parallel.shadowed.means import MeanMaker
from ttlaunch.runtime.parallel.shadowed.nodes import NodeSender
from ttlaunch.runtime.parallel.shadowed.places import Part, Places, cut_parts, take_places
from ttlaunch.runtime.training.optimizers import Optimizer, global_norm
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class Made:
    """A step that is in the weights.

    Attributes:
        known: What this member knows of it for the report: `loss`, `tokens`, `grad_norm` and `learning_rate` if it has made the
            update itself; else nothing.
    """

    step: int
    known: Mapping[str, float] = field(default_factory=dict)


class ShadowedUpdate:
    """An optimizer whose state two members keep; the others have weights only. A `Keeper` of `runtime/elastic`.

        update = ShadowedUpdate(ctx, model, optimizer, servers=2, owners=[1])
        ctx.restore(model, optimizer)
        for step in loop.steps():
            made = update.step(step, enter)      # `enter` calls `expect` and `accumulate` for each micro-batch
            loop.end_step(step, **made.known)

    Cost of a step: a worker sends its k nodes, k * S bytes, and receives S; the keepers send each other S together. After a change
        whoever has not all weights gets them, S bytes, and a new keeper the whole state, 3S with AdamW, from both keepers alike.
    Memory: S = 4N bytes more than a member without shadows at a worker, for its nodes; copies of a part of the state at keepers until
        the first step of an epoch is made.
    Order: that of the tree over micro-batches, then one division: the bits of one process, whoever comes and goes.
    """

    def __init__(
        self,
        ctx: RankContext,
        model: Model,
        optimizer: Optimizer,
        *,
        servers: int,
        owners: Sequence[int],
        state: HasState | None = None,
        after_update: Callable[[int], object] | None = None,
    ) -> None:
        """Plan the messages; nothing is sent.

        Args:
            ctx: This member.
            model: The whole model.
            optimizer: Its optimizer; its state is used while this member is a keeper.
            servers: The first so many places of an epoch differentiate no micro-batches.
            owners: The place of the keeper that adds up gradients, for each slot of the state.
            state: What keepers have beside the weights; None: the optimizer's state.
            after_update: Called on keepers with each step that is in the weights, such as an average's `update`.

        Raises:
            ValueError: The run is not elastic.
        """
        if ctx.elastic is None:
            raise ValueError("shadows of servers need a run that was started with `--elastic`")
        self._ctx, self._model, self._optimizer = ctx, model, optimizer
        self._member: ElasticMember = ctx.elastic
        self._after_update = after_update
        self._flat = FlatParameters(model.parameters())
        self._servers, self.slots = servers, len(owners)
        self._parts: Sequence[Part] = cut_parts(self._flat, owners)
        self._state = KeptState(model, optimizer, ctx.early_stop, state=state)
        self._sender, self._means = NodeSender(ctx, self._flat), MeanMaker(ctx, self._flat)
        self._places: Places | None = None
        self._ready: Made | None = None  # of which this keeper has the whole mean
        self._made = Made(0)
        self._member.keep_in(self)

    @property
    def is_keeper(self) -> bool:
        """Whether this member keeps the optimizer's state now."""
        return self._at.is_keeper

    def has_state(self, step: int) -> bool:
        """Whether this member has the whole state after a step."""
        return self._state.at == step

    def step(self, step: int, enter: Callable[[Iterable[int]], object]) -> Made:
        """Make a step, however often the members change meanwhile: the new weights are in the model.

        Args:
            step: The step; all steps before it are in the weights.
            enter: Differentiates the micro-batches with the given indices, with `expect` and `accumulate` for each.

        Raises:
            LeftError: This worker takes part no longer.

        Cost: that of the class, and once more for each change meanwhile, less the nodes that were kept.
        Order: that of the tree over micro-batches. Keepers update only when both have the mean.
        """
        while self._state.weights_at is None or self._state.weights_at < step:
            try:
                if self._member.owes_validation:
                    self._member.validate(step - 1)
                self._make(step, enter)
            except INTERRUPTIONS:
                self._stop()
                self._member.regroup()
        self._sender.close()
        return self._made if self._made.step == step else Made(step)

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Announce the backward pass of a micro-batch; see `NodeSender`."""
        self._sender.expect(index, tokens=tokens, loss=loss)

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch's *summed* loss; see `NodeSender`."""
        self._sender.accumulate(index, tokens=tokens, loss=loss)

    # For `ElasticMember`

    def begin_with(self, applied: int | None) -> None:
        """Note the step of the state that this member starts with."""
        self._state.begin_with(applied)

    def enter(self, begin: Begin) -> Mapping[int, int]:
        """Take a place in an epoch: give others what they lack, and get what this member lacks; returns bytes by the number of the giver.

        Raises:
            EpochOverError, CommunicationError: As for `Puller.pull`.
        """
        own = self._member.own.number
        self._places = take_places(begin, own, servers=self._servers, parts=self._parts)
        ready, self._ready = self._ready, None
        if ready is not None and ready.step == begin.applied:
            self._update(ready)
            self._member.claim(ready.step)
        elif ready is not None:
            self._flat.grads_N.zero_()  # the step is made again
        keepers = [begin.numbers[rank] for rank in self._places.keepers]
        self._state.give(self._member.parts, begin, own=own, keepers=keepers)
        return self._state.take(self._member.puller(begin), begin, is_keeper=self._places.is_keeper)

    # The step

    @property
    def _at(self) -> Places:
        assert self._places is not None  # noqa: S101 - an epoch has begun
        return self._places

    def _make(self, step: int, enter: Callable[[Iterable[int]], object]) -> None:
        self._sender.keep_only(self._member.held())
        layout = [list(chain.from_iterable(map(aligned_subtrees, rows))) for rows in self._member.nodes_of_step()]
        if self._at.works:
            self._work(step, enter)
        if self._at.is_keeper:
            self._keep(step, layout)
        else:
            self._receive_weights(step)

    def _work(self, step: int, enter: Callable[[Iterable[int]], object]) -> None:
        """Differentiate this member's micro-batches, and send their sums."""
        rows = self._member.leaves_to_compute()
        # A keeper needs its gradients' memory for the mean, and the first step of an epoch may have gaps in its rows.
        overlaps = not self._member.is_first_step() and not self._at.is_keeper
        self._sender.open(step, self._at, last=rows[-1][-1] if overlaps else None)
        for row in rows:
            enter(self._member.each(row))
            if not overlaps:
                self._sender.end_row()
        self._sender.send()

    def _keep(self, step: int, layout: list[list[range]]) -> None:
        """Make the mean with the other keeper, update, and send the workers their weights."""
        loss, tokens = self._means.make(step, self._at, layout)
        self._sender.wait()
        self._ready = Made(step, {"loss": loss, "tokens": tokens})
        self._member.make_ready()
        self._means.confirm(step, self._at)
        self._update(self._ready)
        self._ready = None
        self._member.parts.forget()  # everybody has contributed to this step, and therefore has got what it lacked
        with suppress(*INTERRUPTIONS):  # then the workers get them at the begin of the next epoch
            self._send_weights()

    def _update(self, ready: Made) -> None:
        norm = global_norm(self._optimizer.squared_norms())
        rate = self._optimizer.step(ready.step, norm=norm)
        if self._after_update is not None:
            self._after_update(ready.step)
        self._state.begin_with(ready.step)
        self._made = Made(ready.step, {**ready.known, "grad_norm": norm, "learning_rate": rate})

    def _send_weights(self) -> None:
        sending: list[Pending] = []
        for owner, bucket in self._in_forward_order():
            if owner == self._at.rank:
                part = bucket.of(self._model.weights_N)
                sending += [isend_part(self._ctx, part, bucket, dest=to, tag=WEIGHTS) for to in self._at.only_work]
        if self._at.rank == self._at.owners[0]:
            agree(self._ctx, self._model.loss_scaler, dests=self._at.only_work)
        for message in sending:
            message.wait()

    def _receive_weights(self, step: int) -> None:
        self._state.at = self._state.weights_at = None
        messages = [
            irecv_part(self._ctx, bucket.of(self._model.weights_N), bucket, source=owner, tag=WEIGHTS)
            for owner, bucket in self._in_forward_order()
        ]
        agree(self._ctx, self._model.loss_scaler, source=self._at.owners[0])
        for message in messages:
            message.wait()
        self._sender.wait()
        self._state.weights_at = step

    def _in_forward_order(self) -> Iterable[tuple[Rank, Bucket]]:
        return [(part.owner, bucket) for part in reversed(self._at.parts) for bucket in reversed(part.buckets)]

    def _stop(self) -> None:
        """Keep the complete nodes of the step, when no transfer reads or writes tensors any more."""
        self._member.await_change()
        self._sender.interrupt()
        if self._ready is None:
            self._flat.attach_gradients()
            self._flat.grads_N.zero_()
        self._member.hold(node.leaves for node in self._sender.nodes)
