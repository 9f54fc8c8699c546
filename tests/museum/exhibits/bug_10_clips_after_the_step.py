"""Bug 10: the gradient is clipped after the optimizer has used it.

The log says that gradients are clipped, and they are, when nobody needs them any more.
"""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def update(self, step, norm):
        self.optimizer.update(step)
        self.optimizer.clip(self.model.grads_N, norm=norm)  # the bug: one line too late
        self.optimizer.end_step()
        self.model.zero_grad()


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
