"""Bug 12: optimizer state is sharded, the data is not: every worker differentiates the whole step and divides by their number.

Four workers do the same work four times, and the gradient is a quarter of what it should be.
"""

import torch

from tests.museum.loop import Worker, trainer  # noqa: F401  a role
from ttlaunch.train import micro_batches


class Wrong(Worker):
    def batches(self, step):
        return micro_batches(self.cfg, self.ctx, step)  # the bug: all of them, on every worker

    def reduce(self):
        (node,) = self.sums.subtrees()
        mean_N, loss, tokens = node.gradient_N / node.tokens, node.loss / node.tokens, node.tokens
        self.sums.clear()
        self.model.grads_N.copy_(torch.div(mean_N, len(self.workers)))
        return loss, tokens


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
