"""What checkpoints have of codecs: what each rank still owes goes on with the training.

A codec's state belongs to one sender, so its tensors carry the sender's name. A run with other senders than the
checkpoint's goes on with the states of those that it has; a sender that was not there owes nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ttlaunch.runtime.checkpoint.checkpoints import CODEC_PREFIX, HasState
from ttlaunch.runtime.compression.codec import Codec
from ttlaunch.runtime.tensor.split import Split


class CodecState:
    """An optimizer and the codec of one sender as one state, for `ctx.restore` and `ctx.checkpoint`.

    Attributes:
        of_codec: The codec's part alone, as a model without parameters and as a state, for ranks whose weights and
            optimizer another rank writes.
    """

    def __init__(self, optimizer: HasState, codec: Codec, *, sender: str) -> None:
        """Look at both.

        Args:
            optimizer: Over the model of this rank.
            codec: That this rank encodes with.
            sender: A name that no other rank's codec has.
        """
        self._optimizer = optimizer
        self._codec = codec
        self._prefix = f"{CODEC_PREFIX}{sender}."
        self._ready: Callable[[], object] | None = None
        self.of_codec = _CodecAlone(self)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's, then `codec.SENDER.NAME`; the tensors themselves."""
        yield from self._optimizer.named_state()
        yield from self.codec_state()

    def codec_state(self) -> Iterator[tuple[str, Tensor]]:
        """The second part of `named_state`."""
        return ((self._prefix + name, tensor) for name, tensor in self._codec.state().items())

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        """Let the next update, and the codec's next `encode`, begin only when `ready()` has returned."""
        self._optimizer.wait_before_update(ready)
        self._ready = ready

    def wait_before_encode(self) -> None:
        """Return when nobody reads the codec's state any more; call before each `encode`."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()

    def scaler_state(self) -> Mapping[str, Any] | None:
        return self._optimizer.scaler_state()

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        self._optimizer.restore_scaler(state)


class _CodecAlone:
    """What is left of a shard without weights and optimizer."""

    copies: frozenset[str] = frozenset()

    def __init__(self, whole: CodecState) -> None:
        self._whole = whole
        self.splits: Mapping[str, Split] = {}
        self.wait_before_update = whole.wait_before_update
        self.scaler_state = whole.scaler_state
        self.restore_scaler = whole.restore_scaler

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def names_of_whole(self) -> frozenset[str]:
        return frozenset()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole.codec_state()
