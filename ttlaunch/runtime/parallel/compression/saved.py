"""The state of codecs in checkpoints, above all the remainder that each rank will add to its next gradient.

A codec's state belongs to one sender, so its tensors have the sender's name. If a resumed run has other senders than the
checkpoint, senders in both keep their states, new senders begin without a remainder, and those of missing senders are dropped.
A remainder is the rounding error of one gradient, or with `top_k` and `powersgd` what was left out of a few gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ttlaunch.runtime.checkpoint.checkpoints import CODEC_PREFIX, HasState
from ttlaunch.runtime.model.split import Split
from ttlaunch.runtime.parallel.compression.codec import Codec
from ttlaunch.spec.recipe.sections import CompressionConfig


def remembers(cfg: CompressionConfig) -> bool:
    """Return whether a codec of this configuration has a state."""
    return cfg.kind != "none" and (cfg.error_feedback or cfg.kind == "powersgd")


class OwedState:
    """The codecs' states of a rank whose weights and optimizer another rank saves.

    `ctx.restore` and `ctx.checkpoint` take it both in place of the model, as one without parameters, and as the state.
    """

    copies: frozenset[str] = frozenset()

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        """Refer to codecs, each under a name that no other codec of any rank has."""
        self._codecs = codecs
        self._ready: Callable[[], object] | None = None
        self.splits: Mapping[str, Split] = {}

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def names_of_whole(self) -> frozenset[str]:
        return frozenset()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the codecs, not copies, under the names `codec.SENDER.NAME`."""
        for sender, codec in self._codecs.items():
            yield from ((f"{CODEC_PREFIX}{sender}.{name}", tensor) for name, tensor in codec.state().items())

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        """Let the next `encode` begin only when `ready()` has returned."""
        self._ready = ready

    def wait_before_encode(self) -> None:
        """Return when no checkpoint is copying the codecs' state; call before each `encode`."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()

    def take_back(self) -> None:
        """Let every codec undo the change of state by its last `encode`."""
        for codec in self._codecs.values():
            codec.take_back()

    def scaler_state(self) -> None:
        """Return None: the ranks that have weights save the loss scale."""

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        del state


class CodecState:
    """An optimizer and the codec of one sender as one state, for `ctx.restore` and `ctx.checkpoint`.

    Attributes:
        owed: The codec's state alone.
    """

    def __init__(self, optimizer: HasState, codec: Codec, *, sender: str) -> None:
        """Refer to an optimizer and a codec.

        Args:
            optimizer: The optimizer of this rank's model.
            codec: The codec that this rank encodes with.
            sender: A name that no other rank's codec has.
        """
        self._optimizer = optimizer
        self.owed = OwedState({sender: codec})

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's tensors, then the codec's as `codec.SENDER.NAME`; none is a copy."""
        yield from self._optimizer.named_state()
        yield from self.owed.named_state()

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        """Let the next update, and the codec's next `encode`, begin only when `ready()` has returned."""
        self._optimizer.wait_before_update(ready)
        self.owed.wait_before_update(ready)

    def scaler_state(self) -> Mapping[str, Any] | None:
        return self._optimizer.scaler_state()

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        self._optimizer.restore_scaler(state)
