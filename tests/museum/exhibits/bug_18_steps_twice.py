"""Bugs 18 and 20: the optimizer is stepped in the loop, and once more by whoever calls it.

AdamW's second step with a gradient of zero still moves every weight by its momentum, and decays it again.
"""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def update(self, step, norm):
        super().update(step, norm)
        self.optimizer.update(step)  # the bug


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
