"""Bug 9: an optimizer that owns a part of the parameters zeroes only their gradients; the others' go on adding up.

Each worker updates its half and gathers the other one. Its `zero_grad` leaves the gradients of the other half in place, and the
next step's are added to them; from the second step on the mean is that of all steps so far.
"""

import torch

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def reduce(self):
        left_N = getattr(self, "left_N", torch.zeros_like(self.model.grads_N))
        loss, tokens = super().reduce()
        self.model.grads_N.add_(left_N)
        return loss, tokens

    def update(self, step, norm):
        self.left_N = self.model.grads_N.clone()
        half = len(self.left_N) // 2
        own = slice(0, half) if self.ctx.rank == self.workers[0] else slice(half, None)
        self.left_N[own] = 0  # the bug: only its own half
        return super().update(step, norm)


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
