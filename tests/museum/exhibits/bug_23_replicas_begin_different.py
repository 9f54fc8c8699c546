"""Bug 23: every worker draws its weights from its own generator, and nobody sends the first ones round."""

import torch

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def restore(self):
        generator = torch.Generator().manual_seed(self.ctx.rank)  # the bug
        with torch.no_grad():
            self.model.weights_N.normal_(0, 0.02, generator=generator)


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
