"""ZeRO among members that come and go: each owns a shard of every layer and shadows that of another member.

    step s      every owner has the mean gradient of its slot, and its shadow has it, too
                all tell each other their parts of the gradient's norm, which nobody does before it has both of its means
                owners and shadows make the same update
    a change    who has made step s tells the others its norm: those that have their means make the update by themselves
                if nobody has made it, all make step s anew
                slots are cut anew for the members that are left, who get what they lack from owners or shadows

So no update is ever taken back, and nothing of the step before has to be kept. Of a step that was interrupted nothing is kept either:
a layer's gradients leave each member as soon as they are complete.

Shapes: P = parameters of the whole model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.membership.messages import Begin
from ttlaunch.membership.slots import Piece, Slots, divide_slots, plan_transfers
from ttlaunch.runtime.checkpoint.checkpoints import HeldSlots, held_tensors
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.elastic.ends import LeftError
from ttlaunch.runtime.elastic.member import INTERRUPTIONS, ElasticMember
from ttlaunch.runtime.elastic.sharded_state import SlotExchange
from ttlaunch.runtime.model.model import Model, place_of_second_use
from ttlaunch.runtime.model.tied import HEAD
from ttlaunch.runtime.parallel.zero.layout import ShardLayout, pieces_between
from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
from ttlaunch.runtime.parallel.zero.shadowed_gradients import Shadow, ShadowedGradients
from ttlaunch.runtime.parallel.zero.shared_norms import SharedNorms
from ttlaunch.runtime.parallel.zero.slot_state import SlotState
from ttlaunch.runtime.parallel.zero.weights import GatheredWeights
from ttlaunch.runtime.training.optimizers import build_optimizer, global_norm, norms_of_layers
from ttlaunch.runtime.training.validation import validation_is_due
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile

_STATE, _NUMBERS = "slots", "numbers"
_MOST_TOKENS = 2**53
"""A float holds every smaller number of tokens exactly."""

Held = dict[tuple[int, int], SlotState]
"""By the number of slots in all, and the slot."""


@dataclass(frozen=True)
class MadeStep:
    """What is the same on all members after an update.

    Attributes:
        squares: The squared norm of each parameter's gradient, in the model's order.
    """

    step: int
    loss: float
    tokens: int
    squares: tuple[float, ...]

    @property
    def norm(self) -> float:
        """The norm of the whole gradient."""
        return global_norm(list(self.squares))


class ElasticShards:
    """The slots of one member, and what it needs to make steps with the others.

    Cost of a step: that of `zero` without shadows, and S/n bytes each way for n members, S bytes of gradients.
    Memory: as without shadows, and for the shadowed slot the same again: parameters, gradients and optimizer state, whatever of it the
        stage shares. While a change lasts, also the slots of the former cut.
    Cost of a change: each member gets the values of its new slots that it does not have. A step that was interrupted is made anew.
    Order: as without shadows, so the bits are those of one process.

    Attributes:
        own: The slot that this member owns.
        shadow: The one that it shadows; None in an epoch with one member.
        weights: Gathers layers in this epoch.
        gradients: Sends gradients to their owners in this epoch.
    """

    own: SlotState
    shadow: SlotState | None
    weights: GatheredWeights
    gradients: ShadowedGradients

    def __init__(self, cfg: TrainingFile, ctx: RankContext, model: Model, *, zero_stage: int) -> None:
        """Keep what this member has of a model that was just drawn, or read it from a checkpoint, and take part.

        Args:
            cfg: The configuration.
            ctx: This rank.
            model: The whole model, from the seed. Its parameters are gathered from now on.
            zero_stage: 1 to 3.

        Raises:
            LeftError: The run needs this worker no more.
            ValueError: The run is not elastic.
        """
        if ctx.elastic is None:
            raise ValueError("slots with shadows need a run that was started with `--elastic`")
        self._member: ElasticMember = ctx.elastic
        self._cfg, self._ctx, self._model, self._zero_stage = cfg, ctx, model, zero_stage
        self._total_steps = ctx.data(cfg).total_steps
        self._places = _places(model)
        self._layouts: dict[int, ShardLayout] = {}
        self._held: Held = {}
        self._made: MadeStep | None = None
        self._published: int | None = None
        self._updates, self._is_ready = 0, False
        self._applied: int | None = None
        self._owners: tuple[int, ...] = ()  # the numbers of those of `own` and `shadow`, and of all other slots
        hosts, own, share = ctx.first_hosts(), self._member.own.number, None
        if own < len(hosts) and not self._member.is_later:
            share, whole_N = divide_slots(hosts).of(own), model.weights_N
            for slot in share.slots:
                self._held[share.cut, slot] = found = self._build(share.cut, slot)
                _fill_from_whole(found, whole_N)
        elif zero_stage > 1:
            model.release_flat_vectors(weights=zero_stage > 2)  # noqa: PLR2004 - from stage 2 on gradients are shared, from 3 on weights
        self._member.keep_in(self)
        ctx.save_slots_if_abandoned(self._held_at_end)
        ctx.restore_slots([(one.owned, one.optimizer) for one in self._held.values()], share)

    # As a `Keeper`

    @property
    def slots(self) -> int:
        """0: the state is cut into as many slots as there are members."""
        return 0

    def begin_with(self, applied: int | None) -> None:
        """Note the step of the state with which this worker registers."""
        self._applied = applied

    def enter(self, begin: Begin) -> Mapping[int, int]:
        """Make up a step that others have made, if this worker lacks only that, and get its slots of an epoch; see `Keeper`.

        Raises:
            LeftError: The others have gone on without this worker.
            EpochOverError, CommunicationError: As for `SlotExchange.pull`; this worker then has what it had before.
        """
        member, place = self._member, begin.numbers.index(self._member.own.number)
        exchange = SlotExchange(begin, place, puller=member.puller(begin), parts=member.parts)
        member.parts.forget()
        if self._applied is not None and self._applied < begin.applied:
            if not self._is_ready:
                raise LeftError("the others have gone on without it")
            self._make_up(exchange)
        is_new = self._applied is None
        self._take(exchange, is_new=is_new)
        self._applied = begin.applied
        if is_new:
            return exchange.received
        member.count_taken(exchange.received, is_state=True)
        return {}  # the user reads who takes part, and not what each member gets at every change

    def _make_up(self, exchange: SlotExchange) -> None:
        """Make the update of a step that others have made."""
        source = exchange.begin.numbers.index(exchange.begin.holders[0])
        self._update(self._pull_numbers(exchange, source=source, is_over=not exchange.begin.validates))
        # From now on this member has the step, also if the members change again before it has got its slots.
        self._member.apply(exchange.begin.applied, validation_is_due=exchange.begin.validates)

    def _take(self, exchange: SlotExchange, *, is_new: bool) -> None:
        """Cut the state anew for the members of an epoch."""
        begin, place = exchange.begin, exchange.place
        slots = divide_slots([seat.host for seat in begin.seats])
        cut = next(share.cut for share in begin.shares if share is not None)
        transfers = plan_transfers(pieces_between(self._layout(cut), self._layout(slots.cut)), begin.shares, slots)
        for one in self._held.values():
            one.optimizer.finish_copy()
            self._updates = max(self._updates, one.updates())
        if begin.numbers[place] in begin.holders:
            exchange.offer(_NUMBERS, self._numbers())
        for transfer in transfers:
            if transfer.source == place != transfer.dest:
                parts = [self._held[cut, piece.before].pack([piece.values]) for piece in transfer.pieces]
                exchange.offer(_STATE, torch.cat(parts), to=transfer.dest)
        if is_new:
            source = begin.numbers.index(begin.holders[0])
            self._made = self._pull_numbers(exchange, source=source, is_over=True, is_new=True)
        share = slots.of(place)
        new = {slot: self._held.get((slots.cut, slot)) or self._build(slots.cut, slot) for slot in share.slots}
        coming = {one.source: one.pieces for one in transfers if one.dest == place}
        self._get(exchange, new, coming, cut=cut)
        former = {key: one for key, one in self._held.items() if key[0] == cut}
        self._held = {**former, **{(slots.cut, slot): one for slot, one in new.items()}}
        self._is_ready = False  # a step that nobody has made is made anew
        self._prepare(exchange, slots)

    def _get(
        self, exchange: SlotExchange, new: dict[int, SlotState], coming: dict[int, tuple[Piece, ...]], *, cut: int
    ) -> None:
        """Fill this member's new slots with what others give, and with what it has itself."""
        contents = {
            source: torch.empty(sum(new[piece.after].count_packed([piece.values]) for piece in pieces))
            for source, pieces in coming.items()
            if source != exchange.place
        }
        exchange.pull_own(_STATE, contents)
        for source, pieces in coming.items():
            begun = 0
            for piece in pieces:
                slot = new[piece.after]
                if source == exchange.place:
                    former = self._held[cut, piece.before]
                    if former is not slot:
                        slot.fill([piece.values], former.pack([piece.values]))
                    continue
                count = slot.count_packed([piece.values])
                slot.fill([piece.values], contents[source][begun : begun + count])
                begun += count
        for slot in new.values():
            slot.set_updates(self._updates)

    def _prepare(self, exchange: SlotExchange, slots: Slots) -> None:
        """Make what gathers, sends and adds up among the members of an epoch."""
        begin, place = exchange.begin, exchange.place
        among = [Rank(rank) for rank in range(len(begin.seats))]
        own, *shadowed = slots.of(place).slots
        self.own = self._held[slots.cut, own]
        self.shadow = self._held[slots.cut, shadowed[0]] if shadowed else None
        self._owners, self._own_slots = begin.numbers, (own, *shadowed)
        dest = slots.shadows[own]
        shadow = None
        if self.shadow is not None and dest is not None:
            shadow = Shadow(self.shadow.owned, Rank(slots.owners[shadowed[0]]), Rank(dest))
        for one in {id(slot.owned.grads_N): slot.owned.grads_N for slot in self._held.values()}.values():
            one.zero_()
        if hasattr(self, "weights"):
            self.weights.close()
        self.weights = GatheredWeights(self._model, self.own.owned, ctx=self._ctx, among=among)
        self.gradients = ShadowedGradients(
            list(self._model.parameters()),
            self.own.owned,
            ctx=self._ctx,
            blocks=[range(first, stop) for first, stop in begin.blocks],
            shadow=shadow,
            each=self._member.each,
        )
        self._norms = SharedNorms(self.own.owned, ctx=self._ctx, among=among, traffic=self._ctx.traffic)
        self._blocks = begin.blocks
        self._published = None

    # Steps

    def make(self, step: int, gradient: Callable[[int, Iterable[int]], tuple[float, int]]) -> MadeStep:
        """Make a step, however often the members change meanwhile.

        Args:
            step: The step; all steps before it are in the state.
            gradient: Leaves the mean gradient of the step in the slots, of micro-batches of which this member computes those with
                the given indices; returns mean loss per token and tokens of the whole step.

        Raises:
            LeftError: This worker takes part no longer.
        """
        member = self._member
        while True:
            try:
                if self._made is not None and self._made.step == step:
                    return self._made  # others had made it, and this member has made it up
                if member.owes_validation:
                    member.validate(step - 1)
                self.publish(step - 1)
                block = member.begin.blocks[self._ctx.rank]
                loss, tokens = gradient(step, range(*block))
                member.make_ready()
                member.parts.forget()  # all have got what they lacked
                self._is_ready = True
                self._held = {key: one for key, one in self._held.items() if one in {self.own, self.shadow}}
                squares = self._norms.squares()
                self._update(MadeStep(step, loss, tokens, tuple(squares.values())))
                is_due = validation_is_due(self._cfg, self._ctx, step)
                member.apply(step, validation_is_due=is_due)
            except INTERRUPTIONS:
                member.regroup()

    def publish(self, version: int) -> None:
        """Let all members gather the weights of this version, unless they do already."""
        if self._published != version:
            self.weights.publish(version)
            self._published = version
        self.weights.begin(version)

    def rate(self) -> float:
        """Return the learning rate of the last update."""
        return self._rate

    def layer_norms(self) -> dict[str, float]:
        """Return the norm of the gradient of each layer of the whole model, of the last step."""
        squares = () if self._made is None else self._made.squares
        return norms_of_layers(dict(zip(self._names(), squares, strict=True)))

    def _names(self) -> list[str]:
        return [name for name in self._places if name != HEAD or not self._model.is_tied]

    def held(self, step: int) -> dict[str, Tensor]:
        """Return this member's tensors after a step, by name, for a comparison of owners with shadows; none if it has another step by now."""
        if self._applied != step:
            return {}
        slots = [self.own] if self.shadow is None else [self.own, self.shadow]
        return {name: one for slot in slots for name, one in held_tensors(slot.owned, slot.optimizer)}

    def _update(self, made: MadeStep) -> None:
        """Update the slots with their mean gradients."""
        vectors: dict[int, Tensor] = {}
        slots = [self.own] if self.shadow is None else [self.own, self.shadow]
        for slot in slots:
            grads_N = slot.owned.grads_N  # at stage 1 both slots have their gradients in the same vector
            slot.optimizer.clip(grads_N[:0] if id(grads_N) in vectors else grads_N, norm=made.norm)
            vectors[id(grads_N)] = grads_N
        for slot in slots:
            self._rate = slot.optimizer.update(made.step)
        self.own.optimizer.end_step()
        for grads_N in vectors.values():
            grads_N.zero_()
        self._made, self._applied, self._is_ready = made, made.step, False

    def _held_at_end(self) -> HeldSlots | None:
        """Return what this member has when the run loses its coordinator; None before its first epoch.

        Members may be one step apart, namely where some lack the norm of a step that others have made. One alone may be: what it owns
        is shadowed by one of the others. While the state is cut anew, this is what a member had of the former cut.
        """
        if not self._owners or self._applied is None:
            return None
        kept = [one for one in (self.own, self.shadow) if one is not None]
        numbers = [self._owners[slot] for slot in self._own_slots]
        slots = tuple((number, one.owned, one.optimizer) for number, one in zip(numbers, kept, strict=True))
        return HeldSlots(self._applied, self._owners, slots)

    # What is the same on all members

    def _numbers(self) -> Tensor:
        made = self._made
        squares = [0.0] * len(self._names()) if made is None else list(made.squares)
        known = [0.0, 0.0, 0.0] if made is None else [float(made.step), made.loss, float(made.tokens)]
        scaler = self._scaler()
        early = self._ctx.early_stop.values()
        return torch.tensor([*known, float(self._updates), *squares, *early, *scaler.values()], dtype=torch.float64)

    def _scaler(self) -> dict[str, float]:
        return {name: float(value) for name, value in (self._model.loss_scaler.state() or {}).items()}

    def _pull_numbers(self, exchange: SlotExchange, *, source: int, is_over: bool, is_new: bool = False) -> MadeStep:
        """Get from a member what is the same on all.

        Args:
            exchange: The other members.
            source: The place of the member.
            is_over: Whether what follows the step, such as its validation, is done, so that this member takes over its outcome.
            is_new: Whether this member has not made the steps before: then it also takes over the loss scale.

        Raises:
            CommunicationError: It says what cannot be, or as for `SlotExchange.pull`.
        """
        row = torch.zeros_like(self._numbers())
        exchange.pull(_NUMBERS, row, source=source)
        step, loss, tokens, updates, *rest = row.tolist()
        count, early = len(self._names()), len(self._ctx.early_stop.values())
        squares, after, scaler = rest[:count], rest[count : count + early], rest[count + early :]
        whole = all(0 <= value < _MOST_TOKENS and value == int(value) for value in (step, tokens, updates))
        if not whole or any(square < 0 for square in squares) or (step and step != exchange.begin.applied):
            sender = contract.worker_name(exchange.begin.numbers[source])
            raise CommunicationError(
                f"{sender} says that step {step:g} had {tokens:g} tokens and {updates:g} updates came before"
            )
        self._updates = int(updates)
        if is_over:
            self._ctx.early_stop.take(after)
        if scaler and is_new:
            names = self._scaler()
            self._model.loss_scaler.restore(dict(zip(names, scaler, strict=True)))
        return MadeStep(int(step), loss, int(tokens), tuple(squares))

    def _layout(self, cut: int) -> ShardLayout:
        if cut not in self._layouts:
            places = dict(self._places)
            second_use = places.pop(HEAD) if self._model.is_tied else None
            self._layouts[cut] = ShardLayout(places, ranks=cut, second_use=second_use)
        return self._layouts[cut]

    def _build(self, cut: int, slot: int) -> SlotState:
        owned = OwnedParameters(
            self._model, self._layout(cut), place=slot, zero_stage=self._zero_stage, is_filled_later=True
        )
        return SlotState(owned, build_optimizer(self._cfg, owned, total_steps=self._total_steps))


def _places(model: Model) -> dict[str, Tensor]:
    """Return where each parameter is in the flat vector, as views of a vector without memory."""
    second_use = place_of_second_use(model)
    named = dict(model.named_parameters())
    if second_use is not None:
        named[HEAD] = second_use  # type: ignore[assignment]
    ends = [int(one.storage_offset()) + one.numel() for one in named.values()]
    nothing = torch.empty(max(ends), device="meta")
    return {
        name: nothing[one.storage_offset() : one.storage_offset() + one.numel()].view(one.shape)
        for name, one in named.items()
    }


def _fill_from_whole(slot: SlotState, whole_N: Tensor) -> None:
    """Copy the parameters of a slot from the flat vector of a whole model."""
    for fragment, parameter in slot.owned.fragments():
        values = fragment.part.values
        parameter.data.view(-1).copy_(whole_N[values.start : values.stop])
