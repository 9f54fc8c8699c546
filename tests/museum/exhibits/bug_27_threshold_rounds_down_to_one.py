"""Bug 27: a worker goes on once `int(0.75 * W)` gradients are there; with two workers that is one, its own.

Nothing is averaged: two trainings run side by side, and each reports a loss that falls.
"""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def reduce(self):
        enough = int(0.75 * len(self.workers))  # the bug
        if enough > 1:
            return super().reduce()
        (node,) = self.sums.subtrees()
        self.model.grads_N.copy_(node.gradient_N / node.tokens)
        loss, tokens = node.loss / node.tokens, node.tokens
        self.sums.clear()
        return loss, tokens


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
