"""The checkpoints of a rank: restore what the run begins from, know when one is due, and write this rank's shard."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ttlaunch import contract
from ttlaunch.diagnostics.suggest import listed
from ttlaunch.runtime.checkpoint.image import ShardImage
from ttlaunch.runtime.checkpoint.last_state import save_last_slot, save_last_state
from ttlaunch.runtime.checkpoint.reader import CheckpointReadError, read_tensors
from ttlaunch.runtime.checkpoint.writer import Shard, ShardWriter
from ttlaunch.runtime.model.split import Split
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import CheckpointConfig

CODEC_PREFIX = "codec."
"""Begins the names of codec residuals in an optimizer's state; a checkpoint of other senders lacks them."""


class HasParameters(Protocol):
    """The part of a model that checkpoints use."""

    @property
    def copies(self) -> Collection[str]:
        """Parameters, or numbers of the optimizer's, that another rank writes."""

    @property
    def splits(self) -> Mapping[str, Split]:
        """For each parameter that the rank has only in part: which of its values."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...

    def names_of_whole(self) -> Collection[str]: ...


class HasState(Protocol):
    """The part of an optimizer that checkpoints use."""

    def named_state(self) -> Iterable[tuple[str, Tensor]]: ...

    def wait_before_update(self, ready: Callable[[], object]) -> None: ...

    def scaler_state(self) -> Mapping[str, Any] | None: ...

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None: ...


@runtime_checkable
class HasOwnState(Protocol):
    """An optimizer with state that only this rank has, and that a checkpoint may lack."""

    def names_that_may_be_missing(self) -> Collection[str]: ...


@dataclass(frozen=True)
class HeldSlots:
    """What a worker has of a state that no worker has as a whole.

    Attributes:
        step: The steps in it.
        owners: The numbers of the workers that own a slot each.
        slots: For each slot that this worker has: the number of its owner, the slot's parameters, and their optimizer.
    """

    step: int
    owners: tuple[int, ...]
    slots: tuple[tuple[int, HasParameters, HasState], ...]


class Checkpoints:
    """A rank's checkpoints.

    Attributes:
        steps_done: Steps that were done before this run began; 0 unless it goes on from a checkpoint.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        *,
        run_dir: Path,
        rank: Rank,
        start: Mapping[str, Any] | None = None,
        lose: Callable[[int, str], None],
    ) -> None:
        """Note the checkpoint or weights that the run begins from, without reading them.

        Args:
            cfg: When checkpoints are due, and what a failed one means.
            run_dir: Below which shards are written.
            rank: The rank whose shards they are.
            start: `World.start`.
            lose: Called with the step of a checkpoint that is missing, and the reason.
        """
        self.steps_done = int(start["step"]) if start else 0
        self._cfg = cfg
        self._rank = rank
        self._start = start
        self._lose = lose
        self._run_dir, self._writer = run_dir, ShardWriter(run_dir)
        self._image: ShardImage | None = None
        self._imaged: tuple[HasParameters, Collection[str]] | None = None
        self._checked: tuple[object, object] | None = None

    def check_saveable(self, model: HasParameters, optimizer: HasState) -> None:
        """Check that both have what checkpoints use, so that a run does not end at its first checkpoint, hours later.

        Raises:
            TypeError: One of them lacks an attribute.
        """
        if self._checked == (model, optimizer) or self._cfg.interval is None:
            return
        for one, protocol in ((model, HasParameters), (optimizer, HasState)):
            missing = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(one, name)]
            if missing:
                kind = type(one).__name__
                raise TypeError(
                    f"checkpoints need {listed(missing, last='and')} of {kind}, which has no such attribute"
                )
        self._checked = model, optimizer

    def is_due(self, step: int, *, last_step: int) -> bool:
        """Whether a checkpoint follows a step: at every interval, and after the last."""
        interval = self._cfg.interval
        return interval is not None and (step % interval == 0 or step == last_step)

    def restore(self, model: HasParameters, optimizer: HasState, *, state: Mapping[str, Any]) -> None:
        """Overwrite weights and optimizer state with those of the checkpoint, or the weights alone with those of a file.

        Args:
            model: This rank's part of it; what it holds is found by names, so any layout may have written it.
            optimizer: The optimizer of this model.
            state: What the data says its position is, to be compared with the checkpoint's.

        Raises:
            CheckpointReadError: The files are not what the launcher found, or lack something.
            TypeError: The model or the optimizer lacks an attribute that checkpoints use.
        """
        self.check_saveable(model, optimizer)
        if self._start is None:
            return
        wanted = dict(held_tensors(model, optimizer if self.steps_done else None))
        stored = self._start.get("state")
        if stored is not None and stored["data"] != state["data"]:
            raise CheckpointReadError(
                f"the checkpoint's next sample is {stored['data']}, this run's is {state['data']}"
            )
        known = None if self.steps_done else model.names_of_whole()
        optional = {name for name in wanted if name.startswith(contract.OPTIMIZER_PREFIX + CODEC_PREFIX)}
        if isinstance(optimizer, HasOwnState):
            optional |= {f"{contract.OPTIMIZER_PREFIX}{name}" for name in optimizer.names_that_may_be_missing()}
        read_tensors(self._start["files"], into=wanted, known=known, optional=optional)
        if stored is not None:
            optimizer.restore_scaler(stored.get("loss_scaler"))

    def restore_weights(self, model: HasParameters) -> None:
        """Overwrite the weights of a model with those of the checkpoint; see `RankContext.restore_weights`."""
        if self._start is None:
            raise ValueError("this run was given no checkpoint, so there are no weights")
        read_tensors(self._start["files"], into=dict(held_tensors(model)))

    def save(
        self, step: int, model: HasParameters, optimizer: HasState, *, owners: Sequence[Rank], state: Mapping[str, Any]
    ) -> None:
        """Begin to write this rank's shard; waits only if the previous one is still being written.

        Copying happens in the background too: the optimizer's next update waits for it, which comes after a forward and
        a backward pass.
        """
        # There is one image: its bytes must be on the disk before the next checkpoint overwrites them.
        self._writer.wait()
        self.check()
        self._image = self._image_of(model, optimizer)
        copied = self._writer.start(Shard(step, self._rank, owners, state), self._image)
        optimizer.wait_before_update(copied)

    def save_last_state(
        self, step: int, model: HasParameters, optimizer: HasState, *, number: Rank, state: Mapping[str, Any]
    ) -> None:
        """Save the whole state on this host, as a worker that ends because its run has lost its coordinator.

        Args:
            step: The steps in the state; nothing is saved if this run has made none of them.
            model, optimizer: What `save` takes.
            number: The number of this worker.
            state: What else training goes on from.

        Raises:
            CheckpointWriteError: The state cannot be written; nothing of it is left.
        """
        if step <= self.steps_done:
            return
        self._writer.wait()  # it writes from the memory that a second image would double
        image = self._image_of(model, optimizer)
        save_last_state(self._run_dir, image, shard=Shard(step, number, (number,), state))

    def save_last_slots(self, held: HeldSlots | None, *, state_of: Callable[[int], Mapping[str, Any]]) -> None:
        """Save slots of a state that no worker has as a whole on this host; as `save_last_state`, for such a state.

        Args:
            held: What this worker has; if that is all of it, this is `save_last_state`. None: nothing.
            state_of: Returns what else training goes on from after a step, without the loss scale.

        Raises:
            CheckpointWriteError: A slot cannot be written; those before it stay.
        """
        if held is None or held.step <= self.steps_done:
            return
        self._writer.wait()
        for number, model, optimizer in held.slots:
            whole = {**state_of(held.step), "loss_scaler": optimizer.scaler_state()}
            shard = Shard(held.step, Rank(number), tuple(map(Rank, held.owners)), whole)
            save = save_last_state if held.owners == (number,) else save_last_slot
            save(self._run_dir, self._image_of(model, optimizer), shard=shard)

    def _image_of(self, model: HasParameters, optimizer: HasState) -> ShardImage:
        """Return the image of the last checkpoint, if it has the same tensors."""
        # A pipeline's blocks may have moved to another model, and a worker of an elastic run may have another place.
        owned = _owned(model, optimizer)
        if self._image is not None and self._imaged == (model, owned.keys()):
            return self._image
        self._imaged = model, owned.keys()
        return ShardImage(owned)

    def check(self) -> None:
        """Report that a shard could not be written, if so.

        Raises:
            CheckpointWriteError: If the configuration says that this ends the run.
        """
        error = self._writer.take_error()
        if error is not None and self._cfg.on_error == "stop":
            raise error
        if error is not None:
            self._lose(error.step, error.reason)

    def finish(self) -> None:
        """Wait until nothing is being written any more; call when the role is done."""
        self._writer.wait()
        self.check()


def held_tensors(model: HasParameters, optimizer: HasState | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a model and its optimizer that this rank holds, under the names that checkpoints have for them.

    In a run without checkpoints, a trainer's own model and optimizer may lack what only checkpoints use.
    """
    return _stored(_tensors(model, optimizer), model)


def _tensors(model: HasParameters, optimizer: HasState | None) -> Iterator[tuple[str, str, Tensor]]:
    """List this rank's tensors: name in the shard, name of the parameter that the tensor is about, and the tensor.

    Weights have their own names, optimizer state stands beside them.
    """
    for name, parameter in model.named_parameters():
        yield name, name, parameter.detach()
    for name, tensor in optimizer.named_state() if optimizer is not None and hasattr(optimizer, "named_state") else ():
        yield f"{contract.OPTIMIZER_PREFIX}{name}", name.partition(".")[2], tensor


def _stored(tensors: Iterable[tuple[str, str, Tensor]], model: HasParameters) -> Iterator[tuple[str, Tensor]]:
    """Name tensors as files do: a part of a tensor that ranks split has a name that shows which values it has."""
    for name, parameter, tensor in tensors:
        split = getattr(model, "splits", {}).get(parameter)
        if split is None or tensor.shape != split.local_shape:  # of a count of updates every rank has all
            yield name, tensor
        else:
            yield from ((str(part), piece) for part, piece in split.parts(name, tensor))


def _owned(model: HasParameters, optimizer: HasState) -> dict[str, Tensor]:
    """Select the tensors that this rank writes, without those that another rank writes."""
    copies = model.copies
    owned = [
        (name, parameter, tensor)
        for name, parameter, tensor in _tensors(model, optimizer)
        if not any(name == copy or name.endswith(f".{copy}") for copy in copies)
    ]
    return dict(_stored(owned, model))
