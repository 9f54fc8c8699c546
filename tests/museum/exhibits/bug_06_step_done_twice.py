"""Bug 6: a checkpoint after step N says N, and resuming begins with N: it is done twice."""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def steps(self):
        return range(self.ctx.steps_done or 1, self.cfg.training_config.steps + 1)  # the bug


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
