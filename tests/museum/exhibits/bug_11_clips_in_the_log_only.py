"""Bug 11: clipping is configured and logged as on, and never applied.

The reported norm is right in the first step, so nothing in the log tells. The parameters do.
"""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def update(self, step, norm):
        return super().update(step, min(norm, self.cfg.training_config.clip_grad_norm_max_norm))  # the bug


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
