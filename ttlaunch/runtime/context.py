"""The context that a role's function receives with its configuration: its rank and role, its peers, its data, and its reports."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ttlaunch import contract
from ttlaunch.membership.messages import Share
from ttlaunch.runtime.audit.auditor import Auditor
from ttlaunch.runtime.checkpoint.checkpoints import Checkpoints, HasParameters, HasState, HeldSlots, held_tensors
from ttlaunch.runtime.checkpoint.digests import ReplicaDigests
from ttlaunch.runtime.comm.counting import counting
from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.comm.reduction import GradientTree
from ttlaunch.runtime.data.batches import TrainingData
from ttlaunch.runtime.data.images import ImageData
from ttlaunch.runtime.data.synthetic import SyntheticData
from ttlaunch.runtime.data.text import TextData
from ttlaunch.runtime.early_stop import EarlyStop
from ttlaunch.runtime.elastic.member import ElasticMember
from ttlaunch.runtime.elastic.state_transfer import ReplicaState
from ttlaunch.runtime.model.flat import digests
from ttlaunch.runtime.stop_order import StopOrder
from ttlaunch.runtime.telemetry.memory import tensors_of_model
from ttlaunch.runtime.telemetry.phases import watch_passes
from ttlaunch.runtime.telemetry.records import ProgressWriter
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter, operation, register_owner
from ttlaunch.runtime.world import Rank, World
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.images import has_images
from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.recipe.synthetic import is_synthetic

_NAMED_BY_CALLER = _NOTHING = nullcontext()


class RankContext:
    """One rank of a run.

    Attributes:
        rank, world_size: Its index in the world, and how many ranks that has.
        role: What it does.
        host: Where it runs.
        device: What it computes on.
        step: The step it is in; 0 before the first.
        replay: For a repeated run, the rank whose gradient made each update; see `World`.
        updates: For a run that is repeated in one process, what each update was made of; see `World`.
        epochs: For an elastic run with local steps that is repeated in one process, who took part; see `World`.
        early_stop: Whether training goes on; on all ranks that know the validations' losses, others `agree`.
        steps_done: Steps that were done before this run began; 0 unless it goes on from a checkpoint.
        traffic: What this rank has sent and how long it has waited; the verbs below enter it.
        auditor: Takes part in audits, in which ranks check each other's gradients.
        elastic: What this rank does as a worker of an elastic run, whose ranks change with the members; None in any other run.
    """

    def __init__(
        self,
        *,
        world: World,
        rank: Rank,
        communicator: Communicator,
        records: ProgressWriter,
        device: torch.device,
        corpus: Corpus | None,
        checkpoints: Checkpoints | None = None,
        digests: ReplicaDigests | None = None,
        early_stop: EarlyStop | None = None,
        stop_order: StopOrder | None = None,
        traffic: TrafficCounter | None = None,
        elastic: ElasticMember | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world.size
        self.role = world.roles[rank]
        self.host, self.replay = world.hosts[rank], world.replay
        self.updates, self.epochs = world.updates, world.epochs
        self.device = device
        self.step = self.steps_done = checkpoints.steps_done if checkpoints else 0
        self._world, self._counts_steps = world, False
        self.traffic = traffic or TrafficCounter()
        self._communicator = counting(communicator, self.traffic)
        self._records, self._corpus = records, corpus
        self._data: TrainingData | None = None
        self._checkpoints, self._digests = checkpoints, digests
        self.early_stop = early_stop or EarlyStop(None)
        self._stop_order = stop_order or StopOrder(steps_done=self.steps_done)
        self.auditor = Auditor(self, world=world, device=device, write=records.write)
        self.elastic = elastic
        if elastic is not None:
            self._take_place(0, numbers=[rank])
            elastic.follow(lambda begin, place: self._take_place(place, numbers=begin.numbers))

    def _take_place(self, rank: int, *, numbers: Sequence[int]) -> None:
        """Be this rank among the members of an epoch, whose numbers are given."""
        self.rank, self.world_size = Rank(rank), len(numbers)
        self._communicator.take_place(self.rank, numbers=numbers)

    @property
    def ledger(self) -> TrafficCounter:
        """The former name of `traffic`, for trainers that still use it."""
        return self.traffic

    def ranks(self, role: str) -> tuple[Rank, ...]:
        """The ranks that have a role, in order; in an elastic run those of the present members, all of which have one role."""
        if self.elastic is not None:
            return tuple(map(Rank, range(self.world_size))) if role == self.role else ()
        return self._world.ranks(role)

    def sole(self, role: str) -> Rank:
        """The one rank that has a role.

        Raises:
            ValueError: None has it, or several.
        """
        ranks = self.ranks(role)
        if len(ranks) != 1:
            raise ValueError(f"{len(ranks)} ranks have the role {role!r}, expected 1")
        return ranks[0]

    def position(self, role: str) -> int:
        """Where this rank stands among those of its role, from 0."""
        return self.ranks(role).index(self.rank)

    def previous(self, role: str) -> Rank | None:
        """The rank of the role before this one; None for the first."""
        place = self.position(role)
        return self.ranks(role)[place - 1] if place else None

    def next(self, role: str) -> Rank | None:
        """The rank of the role after this one; None for the last."""
        return next(iter(self.ranks(role)[self.position(role) + 1 :]), None)

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0, operation: str | None = None) -> None:
        """Send a contiguous tensor; may or may not return before `dest` has received. See `Communicator`.

        Reports show `operation` as what the message is for; without it, the name of the function that sends.
        """
        with self._for(operation):
            self._communicator.send(tensor, dest=dest, tag=tag)

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0, operation: str | None = None) -> None:
        """Fill a contiguous tensor with the next message of `source`, which has its dtype and shape."""
        with self._for(operation):
            self._communicator.recv(tensor, source=source, tag=tag)

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0, operation: str | None = None) -> Pending:
        """Begin to send; the tensor must not change before `wait()` of the result has returned."""
        with self._for(operation):
            return self._communicator.isend(tensor, dest=dest, tag=tag)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0, operation: str | None = None) -> Pending:
        """Begin to receive; the tensor holds the message when `wait()` of the result has returned."""
        with self._for(operation):
            return self._communicator.irecv(tensor, source=source, tag=tag)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        """Sleep until one of several transfers is complete, and say which; see `Communicator`."""
        return self._communicator.wait_any(pending, timeout_s=timeout_s)

    def _for(self, name: str | None) -> AbstractContextManager[None]:
        return _NAMED_BY_CALLER if name is None else operation(self, name)

    def watch(self, model: nn.Module, *, values: int) -> TrafficCounter:
        """Count what a model sends by pass, and note its size, in the traffic counter; `build_model` calls it.

        Args:
            model: This rank's part of it.
            values: The number of values in its flat vector, padding included.

        Returns:
            The traffic counter, in which updates of the model are entered too.
        """
        self.traffic.note(values=values, tensors=len(list(model.parameters())))
        watch_passes(model, self.traffic)
        register_owner(self, model, tensors_of_model)
        return self.traffic

    def data(self, cfg: TrainingFile) -> TrainingData:
        """The training text, cut into sequences; tokenized on first use.

        Raises:
            ValueError: The recipe declared that it reads no text.
        """
        if self._data is None:
            if self._corpus is None:
                raise ValueError("this recipe declares `uses_data=False`, so there is no text")
            self._data = build_data(self._corpus, cfg)
            micro_batches, sequences = self._data.validation_micro_batches, self._data.validation_sequences
            self.traffic.note(validation_micro_batches=micro_batches, validation_sequences=sequences)
        return self._data

    def steps(self, cfg: TrainingFile) -> Iterator[int]:
        """Count the steps of the run, from 1 or from the one after the checkpoint that it goes on from.

        They end early where validations no longer improve and the configuration says so, and when the run is ordered to
        end; on all ranks after the same step.
        """
        self._counts_steps = True
        step = self.steps_done
        while step < self.data(cfg).total_steps:
            if self.early_stop.is_over or self.should_stop():
                return
            self.step = step = step + 1
            self.traffic.begin_step(step)
            yield step
            if self.elastic is not None:  # it may have got the state of a later step
                self.step = step = max(step, self.elastic.applied)
            if self._checkpoints is not None:
                self._checkpoints.check()

    def should_stop(self) -> bool:
        """Whether the run was ordered to end, by Ctrl-C or SIGTERM, and all ranks stop after this step.

        `steps` asks by itself. A recipe that counts its steps itself asks once after each, on every rank: then all get
        the same answers, and leave together.

        Cost: no message; after a request to stop, a wait until all ranks have received it.
        """
        if not self._counts_steps:
            self.step += 1
        return self._stop_order.ends_after(self.step)

    def restore(self, model: HasParameters, optimizer: HasState, *, is_given: bool = True) -> None:
        """Begin where the run's checkpoint left off, or with the weights it was given; without either, do nothing.

        Every rank that holds an optimizer calls it once, before it uses or sends the weights. What the rank holds is
        found by the names of its parameters, so the checkpoint of any layout fits any other.

        Args:
            model: This rank's part of it.
            optimizer: The optimizer of this model.
            is_given: Whether workers of an elastic run give this state to those that come.

        Raises:
            CheckpointReadError: The files are not what the launching machine found, or lack a tensor of this rank.
        """
        if self._checkpoints is not None and not (self.elastic is not None and self.elastic.is_later):
            with self.announced("checkpoint"):
                self._checkpoints.restore(model, optimizer, state=self._state(self.steps_done))
        if self.elastic is not None:
            applied = None if self.elastic.is_later else self.steps_done
            replica = ReplicaState(model, optimizer, self.early_stop) if is_given else None
            self.step = self.steps_done = self.elastic.join(replica, applied=applied)

    def restore_weights(self, model: HasParameters) -> None:
        """Fill the weights of a model that is used and not trained from the checkpoint that the run was given.

        Args:
            model: This rank's part of it.

        Raises:
            CheckpointReadError: The files are not what the launching machine found, or lack a tensor of this rank.
            ValueError: The run was given no checkpoint.
        """
        if self._checkpoints is None:
            raise ValueError("this run was given no checkpoint, so there are no weights")
        with self.announced("checkpoint"):
            self._checkpoints.restore_weights(model)

    def restore_slots(self, parts: Iterable[tuple[HasParameters, HasState]], share: Share | None) -> None:
        """Take part in an elastic run with some slots of a state that no worker has as a whole; as `restore`, for such a state.

        Args:
            parts: Model and optimizer of each slot that this worker has at the start.
            share: Which slots these are; None for a worker that comes later.

        Raises:
            CheckpointReadError: As for `restore`.
            LeftError: The run needs this worker no more.
        """
        assert self.elastic is not None  # noqa: S101 - only an elastic run cuts its state
        if self._checkpoints is not None and share is not None:
            with self.announced("checkpoint"):
                for model, optimizer in parts:
                    self._checkpoints.restore(model, optimizer, state=self._state(self.steps_done))
        applied, shares = (None, ()) if share is None else (self.steps_done, (share,))
        self.step = self.steps_done = self.elastic.join(None, applied=applied, shares=shares)

    def first_hosts(self) -> list[str]:
        """Return the host of each worker that starts with the run, by its number."""
        later = self._world.later or (False,) * self._world.size
        return [host for host, is_later in zip(self._world.hosts, later, strict=True) if not is_later]

    def compare(self, step: int, held: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Let the launcher compare tensors of this rank with those of other ranks that have the same names, if that is due.

        It is due before the first step, every `training_config.verify_interval` steps and with each checkpoint, so on all ranks
        after the same steps. If the bits of a tensor differ, the run fails with R009.

        Args:
            step: The number of updates in the tensors.
            held: Returns the tensors by name; called only if a comparison is due.

        Cost: no message and no wait; see `ReplicaDigests.report`.
        """
        if self._digests is None:
            return
        interval, ends = self._digests.interval, {self.steps_done, self._required_data().total_steps}
        if step in ends or (interval is not None and step % interval == 0) or self._has_checkpoint(step):
            self._report_digests(step, held)

    def _report_digests(self, step: int, held: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        if self._digests is not None:
            with self.announced("comparison of replicas"):
                self._digests.report(step, held())

    def checkpoint(self, step: int, model: HasParameters, optimizer: HasState, *, owners: Sequence[Rank] = ()) -> bool:
        """Keep weights and optimizer state of this step, if a checkpoint is due; they are written in the background.

        Call it after the step's validation, and after `agree` on whether training goes on: the last step has one. A rank that is
        no owner but has copies of what owners save may call it, too; its tensors are compared with theirs.

        Args:
            step: The step that has just been done.
            model: This rank's part of it.
            optimizer: The optimizer of this model; its next update waits until the state has been copied.
            owners: The ranks that save; together they hold the whole model. Empty: those of this rank's role.

        Returns:
            Whether this rank saves this step.

        Cost: no message; a copy of weights and state, which stays in host memory, and as much written to the disk.
        """
        owners = owners or self.ranks(self.role)
        if self._checkpoints is None:
            return False
        self._checkpoints.check_saveable(model, optimizer)
        if not self._has_checkpoint(step):
            return False
        # Digests come first: the launcher completes a checkpoint only when those of its step agree.
        self._report_digests(step, partial(held_tensors, model, optimizer))
        if self.rank in owners:
            state = self._state(step) | {"loss_scaler": optimizer.scaler_state()}
            with self.announced("checkpoint"):
                # Launcher and files know members of an elastic run by their numbers.
                numbers = owners if self.elastic is None else [Rank(self.elastic.numbers[rank]) for rank in owners]
                self._checkpoints.save(step, model, optimizer, owners=numbers, state=state)
        return self.rank in owners

    def save_if_abandoned(
        self,
        model: HasParameters,
        optimizer: HasState,
        *,
        has_all: Callable[[int], bool] | None = None,
        newest: Callable[[int], int] | None = None,
    ) -> None:
        """Save this rank's state on its host if an elastic run loses its coordinator; the rank has all weights and their state.

        A run that resumes from this run finds the state there. The rank that has the newest state of a host saves it, others do
        nothing.

        Args:
            model: The whole model.
            optimizer: What belongs to it.
            has_all: Whether this rank has all of them after a step, where not every rank has; None: every rank has.
            newest: Returns which step `model` has after this rank has made some, where it is not the last of them; None: it is.
        """
        if self.elastic is None or self._checkpoints is None:
            return
        checkpoints, number = self._checkpoints, Rank(self.elastic.own.number)

        def save(step: int) -> None:
            if has_all is not None and not has_all(step):
                return
            step = step if newest is None else newest(step)
            state = self._state(step) | {"loss_scaler": optimizer.scaler_state()}
            checkpoints.save_last_state(step, model, optimizer, number=number, state=state)

        self.elastic.save_with(save)

    def save_slots_if_abandoned(self, held: Callable[[], HeldSlots | None]) -> None:
        """Save the slots of the state that this rank has if the supervisor is gone; where `held` returns None, nothing is saved."""
        if self.elastic is not None and (checkpoints := self._checkpoints) is not None:
            self.elastic.save_with(lambda _: checkpoints.save_last_slots(held(), state_of=self._state))

    def _has_checkpoint(self, step: int) -> bool:
        if self._checkpoints is None:
            return False
        is_last = self.early_stop.is_over or self.should_stop()
        last_step = step if is_last else self._required_data().total_steps
        return self._checkpoints.is_due(step, last_step=last_step)

    def announced(self, phase: str) -> AbstractContextManager[None]:
        """Announce a block that may take long, such as an evaluation, so that it does not count as a hang.

        The verbs of this context announce checkpoints, `validation_losses` evaluations.
        """
        found = _NOTHING if self.traffic.recorder is None else self.traffic.recorder.announced(phase)
        return found if self.elastic is None else self.elastic.long(found)

    def finish(self) -> None:
        """Wait for what is still being written; the runtime calls it when the role's function has returned."""
        self.finish_checkpoint()
        self.traffic.close()

    def finish_checkpoint(self) -> None:
        """Wait until this rank writes nothing of a checkpoint any more."""
        if self._checkpoints is not None:
            with self.announced("checkpoint"):
                self._checkpoints.finish()

    def _state(self, step: int) -> dict[str, Any]:
        """Return the state besides tensors that a resumed run needs; learning rate and dropout masks follow from the step alone."""
        return {"data": self._required_data().position(step), "early_stop": self.early_stop.state()}

    def _required_data(self) -> TrainingData:
        assert self._data is not None  # noqa: S101 - whoever has a model has asked the data for its vocabulary
        return self._data

    def gradient_tree(self, weights_N: Tensor) -> GradientTree:
        """An empty tree for gradients of as many values as these weights have, on their device."""
        return GradientTree(weights_N.numel(), device=weights_N.device)

    def report(self, step: int, **values: float) -> None:
        """Report that a step is done, with its loss and other numbers.

        `loss` is the mean per token of what this rank has seen, `tokens` how many those were; further `grad_norm` and
        the like. A trainer with data of its own gives `samples` in place of `tokens`. Images count as samples.

        Raises:
            TypeError: A value is not a number.
            ValueError: The step is not a whole number from 1, or the number of tokens or samples is negative.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise ValueError(f"step {step!r} is not a whole number from 1")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} is not a number; convert a tensor with `.item()`")
        for name in contract.COUNTED:
            if values.get(name, 0) < 0:
                raise ValueError(f"{name}={values[name]} is less than none")
        if self.elastic is not None and self._data is not None:  # none is a number, too: servers differentiate nothing
            values[f"{contract.OWN}tokens"] = self.elastic.take_trained()
        if self._data is not None:  # for images, loops and recipes count in `tokens` what are samples
            counts = self._data.counts
            names = {prefix + "tokens": prefix + counts for prefix in ("", contract.OWN)}
            values = {names.get(name, name): value for name, value in values.items()}
        self.traffic.end_step()
        self._records.write(contract.KIND_STEP, step=step, **values)

    def report_update(self, step: int, *, task: int, parts: Iterable[tuple[int, int, int]], epoch: int = 0) -> None:
        """Record what an update is made of, so that `ttlaunch repro` can make it again, in one process, with the same bits.

        Args:
            step: The number of the update.
            task: The step whose data its gradients were computed from.
            parts: Rows of micro-batches in the order in which gradients were added: the first, one past the last, the updates in the weights.
            epoch: The epoch of an elastic run in which it is made; what a worker made that was then lost is made anew in a later one.
        """
        self._records.write(contract.KIND_UPDATE, step=step, task=task, parts=list(map(list, parts)), epoch=epoch)

    def report_validation(
        self, step: int, losses: Iterable[float], *, tokens: int, reporter: Rank | None = None
    ) -> None:
        """Report the mean of a validation after `step`, from its summed losses by micro-batch, added in that order.

        All ranks that know the losses call this; with a `reporter` only that one writes them down.
        """
        values = self._required_data().validation_values(list(losses), tokens=tokens)
        is_last = step == self._required_data().total_steps
        self.early_stop.observe(step, values["loss"], is_last=is_last)
        if reporter in {None, self.rank}:
            self._records.write(contract.KIND_VALIDATION, step=step, **values)
            if self.early_stop.is_over and not is_last:
                self.result("stopped early", self.early_stop.reason())

    def report_layer_norms(self, step: int, norms: Mapping[str, float]) -> None:
        """Report the norms of the gradients of layers, by name; together all callers have each layer once."""
        self._records.write(contract.KIND_LAYER_NORMS, step=step, norms=dict(norms))

    def report_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Report a digest of each parameter that this rank holds; the launcher compares the digests of all ranks that hold it."""
        self._records.write(contract.KIND_PARAMETERS, digests=digests(named_parameters))

    def report_not_finite(self, step: int, *, micro_batch: int, loss: float) -> None:
        """Report a micro-batch whose loss is NaN or infinite."""
        self._records.write(contract.KIND_NOT_FINITE, step=step, micro_batch=micro_batch, loss=loss)

    def result(self, name: str, value: float | str) -> None:
        """Add a value to the run's summary."""
        self._records.write(contract.KIND_RESULT, values={name: value})

    def note(self, text: str) -> None:
        """Show a line to the user while the run continues."""
        self._records.write(contract.KIND_NOTE, text=text)


def build_data(corpus: Corpus, cfg: TrainingFile) -> TrainingData:
    """Cut a text into sequences, or rows into images, or draw sequences.

    Raises:
        CorpusError: It is too short, or not what the model is for.
    """
    if is_synthetic(cfg):
        return SyntheticData(corpus, cfg)
    return ImageData(corpus, cfg) if has_images(cfg) else TextData(corpus, cfg)
