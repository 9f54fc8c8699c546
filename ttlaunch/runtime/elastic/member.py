"""A worker of an elastic run from its registration to its end: carries out the state machine of `ttlaunch/membership/worker.py`.

    orders --> thread --> Standing <-- ElasticMember <-- the role's thread --> reports

The thread that takes orders only stops what is under way: it fails the transfers of an epoch that is over. The role's thread notices
this at its next transfer or micro-batch, answers what the worker has, and goes on when the next epoch begins. So no order changes
tensors while somebody computes with them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ttlaunch.membership import worker
from ttlaunch.membership.messages import Begin, Message, Registered, Seat, Share
from ttlaunch.runtime.comm.grpc.directory import Directory
from ttlaunch.runtime.comm.protocol import EpochOverError, PeerLostError
from ttlaunch.runtime.elastic.catching_up import CatchingUp
from ttlaunch.runtime.elastic.ends import FinishedError, HasLast, LeftError
from ttlaunch.runtime.elastic.feed import Mean
from ttlaunch.runtime.elastic.following import FollowerWays
from ttlaunch.runtime.elastic.giving import Giver, describe_given, pull_state
from ttlaunch.runtime.elastic.keeper import Keeper, LocalSteps
from ttlaunch.runtime.elastic.reporter import Reporter
from ttlaunch.runtime.elastic.standing import Standing
from ttlaunch.runtime.elastic.state_transfer import LaterState, OpenClients, Puller, ReplicaState, SharedParts
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.world import Rank

if TYPE_CHECKING:  # ranks of every recipe import this file, also where gRPC is not installed
    from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator

INTERRUPTIONS = (EpochOverError, PeerLostError)
"""What a transfer raises when the members of the run change, or are about to."""

_AGAIN_S = 0.02  # until a member is asked again for what it does not give yet


class ElasticMember:
    """What the role's thread asks and tells; only `take` may be called by other threads.

    Attributes:
        own: The number and the incarnation of this worker.
        is_later: Whether it has no state at its start, and gets one from others.
        takes_states: Whether it gets the whole state from others whenever it lacks a step; `catch_up` then has nothing to do.
        count_taken: Counts a state, or a mean, that others have given.
        past: What it takes over of steps that others have made.
    """

    def __init__(
        self,
        seat: Seat,
        *,
        transport: "GrpcCommunicator",
        place: Callable[[Sequence[Seat], int], Directory],
        write: Callable[..., object],
        traffic: TrafficCounter,
        note: Callable[[str], object],
        stop_order: HasLast,
        is_later: bool = False,
    ) -> None:
        """Take part in nothing yet.

        Args:
            seat: Who this worker is and where it listens.
            transport: Its transport, opened with itself alone.
            place: Returns the directory of some workers in an epoch.
            write: Writes a record for the coordinator, of the given fields.
            note: Shows the user a line.
            traffic: Knows whether the role's thread waits.
            stop_order: Says when the whole run ends early.
        """
        self.own, self.is_later = seat.member, is_later
        self._seat, self._place, self._note = seat, place, note
        self._makes_steps = self.takes_states = False
        self._trained = 0
        self._has_validated = False  # after the step from which this epoch starts
        self._save: Callable[[int], object] | None = None
        self._clients = OpenClients()
        self._standing = Standing(
            seat.member, transport=transport, close_calls=self._clients.close, stop_order=stop_order
        )
        self._followers: list[Callable[[Begin, int], object]] = []
        self._validate: Callable[[int], object] | None = None
        self._keeper: Keeper | None = None
        self._local: LocalSteps | None = None
        self._reporter = Reporter(write, traffic)
        self._giver = Giver()
        self.count_taken = self._reporter.note_taken
        self.past = CatchingUp(count=self.count_taken, pull_state=self._pull_state)
        transport.share_state(self._giver.source)

    # In the thread that takes orders

    def take(self, message: Message) -> None:
        """Obey an order; one that comes late or again changes nothing."""
        self._standing.take(message)

    def abandon(self) -> None:
        """Stop all transfers, since there is no coordinator any more; the role then ends with `AbandonedError`."""
        self._standing.abandon()

    # In the role's thread

    @property
    def parts(self) -> SharedParts:
        """What other members pull from this worker."""
        return self._giver.parts

    @property
    def begin(self) -> Begin:
        """The order with which this worker acts.

        Raises:
            EpochOverError: The members change.
        """
        begin = self._standing.acting().begin
        assert begin is not None  # noqa: S101 - it acts
        return begin

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the members of the newest epoch in which this worker has acted, by rank."""
        directory = self._standing.directory
        return (self.own.number,) if directory is None else [peer.worker for peer in directory.peers]

    @property
    def applied(self) -> int:
        """The last step in the weights."""
        return self._standing.state.applied or 0

    @property
    def owes_validation(self) -> bool:
        """Whether all members have to make the validation after `applied` before they go on."""
        state = self._standing.state
        return state.begin is not None and state.begin.validates and state.is_first_step and not self._has_validated

    def follow(self, follower: Callable[[Begin, int], object]) -> None:
        """Call a function at the begin of every epoch, with the order and this worker's rank."""
        self._followers.append(follower)

    def validate_with(self, validate: Callable[[int], object]) -> None:
        """Name the function that makes a validation, with all members, of the weights after a step."""
        self._validate = validate

    def save_with(self, save: Callable[[int], object]) -> None:
        """Name the function that saves the whole state on this host, with the steps in it; it must not send anything."""
        self._save = save

    def save_state(self) -> None:
        """Save the state of this worker, after `AbandonedError` has ended its role; without a state do nothing."""
        applied = self._standing.state.applied
        if self._save is not None and applied is not None:
            self._save(applied)

    def keep_in(self, keeper: Keeper) -> None:
        """Leave it to this object what workers get from one another at the begin of an epoch; call it before `join`."""
        self._keeper = keeper

    def take_local_steps(self, local: LocalSteps) -> None:
        """Have steps of this worker's own between averages; call it before `join`."""
        self._local, self._reporter.own_steps = local, local.own_steps

    def join(self, replica: ReplicaState | None, *, applied: int | None, shares: tuple[Share, ...] = ()) -> int:
        """Register, and get the state that this worker lacks, before it takes part or when it does; return the steps in it.

        Args:
            replica: Weights and optimizer state; None if the keeper or another member has them; not used after `take_local_steps`.
            applied: The steps in them; None if they are not those of the run.
            shares: The slots of the state that this worker has, if it does not have all of it.

        Raises:
            LeftError: The run needs this worker no more.
        """
        self.past.use(replica if self._local is None else self._local.shared)
        if self._keeper is not None:
            self._keeper.begin_with(applied)
        if applied is not None or self.past.values is None or not self._begin_to_follow():
            self._update(lambda state: replace(state, applied=applied, shares=shares))
            self._reporter.report(Registered(self._seat, applied))
            self.regroup()
        self._makes_steps = not self.takes_states
        return self.applied

    def take_tasks(self) -> None:
        """Have no part in the steps of the run, and compute tasks that another member hands out; call it before `join`."""
        self._reporter.has_own_tasks = True

    def regroup(self) -> None:
        """Answer what this worker has, and wait until it acts in the next epoch, with the state that this one starts from.

        Call it after one of `INTERRUPTIONS`. A worker that is behind by one step alone stays so: it calls `catch_up`.

        Raises:
            LeftError: This worker takes part no longer.
            CommunicationError: A member was lost, and the coordinator does not react.
        """
        while True:
            self.await_change()
            try:
                self._enter(self._await_begin())
            except INTERRUPTIONS:
                continue
            return

    def await_change(self) -> None:
        """Wait until the coordinator has ended the epoch; then no transfer reads or writes tensors any more."""
        self._standing.await_change(
            self._reporter.waiting(), report=lambda state: self._reporter.report(worker.cut_off(state))
        )

    def hold(self, nodes: Iterable[range]) -> None:
        """Note the nodes of the next step that this worker has."""
        held = tuple((leaves.start, leaves.stop) for leaves in nodes)
        self._update(lambda state: worker.hold(state, held))

    def held(self) -> list[range]:
        """Return those of them that count in this epoch."""
        return [range(first, stop) for first, stop in self._standing.state.held]

    def is_first_step(self) -> bool:
        """Whether the step after `applied` is the epoch's first; raises as `begin`."""
        return self._standing.acting().is_first_step

    def leaves_to_compute(self) -> list[range]:
        """Return the rows of leaves that this worker computes in the step after `applied`; raises as `begin`."""
        return [range(first, stop) for first, stop in worker.leaves_to_compute(self._standing.acting())]

    def nodes_of_step(self) -> list[list[range]]:
        """Return, for each member, the leaves that it has in the step after `applied`, in rows; raises as `begin`."""
        return [
            [range(first, stop) for first, stop in sorted(rows)]
            for rows in worker.nodes_of_step(self._standing.acting())
        ]

    def each(self, indices: Iterable[int], *, to_the_end: bool = False) -> Iterator[int]:
        """Go through micro-batches, as long as the epoch lasts or `to_the_end`, and measure how long each takes."""
        return self._reporter.timed(indices, check=lambda: to_the_end or self.begin)

    def count_trained(self, targets: int) -> None:
        """Note a micro-batch that this worker has differentiated, with so many targets that count in the loss."""
        self._trained += targets

    def take_trained(self) -> int:
        """Return how many targets these were since the last call."""
        found, self._trained = self._trained, 0
        return found

    def keep_mean(self, mean: Mean | None) -> None:
        """Keep the mean of a step for members that lack it, all have the one of the step before; None: this worker has none."""
        self._giver.mean = mean
        self._giver.parts.forget()

    @property
    def follows(self) -> bool:
        """Whether this worker makes the steps of others again and takes part in none."""
        return self.past.follower is not None and self._standing.state.begin is None

    def _begin_to_follow(self) -> bool:
        """Get the state while others go on; returns whether it is there."""
        ways = FollowerWays(
            order=lambda: self._standing.order,
            check=self._standing.check_follows,
            directory=self._place,
            closed_at_end=self._clients.closed_at_end,
            count=self.count_taken,
            ready=lambda applied: self._reporter.report(Registered(self._seat, applied, follows=True)),
        )
        self._reporter.report(Registered(self._seat, None, follows=True))
        with self._reporter.long():
            applied = self.past.begin_to_follow(self._seat, ways)
        self._update(lambda state: replace(state, applied=applied, validated=applied))
        return applied is not None

    def end_step(self, step: int) -> None:
        """Give a step to those that follow: all of it is done, and the next one has not begun."""
        begin = self._standing.state.begin
        if begin is not None and step >= begin.applied:
            self.past.stop_following()
        self._giver.feed.end_step(step, self.past.replica, self._giver.mean)

    def catch_up(self, step: int, into_N: Tensor) -> Mean | None:
        """Get the mean gradient of a step that others have made, float32 on the CPU; None if the whole state came instead; see `past`.

        `apply` puts the state in place, in place of what an update without the mean has made.
        """
        begin = self.begin
        return self.past.get(begin, self.puller(begin), step=step, into_N=into_N)

    def make_ready(self) -> None:
        """Note that this worker has the mean gradient of all that it keeps, for the next step."""
        self._update(worker.make_ready)

    def claim(self, step: int) -> None:
        """Note that the next step is in what this worker keeps; `apply` follows."""
        self._update(lambda state: worker.after_update(state, step))

    def apply(self, step: int, *, validation_is_due: bool) -> bool:
        """Note that a step is in the weights; returns whether this worker knows its loss and norms, and may report them."""
        step, knows_step = self.past.put(step)
        is_past = self.follows  # others have done all of the step, its validation too

        def applied(state: worker.WorkerState) -> worker.WorkerState:
            # The update may have been made while the members changed already; the answer then says that it was.
            is_made = state.begin is not None and state.begin.applied == step and not state.begin.validates
            validated = step if is_past or is_made or not validation_is_due else state.validated
            return replace(worker.after_update(state, step), validated=validated)

        self._update(applied)
        # The first that it computes takes longer; a server computes none.
        self._reporter.has_stepped = self._reporter.micro_batches > 0 or not self._computes()
        self._report_progress()
        return knows_step and not is_past

    def _computes(self) -> bool:
        begin = self._standing.state.begin
        if begin is None:
            return True
        first, last = begin.blocks[begin.numbers.index(self.own.number)]
        return first < last

    def validate(self, step: int) -> None:
        """Make the validation after a step, which is in the weights, together with all members, unless they have made it."""
        if self._validate is None or self.follows:
            return
        while True:
            try:
                begin = self.begin
                is_missing = begin.applied < step or (self.owes_validation and begin.applied == step)
                if is_missing:
                    self._validate(step)
                    self._has_validated = begin.applied == step
            except INTERRUPTIONS:
                self.regroup()
            else:
                if begin.applied <= step:
                    self._update(worker.end_step)
                self._report_progress()
                return

    def stay(self, at_end: Callable[[], object] = lambda: None) -> None:
        """After the last step, give others what they need until all are done.

        Args:
            at_end: What all members do together before they are done, once in each epoch.

        Raises:
            LeftError: This worker takes part no longer.
        """
        while True:
            try:
                self.begin  # noqa: B018 - it raises
                if self.owes_validation:
                    self.validate(self.applied)
                at_end()
                self._update(worker.end_run)
                self._report_progress()
                if self._standing.await_end(self._reporter.waiting()):
                    return
            except INTERRUPTIONS:
                try:
                    self.regroup()
                except FinishedError:
                    return

    def long(self, announced: AbstractContextManager[object]) -> AbstractContextManager[None]:
        """Ask for patience during a block that may take long."""
        return self._reporter.long(announced)

    def close(self) -> None:
        """Report nothing any more."""
        self._reporter.close()

    def _await_begin(self) -> Begin:
        return self._standing.await_begin(
            self._reporter.waiting(),
            report=lambda state: self._reporter.report(worker.answer(state)),
            place=lambda begin: self._place(begin.seats, begin.epoch),
        )

    def _enter(self, begin: Begin) -> None:
        """Follow the begin of an epoch: give others what they lack, and get what this worker lacks."""
        place, self._has_validated = begin.numbers.index(self.own.number), False
        for follower in self._followers:
            follower(begin, place)
        if self._keeper is not None:
            return self._enter_with(self._keeper, begin)
        if not self.past.has_replica:
            return self._report_progress()
        self._giver.give(begin, self.own.number, self.past.replica)
        applied, local = self._standing.state.applied, self._local
        if applied is None or (local is None and applied < begin.applied and not self._makes_steps):
            self._pull_state(begin, self.past.replica)
            validated = None if begin.validates else begin.applied
            self._update(lambda state: replace(state, applied=begin.applied, held=(), validated=validated))
        elif local is not None and applied < (average := local.last_average(begin.applied)):
            self._pull_state(begin, self.past.replica)
            self._update(lambda state: replace(state, applied=average, held=()))
        elif local is None and applied < begin.applied - 1 and self.past.follower is None:
            # `catch_up` gets one step. Who lacks more had to wait while others went on, and is replaced.
            raise LeftError(f"the others are {begin.applied - applied} steps ahead")
        elif self.past.follower is not None:
            self._note(describe_given(self._reporter.given, own=self.own.number, step=begin.applied))
        return self._report_progress()

    def _enter_with(self, keeper: Keeper, begin: Begin) -> None:
        with self._reporter.long():
            self._note_given(begin, keeper.enter(begin))
        self._update(lambda state: worker.with_slots(state, begin, slots=keeper.slots))
        self._report_progress()

    def _pull_state(self, begin: Begin, replica: ReplicaState | LaterState) -> None:
        with self._reporter.long():
            given = pull_state(self.puller(begin), begin, replica)
        self._note_given(begin, given)

    def _note_given(self, begin: Begin, given: Mapping[int, int]) -> None:
        if given:
            self.count_taken(given, is_state=True)
            self._note(describe_given(given, own=self.own.number, step=begin.applied))

    def puller(self, begin: Begin) -> Puller:
        """Return what calls the members of an epoch for what they give."""
        assert self._standing.directory is not None  # noqa: S101 - an epoch has begun
        own = Rank(begin.numbers.index(self.own.number))
        return Puller(
            self._standing.directory,
            own=own,
            check=lambda: self.begin,
            pause=lambda: time.sleep(_AGAIN_S),
            closed_at_end=self._clients.closed_at_end,
        )

    def _report_progress(self) -> None:
        state = self._standing.state  # a state never changes; orders put another one in its place
        if (state.applied is not None or not self.past.has_replica) and state.begin is not None:
            self._reporter.report(worker.progress(state, pace_s=self._reporter.pace_s))

    def _update(self, change: Callable[[worker.WorkerState], worker.WorkerState]) -> None:
        self._standing.update(change)
