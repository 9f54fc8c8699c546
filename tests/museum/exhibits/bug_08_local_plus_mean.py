"""Bug 8: the mean over the workers is added to a worker's own gradient instead of taking its place.

The gradient is then longer by each worker's own, so replicas drift apart: every one follows its own data a little more.
"""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def reduce(self):
        (node,) = self.sums.subtrees()
        own_N = node.gradient_N / node.tokens
        loss, tokens = super().reduce()
        self.model.grads_N.add_(own_N)  # the bug
        return loss, tokens


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
