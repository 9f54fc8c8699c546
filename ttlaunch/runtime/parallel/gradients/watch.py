"""Notices during a backward pass which buckets have all of their gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import ref

from torch import nn

from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.buckets import Bucket

_Ready = Callable[[Bucket], None]


class GradientWatch:
    """Hooks on all parameters, which do nothing except in the passes that `begin` announces.

    Every parameter must get its complete gradient at once, as it does from one call of `backward()`.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._ready: _Ready | None = None
        self._buckets: Sequence[Bucket] = ()
        self._bucket_of: list[int] = []
        self._missing: list[int] = []
        self._next = 0
        # Weak: torch holds hooks where Python's garbage collector does not look, and the parameters with them for ever.
        watch = ref(self)
        for place, parameter in enumerate(flat.parameters):
            parameter.register_post_accumulate_grad_hook(partial(_note_gradient, watch, place))

    def begin(self, buckets: Sequence[Bucket], ready: _Ready) -> None:
        """Call `ready` for each bucket, in their order, when this bucket and all before it are complete in `grads_N`.

        The calls come from within the backward pass that follows, and from `end()`.
        """
        if buckets is not self._buckets:
            self._buckets = buckets
            self._bucket_of = [0] * len(self._flat.parameters)
            for bucket in buckets:
                for place in bucket.parameters:
                    self._bucket_of[place] = bucket.index
        self._missing = [len(bucket.parameters) for bucket in buckets]
        self._next = 0
        self._ready = ready

    def stop(self) -> None:
        """Give up the pass that `begin` has announced; `ready` is not called any more."""
        self._ready = None

    def end(self) -> None:
        """Note that the pass is over: the remaining buckets get no further gradients. A parameter without a gradient counts as zero."""
        ready, self._ready = self._ready, None
        if ready is None:
            return
        for bucket in self._buckets[self._next :]:
            for place in bucket.parameters:
                self._flat.attach_gradient(place)
            ready(bucket)

    def note_gradient(self, place: int) -> None:
        """Note that the gradient of a parameter is complete."""
        if self._ready is None:
            return
        self._flat.attach_gradient(place)
        self._missing[self._bucket_of[place]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._next += 1
            self._ready(self._buckets[self._next - 1])


def _note_gradient(watch: "ref[GradientWatch]", place: int, _parameter: nn.Parameter) -> None:
    if (found := watch()) is not None:
        found.note_gradient(place)
