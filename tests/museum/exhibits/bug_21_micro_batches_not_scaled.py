"""Bug 21: each micro-batch's mean loss is differentiated, and their gradients are added without a division by their number.

With eight micro-batches the gradient is eight times too long; clipping hides it from the update's size, and not from the norm.
"""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def reduce(self):
        loss, tokens = super().reduce()
        self.model.grads_N.mul_(self.cfg.training_config.micro_batches)  # the bug
        return loss, tokens


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
