"""What members get at the begin of an epoch: a new keeper the whole state, everybody else the weights.

keeper 0 -- bytes 0 .. S/2 --> member <-- bytes S/2 .. S -- keeper 1        each gives an equal part
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ttlaunch.membership.messages import Begin
from ttlaunch.membership.slots import sources_of_state
from ttlaunch.runtime.checkpoint.checkpoints import HasState
from ttlaunch.runtime.comm.grpc.vectors import Key
from ttlaunch.runtime.early_stop import EarlyStop
from ttlaunch.runtime.elastic.state_transfer import Puller, ReplicaState, SharedParts
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.training.optimizers import Optimizer
from ttlaunch.runtime.world import Rank

_STATE, _WEIGHTS = "state", "weights"


class KeptState:
    """The weights and the optimizer's state of one member, with the step after which each was so.

    Attributes:
        at: The last step in weights and optimizer state together; None if this member has no such state.
        weights_at: The last step in the weights; None while they are overwritten.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, early_stop: EarlyStop, *, state: HasState | None = None
    ) -> None:
        """Refer to the tensors; nothing is copied. `state` is what keepers have beside the weights, if it is more than the optimizer's."""
        self._whole = ReplicaState(model, state or optimizer, early_stop)
        self._weights = ReplicaState(model, _Scaler(optimizer), early_stop)
        self.at: int | None = None
        self.weights_at: int | None = None

    def begin_with(self, step: int | None) -> None:
        """Note that all of the state is that of a step; None: it is not that of the run."""
        self.at = self.weights_at = step

    def give(self, parts: SharedParts, begin: Begin, *, own: int, keepers: Sequence[int]) -> None:
        """Copy this member's part of what others may lack, if it has the state from which the epoch starts.

        Args:
            parts: Gets the copies.
            begin: The begin of the epoch.
            own: The number of this member.
            keepers: The numbers of those that keep the state from now on.

        Cost: a copy of a part of the weights; of the optimizer's state, too, if a keeper is new. They stay until `parts.forget`.
        """
        parts.forget()
        sources = sources_of_state(begin)
        if own not in sources:
            return
        held = {_WEIGHTS: self._weights}
        if not set(keepers) <= set(sources):
            held[_STATE] = self._whole
        for name, state in held.items():
            part = state.parts(len(sources))[sources.index(own)]
            parts.hold(Key(name, begin.applied, part.start, part.stop, epoch=begin.epoch), state.copy(part))

    def take(self, puller: Puller, begin: Begin, *, is_keeper: bool) -> Mapping[int, int]:
        """Get what this member lacks of the state from which the epoch starts; return how many bytes each source has given, by number.

        Raises:
            EpochOverError, CommunicationError: As for `Puller.pull`.

        Cost: nothing if it lacks nothing; 4 bytes a parameter for the weights, 12 with the state of AdamW.
        """
        lacks_state = is_keeper and self.at != begin.applied
        if not lacks_state and self.weights_at == begin.applied:
            return {}
        sources = sources_of_state(begin)
        ranks = [Rank(begin.numbers.index(number)) for number in sources]
        name, state = (_STATE, self._whole) if lacks_state else (_WEIGHTS, self._weights)
        self.at = self.weights_at = None
        given = puller.pull_parts(Key(name, begin.applied, 0, 0, epoch=begin.epoch), state, sources=ranks)
        self.weights_at = begin.applied
        self.at = begin.applied if lacks_state else None
        return dict(zip(sources, given, strict=True))


class _Scaler:
    """An optimizer without its state of each parameter: what else a step depends on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.scaler_state, self.restore_scaler = optimizer.scaler_state, optimizer.restore_scaler
        self.wait_before_update = optimizer.wait_before_update

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())
