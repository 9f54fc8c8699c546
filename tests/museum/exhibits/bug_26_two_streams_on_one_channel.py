"""Bug 26: two conversations share one channel, and each takes what comes, whosever it is.

There they were two chats whose tokens got mixed; here they are two steps that are under way at the same time, and a part of
one step's gradient ends in the other's.
"""

from ttlaunch.runtime.parallel.staleness.exchange import BoundedMeans
from ttlaunch.runtime.parallel.staleness.ring import RingBuffers


class Wrong(BoundedMeans):
    def __init__(self, model, *, ctx, among, bound, **options):
        super().__init__(model, ctx=ctx, among=among, bound=bound, **options)
        self._rings = [RingBuffers(ctx, among=among, like_N=model.grads_N, tag=0) for _ in range(bound + 1)]  # the bug


MEANS = Wrong
